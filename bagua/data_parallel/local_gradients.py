"""Gradients of this rank's own, until a backward synchronises them: no optimizer may step them.

A backward inside no_sync has left them, or one while weights are exchanged, they are older than the wrap, or no hook
was called for them (gradient_hooks.py). Beside the data path: ``optimizer_steps.py`` asks before an optimizer steps. A
gradient that was cleared in between is none.
"""

from __future__ import annotations

import torch

from bagua.buckets import BucketStorage
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument


class LocalGradients:
    """Which parameters may hold one. A single rank has none: its gradients are those of all."""

    def __init__(self, storage: BucketStorage, group: ProcessGroup) -> None:
        self._names, self._parameters, self._group = storage.names, storage.parameters, group
        self._indices: set[int] = set()

    def begin_after(self, earlier: LocalGradients | None) -> None:
        """The model is wrapped, with the gradients that are there.

        Args:
            earlier: those of the wrap before; None: these ranks have synchronised none.
        """
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is not None and (earlier is None or earlier._may_hold(parameter)):
                self._indices.add(index)

    def _may_hold(self, parameter: torch.nn.Parameter) -> bool:
        return any(self._parameters[index] is parameter for index in self._indices)

    def may_be_any(self) -> bool:
        """False: there is none."""
        return bool(self._indices) and self._group.size > 1

    def add(self, index: int) -> None:
        """A backward that synchronises no gradients has added to that of a parameter."""
        self._indices.add(index)

    def clear(self) -> None:
        """All gradients have been synchronised."""
        self._indices.clear()

    def refusal(self, optimizer: torch.optim.Optimizer) -> InvalidArgument | None:
        """What to say of a step that would use one; None where it uses none."""
        if not self._indices or self._group.size == 1:
            return None
        stepped = {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}
        held = [index for index in sorted(self._indices) if self._is_held(index, stepped)]
        if not held:
            return None
        name, more = self._names[held[0]], f" and {len(held) - 1} more" if held[1:] else ""
        return InvalidArgument(
            f"rank {self._group.rank}: {type(optimizer).__name__}.step would use gradients that no_sync() has left "
            f"unsynchronised, of {name!r}{more}, or a backward before with_bagua, or one after torch swapped the "
            "parameter's tensor (torch.utils.swap_tensors) and before a forward of the model; the ranks would part. "
            "Have the last backward before a step outside no_sync(), or drop these gradients with zero_grad()",
            rank=self._group.rank,
        )

    def _is_held(self, index: int, stepped: set[int]) -> bool:
        parameter = self._parameters[index]
        return id(parameter) in stepped and parameter.grad is not None and bool(parameter.grad.any())
