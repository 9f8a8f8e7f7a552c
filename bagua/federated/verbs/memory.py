"""Memory that glibc keeps: rounds over many clients allocate and free gigabytes, which it gives back each time.

The kernel clears every page that a process gets again, which takes as long as computing with it. PyTorch's allocator on
the CPU is malloc itself.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_is_kept = False


def keep_memory() -> bool:
    """Lets this process keep the memory that it frees, and computes more clients at a time for that.

    It holds for the whole process and to its end, so its resident memory stays at its peak. Call it once, before the
    first round; without it, rounds of wide models on the CPU took 1.3 to 2.3 times as long
    (benchmarks/federated/widths.py). With another allocator, such as jemalloc by LD_PRELOAD, it does nothing that
    matters, and is not needed.

    Returns:
        False where the C library is not glibc, and nothing was done.
    """
    global _is_kept
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    _is_kept = bool(library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    return _is_kept


def is_kept() -> bool:
    """Returns whether keep_memory has been called here."""
    return _is_kept
