"""Where gradients stay local: a step that the GradScaler of one rank will skip is skipped by all.

Data path: end of backward, one small message. GradScaler skips the step of an optimizer when it finds NaN or Inf among
its gradients, so a rank that hears of another one's writes a NaN among its own, as a mean of gradients would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.bucket import is_finite
from bagua.group import ProcessGroup, ReduceOp, Work


class SkippedSteps:
    """Agrees, per optimizer, whether all ranks' gradients are finite: all that it steps, as GradScaler looks at."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], group: ProcessGroup) -> None:
        self._optimizers, self._group = tuple(optimizers), group

    def agree(self) -> Work | None:
        """A synchronising backward has ended; all ranks call it. Returns the completed message, if there was one."""
        if self._group.size == 1:
            return None
        grads = [
            [p.grad for options in optimizer.param_groups for p in options["params"] if p.grad is not None]
            for optimizer in self._optimizers
        ]
        bad = [not all(is_finite(grad) for grad in of_optimizer) for of_optimizer in grads]
        bad_anywhere = torch.tensor(bad, dtype=torch.uint8)
        work = self._group.all_reduce(bad_anywhere, ReduceOp.MAX, label="finite gradients", blocking=True)
        work.wait()
        for of_optimizer, is_bad, is_bad_anywhere in zip(grads, bad, bad_anywhere.tolist(), strict=True):
            if is_bad_anywhere and not is_bad:
                _spoil(of_optimizer)
        return work


def _spoil(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        if grad.numel():
            grad.detach()[(0,) * grad.dim()] = float("nan")
            return
