"""Callback levels: collectives that callbacks of futures start run on groups other than the program's.

All ranks must start the operations of a group in the same order. The program does so, and callbacks of a group's
futures run in the order in which its operations end, which is the same on all ranks; but program and callbacks
interleave differently on each rank. So operations that such a callback starts run on a separate group, one level below.

Futures that torch makes from ours (torch.futures.collect_all) run their callbacks on the thread of the group that ends
last, on a thread that waits for its Work, or at once on the thread that adds the callback. A rank cannot know which of
these happens on another rank, so operations started there belong to the order of the code that created the futures: the
program, or a callback. As with other backends, the caller must not start operations of the same group meanwhile.

A callback may start operations and wait for them, or for their futures: a thread on which no enclosing callback runs
completes these. The callback itself completes futures of other operations that it waits for (futures.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

import torch

from ..distributed.devices import new_stream, use_stream
from ..distributed.process_group import ProcessGroup
from ..distributed.work import to_seconds
from ..errors import DeadlineExceeded
from .callback_thread import CallbackThread

__all__ = ["Level", "Levels", "Order", "current_order", "in_order", "runs_callbacks"]

logger = logging.getLogger("bagua")

# Identifies a sequence of operations by the names of the groups whose callbacks start them, outermost first; empty for
# the program. It is the same on all ranks.
Order = tuple[str, ...]


class _Context(NamedTuple):
    order: Order
    depth: int  # number of callback threads between the program and this one; may differ between ranks


_PROGRAM = _Context((), 0)
# The contexts of the threads that run callbacks, by thread identity; each access is atomic. Without callbacks it is
# empty, which is faster to check than a threading.local.
_contexts: dict[int, _Context] = {}


def current_order() -> Order:
    """Returns the order to which operations of the calling thread belong."""
    return _contexts.get(threading.get_ident(), _PROGRAM).order


def runs_callbacks() -> bool:
    """Returns True if the calling thread is running a callback."""
    return threading.get_ident() in _contexts


@contextlib.contextmanager
def in_order(order: Order) -> Iterator[None]:
    """Makes operations that the calling thread starts in the block belong to another order."""
    thread = threading.get_ident()
    before = _contexts.get(thread)
    _contexts[thread] = _Context(order, 0 if before is None else before.depth)
    try:
        yield
    finally:
        if before is None:
            del _contexts[thread]
        else:
            _contexts[thread] = before


class Level:
    """A group of bagua, with the thread that runs its futures' callbacks.

    Attributes:
        group: the group that runs the operations.
        order: the order of operations that these callbacks start.
        thread: the thread that runs the callbacks.
    """

    def __init__(self, group: ProcessGroup, context: _Context):
        order, depth = (*context.order, group.name), context.depth + 1

        @contextlib.contextmanager
        def as_callback() -> Iterator[None]:
            _contexts[threading.get_ident()] = _Context(order, depth)
            try:
                yield
            finally:
                del _contexts[threading.get_ident()]  # a later thread may get the same identity

        self.group, self.order = group, order
        self._streams: dict[torch.device, torch.Stream] = {}  # the callback thread's
        self.thread = CallbackThread(f"bagua-callbacks-{depth}-{group.name}", as_callback)

    def enter_device(self, device: torch.device) -> None:
        """Makes the callback thread use the device, with a stream that only this thread uses.

        Work that callbacks enqueue then waits only for what the callbacks wait for. On other threads this does nothing.
        """
        if not self.thread.is_current():
            return
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        use_stream(self._streams[device])


class Levels:
    """The levels of one group. All but the program's are created when a callback starts an operation."""

    def __init__(self, group: ProcessGroup):
        self.program = Level(group, _PROGRAM)
        self._groups: dict[Order, ProcessGroup] = {(): group}
        self._by_context = {_PROGRAM: self.program}
        self._opening = threading.Lock()  # guards writes to the two above

    def current(self) -> Level:
        """Returns the level of the calling thread."""
        if not _contexts:
            return self.program
        context = _contexts.get(threading.get_ident(), _PROGRAM)
        level = self._by_context.get(context)
        return self._open(context) if level is None else level

    def _open(self, context: _Context) -> Level:
        root = self.program.group
        with self._opening:
            if context.order not in self._groups:
                name = f"callbacks of {'/'.join(context.order)}"
                self._groups[context.order] = root.subgroup(name, range(root.size), root.timeout)
            if context not in self._by_context:
                self._by_context[context] = Level(self._groups[context.order], context)
            return self._by_context[context]

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that are started from now on."""
        for group in list(self._groups.values()):
            group.set_timeout(timeout)

    def end_operations(self) -> None:
        """Ends the groups, whose pending operations fail. Idempotent."""
        self.program.group.close()

    def close(self, deadline: float | None = None) -> None:
        """Ends the groups and then the threads, which first run the callbacks of pending operations. Idempotent.

        A callback that still runs at the deadline, by default the group's timeout, is logged and not waited for: after
        an error torch would treat the group as open.
        """
        self.end_operations()
        if deadline is None:
            deadline = time.monotonic() + to_seconds(self.program.group.timeout)
        for level in list(self._by_context.values()):
            try:
                level.thread.close(max(deadline - time.monotonic(), 0))
            except DeadlineExceeded as error:
                logger.error("group '%s' was destroyed: %s", level.group.name, error)
