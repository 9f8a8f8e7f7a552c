"""GradScaler: torch's, for models whose ranks must skip the same steps, and whose residuals follow the loss scale.

Beside the data path, after backward: gradients are unscaled -> **agreement on found_inf** -> the optimizer's step ->
**the new scale** -> what algorithms remember in the unit of gradients (``data_parallel/states.py``).
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from bagua.data_parallel.handle import BaguaHandle, handles_stepped_by
from bagua.distributed.process_group import ProcessGroup, ReduceOp

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose ranks find Inf together, as FSDP's ShardedGradScaler does.

    torch's own works as under DDP where gradients are exchanged: all ranks have the same ones. With algorithms that
    exchange weights a rank has gradients of its own, and this class makes the ranks of the model skip a step that one
    of them would skip, by one message of four bytes per step; under ``async``, whose ranks do not wait for one another,
    each skips by itself. Where error feedback, ``powersgd`` or ``qadam`` remember something in the unit of gradients,
    it is rescaled when the scale changes; with torch's own it is off by the ratio for one step.

    Args:
        args, kwargs: as for torch.amp.GradScaler: device, init_scale, growth_factor, ...

    Example:
        >>> scaler = bagua.amp.GradScaler("cpu")
        >>> scaler.scale(loss(model(x), y)).backward()
        >>> scaler.step(optimizer); scaler.update()
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._handles: weakref.WeakSet[BaguaHandle] = weakref.WeakSet()  # of what was stepped since the last update

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        handles = handles_stepped_by(optimizer)
        self._handles.update(handles)
        groups = [] if _are_equal_on_all_ranks(optimizer, handles) else _ranks_in_step(handles)
        if not groups:
            return found
        flags = [flag.to(found_inf.device) for flag in found.values()] or [found_inf]
        together = torch.stack(flags).amax(0, keepdim=True)
        for group in groups:
            group.all_reduce(together, ReduceOp.MAX, label="found_inf", blocking=True).wait()
        for flag in found.values():
            flag.copy_(together[0])
        return found or {found_inf.device: together[0]}

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale as torch's does, and rescales what algorithms remember in the unit of gradients."""
        before = self._scale_now()
        super().update(new_scale)
        now = self._scale_now()
        for handle in list(self._handles) if before is not None and now is not None else ():
            handle.reducer.change_loss_scale(before, now)
        self._handles.clear()

    def _scale_now(self) -> float | torch.Tensor | None:
        if not self.is_enabled() or self._scale is None:
            return None
        return self._scale.item() if self._scale.is_cpu else self._scale.clone()


def _ranks_in_step(handles: list[BaguaHandle]) -> list[ProcessGroup]:
    """Returns the groups of models whose ranks step in turn."""
    return [one.group for one in handles if one.group.size > 1 and one.algorithm.is_lockstep]


def _are_equal_on_all_ranks(optimizer: torch.optim.Optimizer, handles: list[BaguaHandle]) -> bool:
    """Returns True if all gradients that the optimizer steps with are exchanged by wrapped models among all ranks."""
    reducers = (one.reducer for one in handles if one.reducer.sends_gradients and not one.reducer.scope.others)
    exchanged = {id(parameter) for reducer in reducers for parameter in reducer.storage.parameters}
    parameters = (parameter for options in optimizer.param_groups for parameter in options["params"])
    return all(id(parameter) in exchanged for parameter in parameters if parameter.requires_grad)
