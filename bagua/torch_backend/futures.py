"""TorchFuture: torch's future of an operation, whose callbacks run on the thread of its level and may do anything.

torch's own runs a callback at once, on the thread that adds it, where the operation has ended already: what a callback
starts would come sooner or later than on other ranks. Here all callbacks run on one thread, in the order of operations.
What torch itself hangs on a future (collect_all) it calls in C++, where the future is completed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .levels import Level, current_order, in_order

__all__ = ["TorchFuture"]


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
    """A future that `complete` completes, and so do the callbacks behind `then`.

    Args:
        level: whose thread runs the callbacks.
    """

    def __init__(self, level: Level):
        super().__init__()
        self._level = level
        self._asked_in = current_order()

    def then(self, callback: Callable[[torch.futures.Future], object]) -> TorchFuture:
        """A future of what `callback(self)` returns, called when this one is completed."""
        behind = TorchFuture(self._level)
        self._call(lambda: behind.complete(lambda: callback(self)))
        return behind

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:
        """Call `callback(self)` when this one is completed; what it raises is logged."""
        self._call(lambda: callback(self))

    def _call(self, step: Callable[[], None]) -> None:
        def in_own_order() -> None:  # the thread may be in the middle of a callback that torch runs
            with in_order(self._level.order):
                step()

        super().add_done_callback(lambda _: self._level.thread.soon(in_own_order))

    def complete(self, produce: Callable[[], object]) -> None:
        """Complete it with what `produce()` returns, or fails with; a failure is a RuntimeError with the message."""
        try:
            value = produce()
        except Exception as error:
            if not isinstance(error, RuntimeError):
                wrapped = RuntimeError(f"{type(error).__name__}: {error}")
                wrapped.__cause__ = error
                error = wrapped
            self._set_unwrap_func(_raise)
            value = _Failure(error)
        with in_order(self._asked_in):
            self.set_result(value)
