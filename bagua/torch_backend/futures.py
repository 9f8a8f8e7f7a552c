"""TorchFuture: torch's future of an operation, whose callbacks run on the thread of its level and may do anything.

If the operation has already ended, torch's own futures run a callback at once, on the thread that adds it; operations
that the callback starts would then be earlier or later than on other ranks. Here all callbacks run on one thread: when
their operation has ended, in the order of operations; or, if it had ended when its future was created, in the order in
which they are added. Which of the two applies differs between ranks, so callbacks that start operations run in the same
order on all ranks if each is added right after its operation is started, before the next one is (gloo needs that too).

The future of an operation on a device is completed as soon as the whole operation has been enqueued there: waiting for
it makes the current stream wait for the outcome, as with torch's futures of devices. Callbacks run on a separate
stream, which also waits for the outcome.

A callback may wait for a future whose turn on that thread comes later. The waiting thread then computes the value. So
does a thread that waits for the Work. The callbacks of that future keep their turn, so that waiting changes no order.
Callbacks that torch itself adds to a future (collect_all) run in C++, on the thread that completes the future.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable

import torch

from ..errors import BaguaError
from .callback_levels import Level, current_order, in_order, runs_callbacks

__all__ = ["TorchFuture"]

logger = logging.getLogger("bagua")

# The text and the rank at fault of the last errors of futures. Exceptions that C++ raises for them have only the text,
# with which bagua/cli/rank.py finds the rank here. The exceptions themselves would keep the program's tensors alive.
carried: deque[tuple[str, int]] = deque(maxlen=64)


class _Failure:
    """The value of a failed future: a value that raises is the only way to pass an error from Python to C++.

    It raises a new exception each time. The frames of an exception reference the future, and the future keeps this
    value in C++, where Python's garbage collector does not find it, so one exception would keep them all alive.
    """

    __slots__ = ("_error",)

    def __init__(self, error: RuntimeError):
        self._error = error

    @property
    def __class__(self):  # read by isinstance(value, torch.Tensor)
        raise self.error()

    def __reduce_ex__(self, _protocol):  # called by code that searches a value for tensors
        raise self.error()

    def error(self) -> RuntimeError:
        error = copy.copy(self._error)
        error.__cause__ = self._error.__cause__
        error.__notes__ = list(getattr(self._error, "__notes__", ()))
        return error


def _raise(failure: _Failure) -> None:
    raise failure.error()


def _without_frames(error: BaseException) -> RuntimeError:
    """Returns the error as a RuntimeError, with the place where it was raised instead of the frames."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    seen: list[BaseException | None] = [None]
    one = error
    while one not in seen:
        one.__traceback__ = one.__context__ = None
        seen.append(one)
        one = one.__cause__
    if hasattr(error, "add_note"):  # Python 3.11 and later
        error.add_note(f"raised in {place.filename}:{place.lineno}, in {place.name}")
    if isinstance(error, RuntimeError):
        with contextlib.suppress(Exception):  # copying fails if its constructor takes other arguments than it stores
            copy.copy(error)
            return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


class TorchFuture(torch.futures.Future):
    """A future whose value is computed in its turn on the level's thread, or earlier by a waiting thread.

    Args:
        level: the level whose thread runs the callbacks.
        device: the device of the tensors in the value; None for the CPU.
        produce: computes the value, or raises; called once.
        is_callback: True if `produce` is a callback; otherwise it may run on any thread.
    """

    def __init__(
        self,
        level: Level,
        produce: Callable[[], object],
        device: torch.device | None = None,
        is_callback: bool = False,
    ):
        super().__init__(devices=None if device is None else [device])
        self._level, self._device, self._is_callback = level, device, is_callback
        self._created_in = current_order()
        self._lock = threading.Lock()  # guards the two below
        self._produce: Callable[[], object] | None = produce  # None: the value is computed, or being computed
        self._callbacks: list[Callable[[], None]] | None = []  # None: its turn has come

    def wait(self) -> object:
        """Waits for the value and returns it, or raises the error of the future."""
        if runs_callbacks() and (not self._is_callback or self._level.thread.is_current()):
            self._try_complete()  # its turn might not come: the level's thread is this one, or may wait for this one
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future], object]) -> TorchFuture:
        """Returns a future of the value of `callback(self)`, which is called when this one is completed."""

        def produce() -> object:
            self.complete()
            self._let_stream_wait()
            with in_order(self._level.order):  # torch may be running a callback on this thread
                return callback(self)

        behind = TorchFuture(self._level, produce, self._device, is_callback=True)
        self._call(behind.take_turn)
        return behind

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """Calls `callback(self)` when this one is completed; an exception is logged."""

        def call() -> None:
            try:
                self._let_stream_wait()
                with in_order(self._level.order):
                    callback(self)
            except BaseException:
                logger.exception("a callback of an operation failed")

        self._call(call)

    def _call(self, step: Callable[[], None]) -> None:
        """Has the level's thread run `step` in this future's turn, or soon if that has passed."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(step)
                return
        self._level.thread.soon(step)

    def take_turn(self) -> None:
        """Completes the future, if it is not, and runs its callbacks; on the level's thread, or before it has any."""
        self.complete()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for step in callbacks:
            step()

    def _let_stream_wait(self) -> None:
        """Makes the stream of a callback wait for the value of the completed future."""
        if self._device is not None:
            self._level.enter_device(self._device)
            with contextlib.suppress(Exception):
                super().wait()

    def complete(self) -> None:
        """Completes the future, or waits for the thread that is completing it; does not raise its error.

        Its callbacks keep their turn, except those that torch has added.
        """
        if not self.done() and not self._try_complete():
            with contextlib.suppress(Exception):
                super().wait()

    def _try_complete(self) -> bool:
        """Completes it with the value, or the error as a RuntimeError; returns False if another thread has begun to."""
        with self._lock:
            produce, self._produce = self._produce, None
        if produce is None:
            return False
        try:
            if self._device is not None:
                self._level.enter_device(self._device)
            value = produce()
        except BaseException as error:  # a waiter must not wait forever
            if isinstance(error, BaguaError) and error.rank is not None:
                carried.append((f"{type(error).__name__}: {error}", error.rank))
            self._set_unwrap_func(_raise)
            value = _Failure(_without_frames(error))
        with in_order(self._created_in):
            self.set_result(value)
        return True
