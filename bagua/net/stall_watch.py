"""The detection of stalls of this process itself: it was stopped, or something held its interpreter up.

Beside the data path. Its peers then name this rank and leave. When it runs again and dials them, they do not listen, or
the time for what it waits for is over, and it must not call the one that it happens to dial or to wait for the rank at
fault.
"""

from __future__ import annotations

import threading
import time

from bagua.net.exhausted import start_thread

__all__ = ["StallCount", "StallWatch"]

_TICKS_PER_LIMIT = 4
_RECENT = 5  # limits; for so long a stall is the likelier reason why a peer has left


class StallCount:
    """The same without a thread, of who waits in short pieces and says so after each.

    Args:
        limit_s: a stall is longer than that; no piece may be.
        piece_s: what a piece takes. In a stall there is one at least, so that stalls without end make no wait endless.

    Attributes:
        total_s: of all stalls since it was made, but for their pieces.
    """

    def __init__(self, limit_s: float, piece_s: float):
        self._limit_s, self._piece_s, self.total_s = limit_s, piece_s, 0.0
        self._last = time.monotonic()

    def look(self) -> None:
        """Adds the time that the last piece took too long, if it did."""
        now = time.monotonic()
        if now - self._last > self._limit_s:
            self.total_s += now - self._last - self._piece_s
        self._last = now


class StallWatch:
    """A thread, "bagua-stall-watch", that sleeps for short times and notes when one of them has become long.

    Args:
        limit_s: a stall is longer than that; for so long peers wait for a sign of life.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self._woke_at = time.monotonic()  # written by the thread only, as is the next
        self._stall: tuple[float, float] | None = None  # when the last one ended, and seconds
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagua-stall-watch", daemon=True)
        start_thread(self._thread)

    def recent_s(self) -> float:
        """Returns the seconds of the last stall, if it ended a short while ago; otherwise 0."""
        now, stall = time.monotonic(), self._stall
        if now - self._woke_at > self._limit_s:  # the thread has yet to see it
            return now - self._woke_at
        return stall[1] if stall is not None and now - stall[0] < _RECENT * self._limit_s else 0.0

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._limit_s / _TICKS_PER_LIMIT):
            now = time.monotonic()
            if now - self._woke_at > self._limit_s:
                self._stall = (now, now - self._woke_at)
            self._woke_at = now
