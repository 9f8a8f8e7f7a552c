"""TorchWork: operations of bagua behind the handle that torch's programs, its DDP and its compiled graphs wait on.

A torch future is made only when somebody asks for one; then the thread that ends the operation completes it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ..work import Work

__all__ = ["TorchWork"]

_NO_TIMEOUT = timedelta(0)  # torch's kNoTimeout


class TorchWork(dist.Work):
    """One operation of torch.distributed.

    Args:
        works: the operations of bagua that it consists of; it has ended when all of them have.
        result: the tensors that hold the outcome, for get_future() and result().
        source: rank of the group that sent it, for what recv returns.
    """

    def __init__(self, works: Sequence[Work], result: list[torch.Tensor], source: int = -1):
        super().__init__()
        self._works = works
        self._result = result
        self._source = source
        self._future: torch.futures.Future | None = None
        self._asking = threading.Lock()  # guards _future

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until the outcome is in its tensors; releases the GIL.

        Args:
            timeout: how long to wait for it; by default as long as it can take, since the operation itself has the
                group's timeout as its deadline.

        Raises:
            BaguaError: whatever ended the operation; it names the rank at fault.
            DeadlineExceeded: `timeout` passed and the operation still runs.
        """
        if timeout == _NO_TIMEOUT:
            for work in self._works:
                work.wait()
            return True
        deadline = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            work.wait(max(deadline - time.monotonic(), 1e-9))
        return True

    def synchronize(self) -> None:
        """The same as wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """The same as wait(): on the CPU the calling thread is the stream."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; if well, the outcome is in its tensors. Never blocks."""
        if not all(work.is_completed() for work in self._works):
            return False
        if self.exception() is None:
            with contextlib.suppress(Exception):  # exception() has it
                self.wait()  # what is staged is copied back
        return True

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it raised; None while it runs and when it ended well."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """The tensors that hold the outcome."""
        return self._result

    def source_rank(self) -> int:
        """The rank of the group that sent what was received; -1 for another operation."""
        return self._source

    _source_rank = source_rank  # its name in torch's Python API

    def get_future(self) -> torch.futures.Future:
        """A future of result(). A failure is a RuntimeError with our message: torch's futures carry no other type."""
        with self._asking:
            if self._future is None:
                ended: torch.futures.Future = torch.futures.Future()
                # Not set_exception, which DDP's reducer takes for a value: what `then` raises is an error in C++ too.
                self._future = ended.then(self._outcome)
                self._complete_after(0, ended)
            return self._future

    def _complete_after(self, index: int, ended: torch.futures.Future) -> None:
        """Completes `ended` when all works from `index` on have ended; the callbacks keep this object alive."""
        while index < len(self._works) and self._works[index].is_completed():
            index += 1
        if index == len(self._works):
            ended.set_result(None)
            return
        self._works[index].add_done_callback(lambda: self._complete_after(index + 1, ended))

    def _outcome(self, _ended: torch.futures.Future) -> list[torch.Tensor]:
        self.wait()
        return self._result
