"""By how much losses are larger than they are, lest gradients of half precision vanish: the scale of a GradScaler.

What the codes of one step leave out is added to the gradients of the next one, so it has to grow with the scale.
Beside the data path: ``GradScaler.scale`` notes what it has multiplied by -> **here** -> at the beginning of each
backward what is remembered in the unit of gradients is multiplied by what the scale has grown by
(``algorithm_state.py``, and ``Algorithm.after_change_of_scale``). torch tells nobody that a loss is scaled, so where
something is remembered that method of torch's is wrapped, in the whole process. Scalers that do not call it are not
seen: what is remembered stays as it is then.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import torch

from bagua.distributed.devices import HostCopy

__all__ = ["LossScale"]


class _Note:
    """Of one thread's scaled losses.

    Attributes:
        count: how many there were.
        scale: of the last one; where it is on a device the scaler's tensor, which goes on to change.
    """

    count: int = 0
    scale: float | torch.Tensor = 1.0


class _Notes(threading.local):
    def __init__(self) -> None:
        self.of_thread = _Note()


_notes = _Notes()


def _note_scales() -> None:
    """From now on ``GradScaler.scale`` says what it has done."""
    scale = torch.amp.GradScaler.scale
    if hasattr(scale, "is_noted"):
        return

    @torch._disable_dynamo  # which leaves torch's own out, too
    @functools.wraps(scale)
    def noted(self: torch.amp.GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if self.is_enabled():
            note, now = _notes.of_thread, self._scale
            note.count += 1
            note.scale = now if now is not None and not now.is_cpu else self.get_scale()
        return scaled

    noted.is_noted = True
    torch.amp.GradScaler.scale = noted


class LossScale:
    """The scale of one model's losses, from backward to backward.

    A loss may be scaled before further forwards and after them: it counts from the first forward behind a backward on.

    Args:
        is_followed: whether anything is remembered in the unit of gradients; otherwise nobody asks.
        unit: the scale in which that counts at first.

    Attributes:
        unit: the scale in which it counts, that of the last backward; 1 without a GradScaler.
    """

    def __init__(self, is_followed: bool, unit: float = 1.0) -> None:
        self.is_followed, self.unit = is_followed, unit
        self._note: _Note | None = None  # of the thread of the forwards
        self._count = 0  # of its scaled losses, when the first forward since the last backward began
        self._has_begun_backward = False
        self._reading: tuple[torch.Tensor, HostCopy] | None = None  # on its way since then
        if is_followed:
            _note_scales()

    def forward_begins(self) -> None:
        """The losses that are scaled from now on are those of the next backward."""
        if not self.is_followed or (self._note is not None and not self._has_begun_backward):
            return
        self._note, self._has_begun_backward = _notes.of_thread, False
        self._count, scale = self._note.count, self._note.scale
        self._reading = (scale, HostCopy(scale)) if isinstance(scale, torch.Tensor) else None

    def change(self) -> float:
        """A backward begins: by what its scale is larger than ``unit``, which is its scale from now on.

        On a device the host waits for what was enqueued before the first forward since the last backward.
        """
        if self._note is None:
            return 1.0
        self._has_begun_backward = True
        now = self._now(self._note)
        if not 0 < now < math.inf:
            return 1.0
        before, self.unit = self.unit, now
        return now / before

    def _now(self, note: _Note) -> float:
        if note.count == self._count:
            return 1.0
        if not isinstance(note.scale, torch.Tensor):
            return note.scale
        if self._reading is None or self._reading[0] is not note.scale:  # a scaler's first loss
            self._reading = (note.scale, HostCopy(note.scale))
        return float(self._reading[1].get())
