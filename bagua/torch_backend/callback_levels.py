"""Callback levels: collectives that callbacks of futures start run on groups other than the program's.

All ranks must start the operations of a group in the same order. The program does so, and callbacks of a group's
futures run in the order in which its operations end, which is the same; but program and callbacks interleave
differently on each rank. So what such a callback starts runs on a group of its own, one level below.

Futures that torch makes of ours (torch.futures.collect_all) call back on the thread of whichever group ends last, on
one that waits for its Work, or at once on the one that adds the callback. A rank cannot know which of these happens on
another rank, so what is started there takes its place in the order of whoever asked for the futures: the program, or a
callback. As on other backends, the caller must not start operations of the same group meanwhile.

A callback may start operations and wait for them, or for their futures: these are completed by a thread on which no
enclosing callback runs. Futures of other operations it completes itself (futures.py).
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

# Identifies a sequence of operations: the names of the groups whose callbacks start them, outermost first; none for the
# program. It is the same on all ranks.
Order = tuple[str, ...]


class _Context(NamedTuple):
    order: Order
    depth: int  # how many callback threads there are between the program and this one; may differ between ranks


_PROGRAM = _Context((), 0)
# Of the threads that run callbacks, by thread identity; each access is atomic. A program without callbacks finds it
# empty, which is faster than a threading.local.
_contexts: dict[int, _Context] = {}


def current_order() -> Order:
    """The order in which operations of the calling thread are started."""
    return _contexts.get(threading.get_ident(), _PROGRAM).order


def runs_callbacks() -> bool:
    """Whether the calling thread is in the middle of a callback."""
    return threading.get_ident() in _contexts


@contextlib.contextmanager
def in_order(order: Order) -> Iterator[None]:
    """Within it, the calling thread starts operations in another order."""
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
    """A group of bagua, and the thread of its futures' callbacks.

    Attributes:
        group: runs the operations.
        order: in which these callbacks start operations.
        thread: runs the callbacks.
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
        self._streams: dict[torch.device, torch.Stream] = {}  # of the thread
        self.thread = CallbackThread(f"bagua-callbacks-{depth}-{group.name}", as_callback)

    def enter_device(self, device: torch.device) -> None:
        """On the thread of callbacks: have it use the device, and there a stream of its own.

        What callbacks enqueue then waits for nothing but what they wait for. On other threads it does nothing.
        """
        if not self.thread.is_current():
            return
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        use_stream(self._streams[device])


class Levels:
    """The levels of one group. All but the program's are made when a callback starts an operation."""

    def __init__(self, group: ProcessGroup):
        self.program = Level(group, _PROGRAM)
        self._groups: dict[Order, ProcessGroup] = {(): group}
        self._by_context = {_PROGRAM: self.program}
        self._opening = threading.Lock()  # guards writes to the two above

    def current(self) -> Level:
        """The level of the calling thread."""
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
        """Set the deadline of operations that are started from now on."""
        for group in list(self._groups.values()):
            group.set_timeout(timeout)

    def end_operations(self) -> None:
        """End the groups, whose pending operations fail. Idempotent."""
        self.program.group.close()

    def close(self, deadline: float | None = None) -> None:
        """End the groups and then the threads, which run the callbacks of what was pending. Idempotent.

        A callback that still runs at the deadline, by default the group's timeout, is logged and not waited for: an
        error would make torch believe that the group is still open.
        """
        self.end_operations()
        if deadline is None:
            deadline = time.monotonic() + to_seconds(self.program.group.timeout)
        for level in list(self._by_context.values()):
            try:
                level.thread.close(max(deadline - time.monotonic(), 0))
            except DeadlineExceeded as error:
                logger.error("group '%s' was destroyed: %s", level.group.name, error)
