"""The events of operations in torch's profilers, named and measured like those of torch's own backends."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..distributed.work import Work
from ..torch_version import is_torch_at_least
from .callback_levels import Level

__all__ = ["Span"]

# Earlier versions lose an event that ends on another thread than it began on.
_MAY_END_ELSEWHERE = is_torch_at_least(2, 12)
_FINALIZE_WAIT_S = 0.05  # wait for the level's thread, which ends an event at once unless it is running a callback


class Span:
    """An event that begins now, with the shapes of the tensors; its end is recorded on the thread of a level.

    The end is on another thread than the beginning, from which the profiler recognises an asynchronous event. A torch
    version that cannot record that gets an event that ends once the operation has been started.

    Args:
        name: the event's name.
        tensors: the input tensors.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]):
        self._record = torch.autograd._record_function_with_args_enter(name, *tensors)
        self._begun_on = threading.get_ident()
        self._lock = threading.Lock()  # guards _record
        self._level: Level | None = None
        self._ended = threading.Event()

    def end_after(self, work: Work | None, level: Level) -> None:
        """Ends the event when the operation `work` ends; soon if that is None."""
        self._level = level
        if not _MAY_END_ELSEWHERE:
            self.end()
        elif work is None:
            level.thread.soon(self.end)
        else:
            level.thread.after(work, self.end)

    def end(self) -> None:
        """Ends the event. Idempotent."""
        with self._lock:
            record, self._record = self._record, None
        if record is not None:
            torch.autograd._record_function_with_args_exit(record)
        self._ended.set()

    def finalize(self) -> None:
        """Waits for the end of the event; the host has finished the operation, though a device may not have.

        A profiler that stops now then has the whole event. If a callback blocks the level's thread, another thread
        records the end.
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
