"""The contenders of an all_reduce: bagua's, torch's gloo and NCCL, OpenMPI.

All contenders of one size exist in one process at once. Input: `x[rank][i] = ((i * size + rank) mod 1999 - 999) /
1024`, which differs for every rank and neighbouring elements, and whose sums are exact in float32. Every contender is
verified before it is timed: full precision must be exact, a codec within its bound, and all ranks equal bit by bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

import bagua
from benchmarks.lib.timing import Contender

# Names in tables -> codec. On the CPU all use memory of bagua.empty, except "ordinary tensor".
_BAGUA = {
    "bagua shared memory": None,
    "bagua ordinary tensor": None,
    "bagua tcp": None,
    "bagua": None,
    "bagua bf16": "bf16",
    "bagua minmax_uint8": "minmax_uint8",
}
GLOO, NCCL, MPI = "gloo", "NCCL", "OpenMPI"
_LARGEST = 999 / 1024


def inner_calls(num_bytes: int) -> int:
    """Returns the number of calls per sample, at most 40, because a SUM in place multiplies by the number of ranks."""
    return max(2, min(40, 16_000_000 // num_bytes))


def verified(
    names: Sequence[str],
    num_bytes: int,
    device: torch.device | None = None,
    torch_groups: Mapping[str, dist.ProcessGroup] | None = None,
) -> dict[str, Contender]:
    """Returns the contenders for one size, after verifying that each computes the right sum.

    Args:
        device: the device of the tensors, by default the CPU; a run includes the device's work.
        torch_groups: torch's groups of the contenders that do not use the default one, by name.
    """
    numel = num_bytes // 4
    original = _input(numel, bagua.get_rank()).to(device)
    expected = torch.zeros(numel)
    for rank in range(bagua.get_world_size()):
        expected += _input(numel, rank)
    contenders = {}
    for name in names:
        is_shared = device is None and name.startswith("bagua") and "ordinary" not in name
        memory = bagua.empty(numel) if is_shared else torch.empty(numel, device=device)
        run = _all_reduce(name, memory, (torch_groups or {}).get(name))
        if device is not None:
            run = _to_the_end(run)
        memory.copy_(original)
        run()
        _verify(name, memory.cpu(), expected)
        contenders[name] = Contender(run, prepare=lambda memory=memory: memory.copy_(original))
    return contenders


def _input(numel: int, rank: int) -> torch.Tensor:
    index = torch.arange(numel, dtype=torch.int64)
    return (((index * bagua.get_world_size() + rank) % 1999) - 999).float() / 1024


def _to_the_end(run: Callable[[], None]) -> Callable[[], None]:
    def run_to_the_end() -> None:
        run()
        torch.accelerator.synchronize()

    return run_to_the_end


def _all_reduce(name: str, memory: torch.Tensor, torch_group: dist.ProcessGroup | None) -> Callable[[], None]:
    if name in (GLOO, NCCL):
        return lambda: dist.all_reduce(memory, group=torch_group)
    if name == MPI:
        from mpi4py import MPI as mpi

        array = memory.numpy()
        return lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, array)
    codec = _BAGUA[name]
    return lambda: bagua.all_reduce(memory, codec=codec)


def _verify(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises if `result` is not the sum, or differs between ranks."""
    size = bagua.get_world_size()
    codec = _BAGUA.get(name)
    # Every rank's input and the sum are rounded: to half a step of (max - min) / 255, or half an ulp of bf16.
    relative = {None: 0.0, "bf16": 2 * 2.0**-8, "minmax_uint8": 2 * 2 / 510}[codec]
    tolerance = relative * size * _LARGEST * 1.01
    error = float((result - expected).abs().max()) if result.numel() else 0.0
    if not error <= tolerance:
        raise RuntimeError(f"{name}, {result.nbytes} bytes: off by {error}, allowed {tolerance}")
    sums = bagua.all_gather_object(zlib.crc32(result.numpy().tobytes()))
    if len(set(sums)) != 1:
        raise RuntimeError(f"{name}, {result.nbytes} bytes: the ranks' results differ (checksums {sums})")
