"""Where a group's collectives run: those that the program starts, and those that callbacks of futures start.

Ranks must start the operations of a group in one order. The program does, and callbacks of a group's futures run in the
order in which its operations end, which is the same; but between the two there is no order. So what such a callback
starts runs on a group of its own, whatever the program and other callbacks do meanwhile.

Futures that torch makes of ours (torch.futures.collect_all) call back on the thread of whichever group ends last, or at
once on the thread that adds the callback. No rank can tell which of these it is on another one, so what is started
there comes in the order of who asked for the futures: the program's, or a callback's. As on other backends, it is for
that one not to start operations of the same group meanwhile.

A callback may start operations and wait for them, or for their futures: these are completed by a thread that no
callback around it runs on. Futures of other operations it completes itself (futures.py).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import NamedTuple

from ..distributed.process_group import ProcessGroup
from ..distributed.work import to_seconds
from ..errors import DeadlineExceeded
from .callback_thread import CallbackThread

__all__ = ["Level", "Levels", "Order", "current_order", "in_order", "runs_callbacks"]

logger = logging.getLogger("bagua")

# Whose order operations are started in: the names of the groups whose callbacks these are, outermost first; of the
# program, none. It is the same on all ranks.
Order = tuple[str, ...]


class _Place(NamedTuple):
    order: Order
    depth: int  # how many threads of callbacks there are from the program to this one; no matter to other ranks


_PROGRAM = _Place((), 0)
# Of the threads that run callbacks, by identity. Each step on this dict is atomic. A dict, which a program without
# callbacks finds empty, is faster than a threading.local.
_places: dict[int, _Place] = {}


def current_order() -> Order:
    """Of what the calling thread starts."""
    return _places.get(threading.get_ident(), _PROGRAM).order


def runs_callbacks() -> bool:
    """Whether the calling thread is in the middle of a callback."""
    return threading.get_ident() in _places


@contextlib.contextmanager
def in_order(order: Order) -> Iterator[None]:
    """Has the calling thread start operations in another order."""
    thread = threading.get_ident()
    before = _places.get(thread)
    _places[thread] = _Place(order, 0 if before is None else before.depth)
    try:
        yield
    finally:
        if before is None:
            del _places[thread]
        else:
            _places[thread] = before


class Level:
    """A group of bagua, and the thread of its futures' callbacks.

    Attributes:
        group: runs the operations.
        order: in which these callbacks start operations.
        thread: runs the callbacks.
    """

    def __init__(self, group: ProcessGroup, place: _Place):
        order, depth = (*place.order, group.name), place.depth + 1

        @contextlib.contextmanager
        def as_callback() -> Iterator[None]:
            _places[threading.get_ident()] = _Place(order, depth)
            try:
                yield
            finally:
                del _places[threading.get_ident()]  # which another thread may get

        self.group, self.order = group, order
        self.thread = CallbackThread(f"bagua-callbacks-{depth}-{group.name}", as_callback)


class Levels:
    """The levels of one group; all but the program's are made when a callback starts an operation."""

    def __init__(self, group: ProcessGroup):
        self.program = Level(group, _PROGRAM)
        self._groups: dict[Order, ProcessGroup] = {(): group}
        self._by_place = {_PROGRAM: self.program}
        self._opening = threading.Lock()  # guards writes to the two above

    def current(self) -> Level:
        """The level of the calling thread."""
        if not _places:
            return self.program
        place = _places.get(threading.get_ident(), _PROGRAM)
        level = self._by_place.get(place)
        return self._open(place) if level is None else level

    def _open(self, place: _Place) -> Level:
        root = self.program.group
        with self._opening:
            if place.order not in self._groups:
                name = f"callbacks of {'/'.join(place.order)}"
                self._groups[place.order] = root.subgroup(name, range(root.size), root.timeout)
            if place not in self._by_place:
                self._by_place[place] = Level(self._groups[place.order], place)
            return self._by_place[place]

    def set_timeout(self, timeout: timedelta) -> None:
        """Another deadline for the operations from now on."""
        for group in list(self._groups.values()):
            group.set_timeout(timeout)

    def end_operations(self) -> None:
        """End the groups, whose pending operations fail. Idempotent."""
        self.program.group.close()

    def close(self, deadline: float | None = None) -> None:
        """End the groups and then the threads, which run the callbacks of what was pending. Idempotent.

        A callback that still runs at the deadline, by default after the group's timeout, is left behind, and logged:
        torch would take an error for a group that is still open.
        """
        self.end_operations()
        if deadline is None:
            deadline = time.monotonic() + to_seconds(self.program.group.timeout)
        for level in list(self._by_place.values()):
            try:
                level.thread.close(max(deadline - time.monotonic(), 0))
            except DeadlineExceeded as error:
                logger.error("group '%s' was destroyed: %s", level.group.name, error)
