"""The events of operations in torch's profilers, named and measured as those of torch's own backends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..distributed.work import Work
from .levels import Level

__all__ = ["Span"]

_PATIENCE_S = 0.05  # with the thread of a level: only a callback keeps it from ending an event at once


class Span:
    """An event from now on, with the shapes of the tensors; on the thread of a level its end is recorded.

    Never on the thread that starts it: this is how the profiler knows an asynchronous event.

    Args:
        name: of the event.
        tensors: what goes in.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]):
        self._record = torch.autograd._record_function_with_args_enter(name, *tensors)
        self._begun_on = threading.get_ident()
        self._ending = threading.Lock()  # guards _record
        self._level: Level | None = None
        self._ended = threading.Event()

    def end_after(self, work: Work | None, level: Level) -> None:
        """Have it end when the operation `work` has; at once when it is None."""
        self._level = level
        if work is None:
            level.thread.soon(self.end)
        else:
            level.thread.after(work, self.end)

    def end(self) -> None:
        """End it. Idempotent."""
        with self._ending:
            record, self._record = self._record, None
        if record is not None:
            torch.autograd._record_function_with_args_exit(record)
        self._ended.set()

    def settle(self) -> None:
        """Have it ended, which its operation has; a profiler that stops then has all of it.

        A callback may hold up the thread of the level; it ends without that one then, and nobody waits for a callback.
        """
        if not self._level.thread.is_current() and self._ended.wait(_PATIENCE_S):
            return
        if threading.get_ident() != self._begun_on:
            self.end()
        else:
            other = threading.Thread(target=self.end, name="bagua-profiling")
            other.start()
            other.join()
