"""The ways of doing one all_reduce that all_reduce.py and tcp_hosts.py compare: bagua's, gloo, OpenMPI.

All of one size live in one process at once. Input: `x[rank][i] = ((i * size + rank) mod 1999 - 999) / 1024`, different
for every rank and neighbouring elements; sums of it are exact in float32. Every contender is verified on it before
it is timed: full precision must be exact, a codec within its bound, and all ranks equal bit by bit.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

import bagua
from benchmarks.lib.timing import Contender

# Name in the tables -> codec; the memory is bagua.empty's for all but "ordinary tensor".
_BAGUA = {
    "bagua shared memory": None,
    "bagua ordinary tensor": None,
    "bagua tcp": None,
    "bagua bf16": "bf16",
    "bagua minmax_uint8": "minmax_uint8",
}
GLOO, MPI = "gloo", "OpenMPI"
_LARGEST = 999 / 1024


def inner_calls(num_bytes: int) -> int:
    """Calls per sample; at most 40, because every SUM in place multiplies by the number of ranks."""
    return max(2, min(40, 16_000_000 // num_bytes))


def verified(names: Sequence[str], num_bytes: int) -> dict[str, Contender]:
    """The contenders for one size, each of which has just been shown to compute the right sum."""
    numel = num_bytes // 4
    original = _input(numel, bagua.get_rank())
    expected = torch.zeros(numel)
    for rank in range(bagua.get_world_size()):
        expected += _input(numel, rank)
    contenders = {}
    for name in names:
        memory = bagua.empty(numel) if name.startswith("bagua") and "ordinary" not in name else torch.empty(numel)
        run = _all_reduce(name, memory)
        memory.copy_(original)
        run()
        _verify(name, memory, expected)
        contenders[name] = Contender(run, prepare=lambda memory=memory: memory.copy_(original))
    return contenders


def _input(numel: int, rank: int) -> torch.Tensor:
    index = torch.arange(numel, dtype=torch.int64)
    return (((index * bagua.get_world_size() + rank) % 1999) - 999).float() / 1024


def _all_reduce(name: str, memory: torch.Tensor) -> Callable[[], None]:
    if name == GLOO:
        return lambda: dist.all_reduce(memory)
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
    # Two roundings, of every rank's input and of the sum: steps of (max - min) / 255 halved, or half an ulp of bf16.
    relative = {None: 0.0, "bf16": 2 * 2.0**-8, "minmax_uint8": 2 * 2 / 510}[codec]
    tolerance = relative * size * _LARGEST * 1.01
    error = float((result - expected).abs().max()) if result.numel() else 0.0
    if not error <= tolerance:
        raise RuntimeError(f"{name}, {result.nbytes} bytes: off by {error}, allowed {tolerance}")
    sums = bagua.all_gather_object(zlib.crc32(result.numpy().tobytes()))
    if len(set(sums)) != 1:
        raise RuntimeError(f"{name}, {result.nbytes} bytes: the ranks' results differ (checksums {sums})")
