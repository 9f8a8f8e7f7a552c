"""A thread that runs callbacks of operations, in the order in which the operations ended.

The thread that ends an operation only puts a number into a queue of the core (csrc/engine/completion_queue.h), so it
waits neither for Python nor for a callback. A callback here may start operations and wait for them. The thread is
started by its first step and joined by close().
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable

from bagua import _C
from bagua.distributed.work import Work
from bagua.errors import DeadlineExceeded
from bagua.net.exhausted import start_thread

__all__ = ["CallbackThread"]

logger = logging.getLogger("bagua")


class CallbackThread:
    """A thread that runs steps one after the other.

    Args:
        name: the thread's name.
        around: returns the context manager in which the thread runs.
    """

    def __init__(self, name: str, around: Callable[[], contextlib.AbstractContextManager]):
        self._name, self._around = name, around
        self._queue = _C.CompletionQueue()
        self._tokens = itertools.count()
        self._steps: dict[int, Callable[[], None]] = {}  # by token; each access is atomic
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards the two below
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def after(self, work: Work, step: Callable[[], None]) -> None:
        """Runs `step` when the operation has ended, successfully or not."""
        self._submit(step, lambda token: self._queue.push_when_done(work.core, token))

    def after_enqueued(self, work: Work, step: Callable[[], None]) -> None:
        """Runs `step` as soon as a stream of the operation's device can wait for its end; on the CPU, like `after`."""
        self._submit(step, lambda token: self._queue.push_when_enqueued(work.core, token))

    def soon(self, step: Callable[[], None]) -> None:
        """Runs `step` after the steps of operations that have already ended; at once if called on this thread."""
        if self.is_current():
            step()
        else:
            self._submit(step, self._queue.push)

    def is_current(self) -> bool:
        """Returns True if the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def close(self, timeout_s: float) -> None:
        """Runs the remaining steps and ends the thread; the operations must have ended. Idempotent.

        If a step calls it, the thread ends when that step returns. Does nothing in a forked child.

        Raises:
            DeadlineExceeded: a step still runs after `timeout_s`; the thread ends when it returns.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_closed = True
        self._queue.close()
        if self._thread is not None and not self.is_current():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                frame = sys._current_frames().get(self._thread.ident)
                where = f", in {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
                raise DeadlineExceeded(
                    f"a callback on the thread {self._name} still runs after {timeout_s:g} s{where}; not waiting for it"
                )

    def _submit(self, step: Callable[[], None], enter: Callable[[int], object]) -> None:
        """Has the thread run `step` when the token passed to `enter` is returned; after close(), runs it here."""
        with self._lock:  # held throughout, so that close() runs before or after
            if not self._is_closed:
                if self._thread is None:
                    # A daemon thread: a program that exits with open groups must reach the code that closes them.
                    thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    start_thread(thread)
                    self._thread = thread
                token = next(self._tokens)
                self._steps[token] = step
                enter(token)
                return
        step()

    def _run(self) -> None:
        with self._around():
            while (token := self._queue.next()) is not None:
                try:
                    self._steps.pop(token)()
                except BaseException:
                    logger.exception("a callback of an operation failed")
