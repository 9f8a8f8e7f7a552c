"""By how much losses are larger than they are, lest gradients of half precision vanish: the scale of a GradScaler.

What the codes of one step leave out is added to the gradients of the next one, so it has to grow with the scale.
Beside the data path: ``GradScaler.scale`` notes what it has multiplied by -> **here** -> at the beginning of each
backward what is remembered in the unit of gradients is multiplied by what the scale has grown by
(``algorithm_state.py``, and ``Algorithm.after_change_of_scale``). The scale is a device's to change, and the host does
not wait for it: what it has not heard by then stays there, as a tensor. torch tells nobody that a loss is scaled, so
where something is remembered that method of torch's is wrapped, in the whole process. Scalers that do not call it are
not seen: what is remembered stays as it is then.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import torch

from bagua.distributed.devices import HostCopy, is_capturing, keep_for_current_stream, supported_types

__all__ = ["LossScale"]


class _Scale:
    """A scale as a device is about to know it, which nobody waits for.

    Args:
        tensor: one number, as the current stream of its device finds it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._on_device = tensor.detach().clone()  # a scaler's own tensor goes on to change
        # Where bagua communicates nothing nobody asks for it, but perhaps for a model on the CPU.
        self._on_host = HostCopy(self._on_device, at_once=True) if tensor.device.type in supported_types() else None

    def known(self) -> float | _Scale:
        """The number where the host has it by now."""
        on_host = None if self._on_host is None else self._on_host.get_now()
        return self if on_host is None else float(on_host)

    def on(self, device: torch.device) -> torch.Tensor:
        """The number in float64, for the current stream of a device, whichever stream has it first."""
        if self._on_host is not None:
            self._on_host.order_behind()
        keep_for_current_stream(self._on_device)
        return self._on_device.to(device, torch.float64, non_blocking=True)

    def get(self) -> float:
        """The number; waits for it."""
        return float(self._on_device if self._on_host is None else self._on_host.get())


class _Note:
    """Of one thread's scaled losses.

    Attributes:
        count: how many there were.
        scale: of the last one.
    """

    count: int = 0
    scale: float | _Scale = 1.0


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
        # A graph that is captured is of other models: the backward of a wrapped one is refused there.
        if self.is_enabled() and self._scale is not None and not is_capturing(self._scale.device):
            note = _notes.of_thread
            note.count += 1
            note.scale = self.get_scale() if self._scale.is_cpu else _Scale(self._scale)
        return scaled

    noted.is_noted = True
    torch.amp.GradScaler.scale = noted


class LossScale:
    """The scale of one model's losses, from backward to backward.

    A loss may be scaled before further forwards and after them: it counts from the first forward behind a backward on.

    Args:
        is_followed: whether anything is remembered in the unit of gradients; otherwise nobody asks.
        unit: the scale in which that counts at first.
    """

    def __init__(self, is_followed: bool, unit: float = 1.0) -> None:
        self.is_followed = is_followed
        self._unit: float | _Scale = unit
        self._note: _Note | None = None  # of the thread of the forwards
        self._count = 0  # of its scaled losses, when the first forward since the last backward began
        self._has_begun_backward = False
        self._applied: float | _Scale = unit  # the last one, by which the unit is what it is
        if is_followed:
            _note_scales()

    @property
    def unit(self) -> float:
        """The scale in which it counts, that of the last backward; 1 without a GradScaler. Waits for the device."""
        return self._unit.get() if isinstance(self._unit, _Scale) else self._unit

    def forward_begins(self) -> None:
        """The losses that are scaled from now on are those of the next backward."""
        if self.is_followed and (self._note is None or self._has_begun_backward):
            self._note, self._has_begun_backward = _notes.of_thread, False
            self._count = self._note.count

    def change(self, device: torch.device) -> float | torch.Tensor:
        """A backward begins: by what its scale is larger than ``unit``, which is its scale from now on.

        Where the host does not know that yet it does not wait: it is a tensor of the device then, in float64.
        """
        if self._note is None:
            return 1.0
        self._has_begun_backward = True
        scale = self._note.scale if self._note.count != self._count else 1.0
        if scale is self._applied:  # another backward of the same loss
            return 1.0
        self._applied = scale
        now, before = (_known(one, device) for one in (scale, self._unit))
        if not (isinstance(now, _Scale) or isinstance(before, _Scale)):
            if not 0 < now < math.inf:
                return 1.0
            self._unit = now
            return now / before
        now, before = (_on(device, one) for one in (now, before))
        is_valid = (now > 0) & (now < math.inf)
        self._unit = _Scale(torch.where(is_valid, now, before))
        return torch.where(is_valid, now / before, 1.0)


def _known(scale: float | _Scale, device: torch.device) -> float | _Scale:
    """What can be said of it without waiting, but on the CPU, which has nothing else to do meanwhile."""
    if not isinstance(scale, _Scale):
        return scale
    return scale.get() if device.type == "cpu" else scale.known()


def _on(device: torch.device, scale: float | _Scale) -> torch.Tensor:
    if isinstance(scale, _Scale):
        return scale.on(device)
    return torch.full((), scale, dtype=torch.float64, device=device)
