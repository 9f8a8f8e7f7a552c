"""Errors for threads and file descriptors that have ended, which say what to do.

Beside the data path. The core's own threads are in csrc/common/thread.h.
"""

from __future__ import annotations

import errno
import threading

from bagua.errors import TransportError

__all__ = ["exhausted_error", "start_thread"]

_NO_THREAD = "can't start new thread"  # CPython's words, of a RuntimeError
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


def exhausted_error(error: BaseException, rank: int | None, doing: str = "go on") -> TransportError | None:
    """The error of this rank for threads or descriptors that have ended, which waiting does not mend; else None.

    Args:
        rank: this process's, in the group that the error is for.
        doing: what the rank cannot do.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        why = str(error)
        limits = "`ulimit -u` and `ulimit -v`, or the container's limits of processes and memory"
        remedy = f"raise {limits}, or make fewer groups"
    elif number in _NO_DESCRIPTOR:
        why, remedy = str(error), "raise `ulimit -n`"
    else:
        return None
    return TransportError(f"this rank cannot {doing}: {why}; {remedy}", rank=rank)


def start_thread(thread: threading.Thread, rank: int | None = None) -> None:
    """Starts it.

    Args:
        rank: this process's, in the group that the error is for.

    Raises:
        TransportError: this process can have no more threads.
    """
    try:
        thread.start()
    except RuntimeError as error:
        exhausted = exhausted_error(error, rank, f"start the thread '{thread.name}'")
        if exhausted is None:
            raise
        raise exhausted from error
