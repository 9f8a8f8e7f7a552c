"""The fake libnccl of csrc/tests/fake_nccl/ for ranks that are processes: NCCL between emulated devices.

nccl.build()      # where no deadline runs; about 3 s at the first use on a machine
nccl.use()        # in a rank: the groups that it makes from here on open it as bagua opens NCCL
nccl.calls()      # the calls of this rank, such as "all_reduce 1000"
nccl.leave()      # before other tests use the rank
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import tests.emulated_device as emulated
from bagua import _C

_SOURCES = ("csrc/tests/fake_nccl/fake_nccl.cc", "csrc/tests/fake_nccl/fake_nccl.h", "csrc/transport/nccl/nccl_abi.h")
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-pthread"]


def build() -> Path:
    """Builds the library; returns its file."""
    digest = hashlib.sha256(" ".join([*emulated.compiler(), *_FLAGS]).encode())
    for source in _SOURCES:
        digest.update((emulated.ROOT / source).read_bytes())
    return emulated.built(emulated.FOLDER / f"libnccl_{digest.hexdigest()[:16]}.so", _compile)


def use(path: str | None = None, version: int | None = None) -> None:
    """Makes the library this process's NCCL for its emulated devices, in its initial state.

    Args:
        path: another file to open in its place.
        version: the version that it reports, such as 22703.
    """
    library = _library()
    library.fake_nccl_reset()
    if version is not None:
        library.fake_nccl_set_version(version)
    _C.use_nccl_library(path or str(build()), emulated.NAME)


def leave() -> None:
    """Makes emulated devices have no NCCL again."""
    _C.use_nccl_library("", "cuda")


def hang(rank: int) -> None:
    """Makes operations that a rank of a group enqueues from now on hang until they are aborted."""
    _library().fake_nccl_hang(rank)


def calls() -> list[str]:
    """Returns the calls of this process: "init", "all_reduce 1000", "group{send 1 400, recv 1 400}", "abort", ..."""
    return _library().fake_nccl_calls(-1).decode().splitlines()


def violations() -> str:
    """Returns the calls that NCCL does not allow, one per line."""
    return _library().fake_nccl_violations().decode()


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build()))
    library.fake_nccl_calls.restype = library.fake_nccl_violations.restype = ctypes.c_char_p
    library.fake_nccl_use_device(ctypes.c_void_p(emulated.fake_nccl_device()))
    return library


def _compile(made: Path) -> None:
    unfinished = made.with_suffix(f".{os.getpid()}")
    source = str(emulated.ROOT / _SOURCES[0])
    emulated.run_compiler([*emulated.compiler(), *_FLAGS, f"-I{emulated.ROOT}", source, "-o", str(unfinished)])
    unfinished.replace(made)  # whole, or not there
