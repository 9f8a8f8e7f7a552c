"""Work: the handle of an operation that runs in the background."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta

import torch

from bagua import _C
from bagua.distributed.devices import check_not_capturing, current_stream, current_torch_stream, recorded_event
from bagua.distributed.job_ranks import JobRanks, reworded
from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument

__all__ = ["Work", "to_seconds"]


def to_seconds(timeout: timedelta | float | int) -> float:
    """Seconds of a timeout. Raises InvalidArgument when it is not positive and finite."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not (value > 0 and math.isfinite(value)):
        raise InvalidArgument(f"timeout {timeout!r} is not a positive, finite time")
    return value


class Work:
    """The handle of an operation that was started with `async_op=True`.

    The tensors that it names must not be touched until it is completed, and they hold the result when wait() has
    returned; tensors of a device hold it for what the current stream does after wait(). The core keeps them alive as
    long as it needs them, even if the Work is dropped, or was never made.
    """

    __slots__ = (
        "_core",
        "_device",
        "_failure",
        "_finish",
        "_finished",
        "_finishing",
        "_has_failed",
        "_job_ranks",
        "_limit_s",
        "_what",
        "label",
    )

    def __init__(
        self,
        core: _C.Work,
        limit_s: float,
        what: str,
        label: str,
        finish: Callable[[], None] | None,
        has_failed: Callable[[BaguaError], None],
        job_ranks: JobRanks,
        device: torch.device | None = None,
    ):
        self._core = core
        self._job_ranks = job_ranks
        self._has_failed = has_failed  # called with the error that wait() finds
        self._device = device  # None: the CPU
        self._limit_s = limit_s
        self._what, self.label = what, label
        self._finish = finish  # copies a staged result back; None when there is nothing (left) to do
        self._finishing = threading.Lock() if finish is not None else None  # guards the next two and _finish
        self._finished: torch.Event | None = None  # on a device, where _finish was run
        self._failure: BaseException | None = None  # of _finish: every later wait() raises it too

    @property
    def ticket(self) -> int:
        """Identifies the operation in ProcessGroup.events()."""
        return self._core.ticket

    @property
    def core(self) -> _C.Work:
        """The core's handle, which keeps no tensor once it ends; ``sent`` is (bytes, bytes over a network), None until
        then."""
        return self._core

    @property
    def device(self) -> torch.device | None:
        """The device of its tensors; None for the CPU."""
        return self._device

    @property
    def nonfinite_blocks(self) -> int | None:
        """Blocks of this rank's input or reduced stripe that held a NaN or an Inf under a codec. Once completed.

        In a hierarchical operation only the ranks that lead their nodes encode, and count. None of an operation on a
        device, which does not count: such a block is NaN in the result.
        """
        return self._core.nonfinite_blocks if self._device is None else None

    @property
    def is_result_finite(self) -> bool | None:
        """True if the result holds no NaN and no Inf; None if that was not checked, as on a device. Once completed."""
        return self._core.is_result_finite

    def is_completed(self) -> bool:
        """Returns True if the operation has ended, well or not. Never blocks."""
        return self._core.is_completed()

    def is_in_place(self) -> bool:
        """Returns True if a device, too, has done what ``wait`` has left to it, once the operation has ended."""
        try:
            return self._finished is None or self._finished.query()
        except RuntimeError:  # of a device that has failed: nothing more will come
            return True

    def exception(self) -> BaseException | None:
        """Returns the operation's error, or that of copying its result back in wait(); None while it runs and after
        success."""
        error = self._core.error()
        return self._failure if error is None else self._job_ranks.told(error)

    def wait(self, timeout: timedelta | float | None = None) -> None:
        """Block until the operation has ended; releases the GIL.

        Of tensors on a device, block only until all of the operation has been enqueued there, and have the current
        stream wait for its end: what is enqueued on it afterwards finds the result, while the host goes on.

        Args:
            timeout: how long to wait; by default until the operation ends, which the group's timeout limits.

        Raises:
            BaguaError: the operation has failed.
            DeadlineExceeded: `timeout` passed and the operation still runs.
        """
        limit_s = self._limit_s if timeout is None else to_seconds(timeout)
        stream = None
        if self._device is not None:
            check_not_capturing(self._device, "an operation was waited for", "wait outside of torch.cuda.graph()")
            stream = current_stream(self._device)
        try:
            ended = self._core.wait(limit_s) if stream is None else self._core.wait_on_stream(limit_s, *stream)
        except BaguaError as error:
            self._has_failed(error)
            if self.label and error.bucket is None:
                error = reworded(error, f"{self.label}: ", bucket=self.label)
            raise self._job_ranks.told(error) from None
        if not ended:
            what = f"{self._what} ({self.label})" if self.label else self._what
            raise DeadlineExceeded(f"{what} is still running after {limit_s:g} s; wait() again waits on")
        if self._finishing is not None:
            with self._finishing:
                finish, self._finish = self._finish, None
                if finish is not None:
                    try:
                        finish()
                    except BaseException as error:
                        self._failure = error
                        raise
                    if self._device is not None:
                        self._finished = recorded_event(self._device)
                elif self._finished is not None:
                    current_torch_stream(self._device).wait_event(self._finished)  # which may be another
                if self._failure is not None:
                    raise self._failure

    def finish_with(self, step: Callable[[], None]) -> None:
        """Have wait() run `step` once, after the result is in place. Called right after the Work was made."""
        first = self._finish
        self._finish = step if first is None else lambda: (first(), step())
        self._finishing = self._finishing or threading.Lock()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback()` once, when the operation has ended, well or not.

        If it has ended already, on this thread before this returns; otherwise on the thread that ends the operation,
        where the callback delays the operations that follow and must not start or wait for one (InvalidArgument).
        wait() on this Work is allowed: it copies a staged result back and raises what the operation raised. What the
        callback itself raises goes to sys.unraisablehook.
        """
        self._core.add_done_callback(callback)
