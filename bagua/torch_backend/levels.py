"""Where a group's collectives run: those that the program starts, and those that callbacks of futures start.

Ranks must start the operations of a group in one order. The program does, and callbacks run in the order in which
operations end, which is the same; but between the two there is no order. So what a callback starts runs on a group of
its own with a thread of its own for the callbacks of that, its level: a callback may start operations and wait for
them, or for their futures, whatever the program and other callbacks do meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta

from ..callbacks import CallbackThread
from ..group import ProcessGroup

__all__ = ["Level", "Levels"]


# Of the threads that run callbacks, by identity, whose they are: the names of the groups, outermost first. Each step on
# this dict is atomic. A dict, which a program without callbacks finds empty, is faster than a threading.local.
_paths: dict[int, str] = {}


class Level:
    """A group of bagua, and the thread of its futures' callbacks.

    Attributes:
        group: runs the operations.
        thread: runs the callbacks.
    """

    def __init__(self, group: ProcessGroup, path: str):
        @contextlib.contextmanager
        def as_callback() -> Iterator[None]:
            _paths[threading.get_ident()] = f"{path}/{group.name}"
            try:
                yield
            finally:
                del _paths[threading.get_ident()]  # which another thread may get

        self.group = group
        self.thread = CallbackThread(f"bagua-callbacks-{group.name}", as_callback)


class Levels:
    """The levels of one group; all but the program's are made when a callback starts an operation."""

    def __init__(self, group: ProcessGroup):
        self.program = Level(group, "")
        self._by_path = {"": self.program}
        self._opening = threading.Lock()  # guards writes to _by_path

    def current(self) -> Level:
        """The level of the calling thread."""
        if not _paths:
            return self.program
        path = _paths.get(threading.get_ident(), "")
        level = self._by_path.get(path)
        return self._open(path) if level is None else level

    def _open(self, path: str) -> Level:
        root = self.program.group
        with self._opening:
            if path not in self._by_path:
                group = root.subgroup(f"callbacks of {path[1:]}", range(root.size), root.timeout)
                self._by_path[path] = Level(group, path)
            return self._by_path[path]

    def set_timeout(self, timeout: timedelta) -> None:
        """Another deadline for the operations from now on."""
        for level in list(self._by_path.values()):
            level.group.set_timeout(timeout)

    def close(self) -> None:
        """End the groups, whose pending operations fail, and then the threads, which run the callbacks of those."""
        self.program.group.close()
        for level in list(self._by_path.values()):
            level.thread.close()
