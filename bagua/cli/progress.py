"""A line on stderr that says what a command is doing, once it takes longer than a user waits without asking."""

from __future__ import annotations

import sys
import threading
import time

__all__ = ["Progress"]

_SILENT_S = 2.0
_REFRESH_S = 0.5


class Progress:
    """Says after two seconds what is going on, and what comes next; nothing of what takes less.

    On a terminal it is one line that is written over and removed at the end. Anywhere else each text is a line of its
    own, without the time.

    >>> with Progress("bagua doctor") as progress:
    ...     progress.tell("measuring ranks 0 and 1")
    """

    def __init__(self, command: str, silent_s: float = _SILENT_S) -> None:
        self._command = command
        self._silent_s = silent_s
        self._begin = time.monotonic()
        self._text = ""
        self._shown = ""  # the last line, as it stands on stderr
        self._changed = threading.Condition()  # guards _text and _ended
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="bagua-progress", daemon=True)

    def __enter__(self) -> Progress:
        self._begin = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def tell(self, text: str) -> None:
        """Sets the text on what is being done from now on."""
        with self._changed:
            self._text = text
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended, self._silent_s)
            while not self._ended:
                self._show()
                self._changed.wait(_REFRESH_S)

    def _show(self) -> None:
        line = f"{self._command}: {self._text} ..."
        if sys.stderr.isatty():
            line += f" {time.monotonic() - self._begin:.0f} s"
        if not self._text or line == self._shown:
            return
        self._shown = line
        sys.stderr.write(f"\r\x1b[K{line}" if sys.stderr.isatty() else f"{line}\n")
        sys.stderr.flush()
