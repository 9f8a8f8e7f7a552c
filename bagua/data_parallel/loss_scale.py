"""By how much gradients in backward are larger than those that optimizers step with: the scale of a GradScaler.

What the codes of one step leave out is added to the gradients of the next one, so it has to grow with the scale.
Beside the data path: an optimizer's step shows which scaler makes it -> **here** -> at the beginning of each backward
what is remembered in the unit of gradients is multiplied by what the scale has grown by (``algorithm_state.py``, and
``Algorithm.after_change_of_scale``). torch tells nobody that a loss is scaled, but before the first step of a run
nothing is remembered. Behind a checkpoint the scale is taken to be the checkpoint's; a step that shows otherwise is
refused.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from types import FrameType

import torch

from bagua.distributed.devices import HostCopy
from bagua.errors import InvalidArgument

__all__ = ["LossScale", "scaler_of_step"]

_SCALER_FILE = torch.amp.GradScaler.step.__code__.co_filename


def scaler_of_step() -> torch.amp.GradScaler | None:
    """The enabled GradScaler whose ``step`` is on the stack: torch tells an optimizer's hooks nothing of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _SCALER_FILE and frame.f_code.co_name == "step":
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled() else None
        frame = frame.f_back
    return None


class LossScale:
    """The scale that one model's losses have, as far as its steps have shown it.

    Args:
        is_followed: whether anything is remembered in the unit of gradients; otherwise nobody asks.
        checkpoint: the scale in which what a checkpoint has remembered counts; None: there is none.
        earlier: of the run that the checkpoint is loaded into, whose scaler is known.
    """

    def __init__(self, is_followed: bool, checkpoint: float | None = None, earlier: LossScale | None = None) -> None:
        self.is_followed = is_followed
        self._scaler = _nobody if earlier is None else earlier._scaler
        self._unit: Callable[[], float] = lambda: 1.0 if checkpoint is None else checkpoint
        self._is_loaded, self._has_stepped = checkpoint is not None, False
        self._next: Callable[[], float] | None = None

    def see_step(self) -> None:
        """An optimizer is about to change weights.

        Raises:
            InvalidArgument: the scale is not the one at which gradients had what is remembered added to them.
        """
        if not self.is_followed:
            return
        scaler, known = scaler_of_step(), self._scaler()
        if scaler is None:  # which may be one that the program has unscaled by itself
            if known is None and self._is_loaded:
                self._check(None, 1.0)
        elif scaler is not known:
            scale = _now(scaler)
            if self._has_stepped or self._is_loaded:
                self._check(scaler, scale())
            self._scaler, self._unit = weakref.ref(scaler), scale
        self._is_loaded, self._has_stepped = False, True

    def _check(self, scaler: torch.amp.GradScaler | None, scale: float) -> None:
        unit = self.unit
        # Where a run goes over to a larger scale, what is left of the step before counts less, once.
        if scale == unit or (scale > unit and not self._is_loaded):
            return
        who = "no GradScaler makes this step" if scaler is None else f"this step's GradScaler has a scale of {scale:g}"
        raise InvalidArgument(
            f"{who}, but what earlier steps have left out has been added to its gradients at a scale of {unit:g}, by "
            f"which it is wrong. No weight has changed. Load the state of the GradScaler with the checkpoint, or make "
            f"one with init_scale={unit:g}, and load model.bagua's state again"
        )

    @property
    def unit(self) -> float:
        """The scale in which what is remembered counts; 1 without a GradScaler."""
        return self._unit()

    def look(self) -> None:
        """A forward begins. On a device the scale is on its way to the host from now on."""
        scaler = self._scaler() if self.is_followed else None
        self._next = None if scaler is None else _now(scaler)

    def change(self) -> float:
        """By what the scale has grown since this was last asked; what is remembered is to grow alike.

        On a device it waits for what was enqueued before the last forward.
        """
        if not self.is_followed:
            return 1.0
        if self._next is None:
            self.look()
        scale, self._next = self._next, None
        if scale is None or not (0 < scale() < math.inf):
            return 1.0
        before, self._unit = self.unit, scale
        return scale() / before


def _nobody() -> None:
    return None


def _now(scaler: torch.amp.GradScaler) -> Callable[[], float]:
    """Its scale, to be asked for later."""
    scale = scaler._scale
    if scale is None or scale.is_cpu:
        value = scaler.get_scale()
        return lambda: value
    copy = HostCopy(scale)
    return lambda: float(copy.get())
