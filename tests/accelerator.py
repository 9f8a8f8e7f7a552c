"""Where the bodies of device tests run: on the emulated device, and on GPUs where there are some.

The fixtures alone_on_devices and pair_on_devices (conftest.py) give ranks that have a device, once of each kind; those
of CUDA carry the mark `gpu`. A body asks this module for its device and is otherwise one text for both. What only the
emulated device can show (counters, limits, memory that no host may touch) takes alone_on_emulated or pair_on_emulated.

Ranks that outnumber the GPUs share them: one GPU is enough for every test.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch

import tests.emulated_device as emulated

EMULATED, CUDA = emulated.NAME, "cuda"
# Small tensors are reduced where they are, by the device's kernels, as large ones always are.
ON_DEVICE = {"BAGUA_THRESHOLDS": "on_host_bytes=0"}
_kind = ""  # of this process


@functools.cache
def no_gpu() -> str | None:
    """What keeps tests from running on a GPU here; None: nothing does."""
    from bagua import _C

    missing = []
    if torch.version.cuda is None:
        missing.append(f"a torch with CUDA (found {torch.__version__})")
    if not torch.cuda.is_available():
        missing.append("a GPU (torch.cuda.is_available() is False)")
    if not _C.has_device_runtime(CUDA):
        missing.append("a bagua with CUDA (BAGUA_CUDA=1 make build)")
    return f"needs {', '.join(missing)}" if missing else None


def load_in_rank(rank: int, world_size: int, kind: str) -> None:
    """The first function of a rank: it imports nothing else, as the emulated device asks."""
    global _kind
    if kind == EMULATED:
        emulated.load()
    else:  # convolutions would round their inputs to 10 bits
        torch.backends.cudnn.allow_tf32 = False
    _kind = kind


# ---- in a rank


def kind() -> str:
    """The type of its devices, for torch."""
    return _kind


def is_emulated() -> bool:
    return _kind == EMULATED


def device_of(rank: int) -> torch.device:
    """A device for each rank, shared where there are too few; the same one at each call."""
    return torch.device(_kind, rank % torch.accelerator.device_count())


def use_device_of(rank: int) -> torch.device:
    """device_of, which becomes the thread's current one."""
    device = device_of(rank)
    torch.accelerator.set_device_index(device.index)
    return device


@contextlib.contextmanager
def delayed(seconds: float, stream: torch.Stream | None = None) -> Iterator[None]:
    """What is enqueued in the block is late.

    On the emulated device half of all commands, by up to so much each. On CUDA what goes to the stream, by default the
    current one, which stands still for about so long first.
    """
    if _kind == CUDA:
        with contextlib.nullcontext() if stream is None else stream:
            torch.cuda._sleep(int(seconds * 1.5e9))  # cycles
        yield
        return
    with emulated.delayed(seconds):
        yield


def agree(found: Sequence[torch.Tensor], of_cpu: Sequence[torch.Tensor]) -> bool:
    """Whether a computation on the device came to what it comes to on the CPU.

    To the bit on the emulated device, whose operators are the CPU's. On CUDA, whose operators round otherwise, to 1e-4,
    but for one element in 50: a code that falls on the other side of a rounding is a step of its grid away, and Adam
    makes whole steps of gradients that are nothing but rounding, as of a bias in front of a BatchNorm. What is only
    moved or added by bagua has the CPU's bits there, too; compare that with torch.equal.
    """
    if _kind == EMULATED:
        return all(torch.equal(one.cpu(), other) for one, other in zip(found, of_cpu, strict=True))
    num_wrong = sum(
        int((~torch.isclose(one.cpu(), other, rtol=1e-4, atol=1e-5, equal_nan=True)).sum())
        for one, other in zip(found, of_cpu, strict=True)
    )
    return 50 * num_wrong <= sum(tensor.numel() for tensor in of_cpu)
