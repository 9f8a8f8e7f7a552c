"""Where gradients stay local: a step that the GradScaler of one rank will skip is skipped by all.

Data path: end of backward, one small message. GradScaler skips the step of an optimizer when it finds NaN or Inf among
its gradients, so a rank that hears of another one's writes a NaN among its own, as a mean of gradients would have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagua.bucket import BucketStorage, is_finite
from bagua.group import ProcessGroup, ReduceOp


class SkippedSteps:
    """Agrees, per optimizer, whether all ranks' gradients are finite.

    Args:
        optimizer_of: which optimizer steps a parameter, by the parameter's id.
    """

    def __init__(self, storage: BucketStorage, optimizer_of: Mapping[int, int], group: ProcessGroup) -> None:
        self._group = group
        num_optimizers = 1 + max(optimizer_of.values())
        self._parameters: list[list[torch.nn.Parameter]] = [[] for _ in range(num_optimizers)]
        for parameter in storage.parameters:
            self._parameters[optimizer_of[id(parameter)]].append(parameter)

    def agree(self) -> None:
        """A synchronising backward has ended; all ranks call it."""
        if self._group.size == 1:
            return
        grads = [[p.grad for p in parameters if p.grad is not None] for parameters in self._parameters]
        bad = [not all(is_finite(grad) for grad in of_optimizer) for of_optimizer in grads]
        bad_anywhere = torch.tensor(bad, dtype=torch.uint8)
        self._group.all_reduce(bad_anywhere, ReduceOp.MAX, label="finite gradients", blocking=True).wait()
        for of_optimizer, is_bad, is_bad_anywhere in zip(grads, bad, bad_anywhere.tolist(), strict=True):
            if is_bad_anywhere and not is_bad:
                _spoil(of_optimizer)


def _spoil(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        if grad.numel():
            grad.detach()[(0,) * grad.dim()] = float("nan")
            return
