"""TorchFuture: torch's future of an operation, whose callbacks run on the thread of its level and may do anything.

torch's own runs a callback at once, on the thread that adds it, where the operation has ended already: what a callback
starts would come sooner or later than on other ranks. Here all callbacks run on one thread: when their operation has
ended, in the order of operations, or if it had ended when its future was asked for, in the order in which they are
added. Which of these it is differs between ranks; so callbacks that start operations come in one order on all ranks if
each is added where its operation is started, before the next operation is (gloo needs that too).

A callback may wait for a future whose turn on that thread comes later. It makes the value itself then; the callbacks of
that future keep their turn, so that who waits changes no order. What torch itself hangs on a future (collect_all) it
calls in C++, where the future is completed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import torch

from .levels import Level, current_order, in_order, runs_callbacks

__all__ = ["TorchFuture"]

logger = logging.getLogger("bagua")


class _Failure:
    """The value of a future that failed: from Python C++ can be given no other error than a value that raises."""

    __slots__ = ("error",)

    def __init__(self, error: Exception):
        self.error = error

    @property
    def __class__(self):  # asked by isinstance(value, torch.Tensor)
        raise self.error

    def __reduce_ex__(self, _protocol):  # asked by what looks for tensors in a value
        raise self.error


def _raise(failure: _Failure) -> None:
    raise failure.error


class TorchFuture(torch.futures.Future):
    """A future whose value is made in its turn on the level's thread, or by a callback that waits for it before.

    Args:
        level: whose thread runs the callbacks.
        produce: makes the value, or raises; called once.
        is_callback: whether `produce` is one; otherwise it may run on any thread.
    """

    def __init__(self, level: Level, produce: Callable[[], object], is_callback: bool = False):
        super().__init__()
        self._level, self._is_callback = level, is_callback
        self._asked_in = current_order()
        self._lock = threading.Lock()  # guards the two below
        self._produce: Callable[[], object] | None = produce  # None: the value is made, or being made
        self._callbacks: list[Callable[[], None]] | None = []  # None: its turn has come

    def wait(self) -> object:
        """The value when there is one; raises what it failed with."""
        if runs_callbacks() and (not self._is_callback or self._level.thread.is_current()):
            self._make()  # its turn may never come: the thread that it comes on may be this one, or wait for this one
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future], object]) -> TorchFuture:
        """A future of what `callback(self)` returns, called when this one is completed."""

        def produce() -> object:
            self._settle()
            with in_order(self._level.order):  # the thread may be in the middle of a callback that torch runs
                return callback(self)

        behind = TorchFuture(self._level, produce, is_callback=True)
        self._call(behind.take_turn)
        return behind

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """Call `callback(self)` when this one is completed; what it raises is logged."""

        def call() -> None:
            try:
                with in_order(self._level.order):
                    callback(self)
            except BaseException:
                logger.exception("a callback of an operation failed")

        self._call(call)

    def _call(self, step: Callable[[], None]) -> None:
        """Has the level's thread run `step` in this future's turn; soon when that has passed."""
        with self._lock:
            if self._callbacks is not None:
                self._callbacks.append(step)
                return
        self._level.thread.soon(step)

    def take_turn(self) -> None:
        """Complete it, unless that has been done, and run its callbacks: on the thread of its level, or before any."""
        self._settle()
        with self._lock:
            callbacks, self._callbacks = self._callbacks, None
        for step in callbacks:
            step()

    def _settle(self) -> None:
        """Have it completed, well or not; by another thread if that has begun."""
        if not self._make():
            with contextlib.suppress(Exception):
                super().wait()

    def _make(self) -> bool:
        """Complete it with the value, or the failure, a RuntimeError with the message; False if somebody else does."""
        with self._lock:
            produce, self._produce = self._produce, None
        if produce is None:
            return False
        try:
            value = produce()
        except BaseException as error:  # who waits must not do so for ever
            if not isinstance(error, RuntimeError):
                wrapped = RuntimeError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                error = wrapped
            self._set_unwrap_func(_raise)
            value = _Failure(error)
        with in_order(self._asked_in):
            self.set_result(value)
        return True
