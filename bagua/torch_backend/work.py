"""TorchWork: the handle of operations of bagua for torch's programs, its DDP and its compiled graphs.

A torch future is created on the first call of get_future(); the thread of the operation's level completes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..distributed.work import Work
from .callback_levels import Level
from .compiling import leave_to_python
from .futures import TorchFuture
from .profiling import Span

__all__ = ["TorchWork"]

_NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout


@leave_to_python
class TorchWork(dist.Work):
    """A handle of one operation of torch.distributed.

    Args:
        works: the operations of bagua that it consists of; it ends when all of them have ended.
        result: the tensors that hold the outcome, for get_future() and result().
        source: for a recv, the rank of the group that sends.

    Attributes:
        level: the level on which it runs.
        span: its event in torch's profiler, if one is running.
    """

    level: Level
    span: Span | None = None
    _was_waited = False  # wait() has returned: the outcome is ready, or has been enqueued

    def __init__(self, works: Sequence[Work], result: list[torch.Tensor], source: int = -1):
        super().__init__()
        self._works = works
        self._result = result
        self._source = source
        self._future: TorchFuture | None = None
        self._lock = threading.Lock()  # guards writes to _future

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Blocks until the outcome is in its tensors; releases the GIL.

        For tensors on a device, it blocks only until the whole operation has been enqueued there: later work of the
        current stream uses the outcome. The future then has its value; its callbacks keep their turn.

        Args:
            timeout: the time to wait; by default until the operation ends, which the group's timeout limits.

        Raises:
            BaguaError: the operation failed; the error names the rank at fault.
            DeadlineExceeded: `timeout` passed and the operation still runs.
        """
        if timeout == _NO_TIMEOUT:
            self._finish()
        else:
            deadline = time.monotonic() + timeout.total_seconds()
            for work in self._works:
                work.wait(max(deadline - time.monotonic(), 1e-9))
        if self.span is not None:
            self.span.finalize()
        self._was_waited = True  # before the next line, as get_future does it the other way round
        if self._future is not None:
            self._future.complete()
        return True

    def _finish(self) -> None:
        for work in self._works:
            work.wait()

    def synchronize(self) -> None:
        """Calls wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """Calls wait(): the stream of the CPU is the calling thread, and on a device wait() blocks the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns True if it has ended. After success the outcome is in its tensors. Never blocks."""
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            with contextlib.suppress(Exception):  # exception() returns the error from now on
                self._finish()  # copies staged results back
        return all(work.is_in_place() for work in self._works)

    def is_success(self) -> bool:
        """Returns True if it has ended successfully."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns its error; None while it runs and after success."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that hold the outcome."""
        return self._result

    def source_rank(self) -> int:
        """Returns the sender's rank in the group for a recv, otherwise -1."""
        return self._source

    _source_rank = source_rank  # its name in torch's Python API

    @property
    def device(self) -> torch.device | None:
        """The device of its tensors; None for the CPU."""
        return next((work.device for work in self._works if work.device is not None), None)

    @property
    def last(self) -> Work | None:
        """The operation that ends last; None if there are none."""
        return self._works[-1] if self._works else None

    def get_future(self) -> TorchFuture:
        """Returns a future of result(). It fails with a RuntimeError that has our message, as torch's futures do."""
        if self._future is None:
            future = TorchFuture(self.level, self._outcome, self.device)
            has_ended = self._was_waited or all(work.is_completed() for work in self._works)
            if has_ended:  # complete it before it is returned, while it cannot have callbacks
                future.take_turn()
            with self._lock:
                if self._future is None:
                    if not has_ended:  # the thread's reference keeps this object alive until the turn
                        self.level.thread.after_enqueued(self._works[-1], future.take_turn)
                    self._future = future
        if self._was_waited:  # possibly set since, by another thread
            self._future.complete()
        return self._future

    def _outcome(self) -> list[torch.Tensor]:
        self._finish()
        if self.span is not None:
            self.span.finalize()
        return self._result
