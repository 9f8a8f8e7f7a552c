"""Events of operations in torch's profilers, named and measured like those of torch's own backends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..distributed.work import Work
from ..torch_version import is_torch_at_least
from .callback_levels import Level

__all__ = ["Span"]

# Before, what ends on another thread than it has begun on is not in the profile.
_MAY_END_ELSEWHERE = is_torch_at_least(2, 12)
_FINALIZE_WAIT_S = 0.05  # for the level's thread, which ends an event at once unless a callback is running on it


class Span:
    """An event that begins now, with the shapes of the tensors; its end is recorded on the thread of a level.

    Never on the thread that begins it: that is how the profiler recognises an asynchronous event. With a torch that
    cannot have that it ends once the operation has been started, and there.

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
        """End it when the operation `work` ends; soon if that is None."""
        self._level = level
        if not _MAY_END_ELSEWHERE:
            self.end()
        elif work is None:
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

    def finalize(self) -> None:
        """Make sure that it has ended, now that the host is done with its operation, so that a profiler that stops now
        has the whole event: a device may still be busy with it.

        If a callback blocks the level's thread, the end is recorded on another thread instead of waiting for it.
        """
        if self._ended.is_set():
            return
        if not self._level.thread.is_current():
            self._level.thread.soon(self.end)
            if self._ended.wait(_FINALIZE_WAIT_S):
                return
        if threading.get_ident() != self._begun_on:
            self.end()
        else:
            other = threading.Thread(target=self.end, name="bagua-profiling")
            other.start()
            other.join()
