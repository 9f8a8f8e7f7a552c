"""Where gradients stay local: a step that the GradScaler of one rank will skip is skipped by all.

Data path: end of backward, one small message. GradScaler skips the step of an optimizer when it finds NaN or Inf among
its gradients, so a rank that hears of another one's writes a NaN among its own, as a mean of gradients would have. An
algorithm whose codec would spread NaN refuses such a step where nothing skips it.
"""

from __future__ import annotations

import torch

from bagua.algorithms.base import Algorithm
from bagua.buckets import are_finite
from bagua.data_parallel.followed_optimizers import FollowedOptimizers
from bagua.data_parallel.optimizer_hooks import Call
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import InvalidArgument


class SkippedSteps:
    """Agrees, per optimizer, whether all ranks' gradients are finite: all that it steps, as GradScaler looks at."""

    def __init__(self, optimizers: FollowedOptimizers, algorithm: Algorithm, group: ProcessGroup) -> None:
        self._optimizers, self._algorithm, self._group = optimizers, algorithm, group
        self._is_bad: list[bool] = []  # by optimizer: a gradient of some rank's was not finite when last asked

    def agree(self, call: Call | None) -> Work | None:
        """A synchronising backward has ended; all ranks call it. Returns the completed message, if there was one.

        Args:
            call: whose closure the backward was in. A GradScaler takes no closures, and after the first backward in one
                the ranks may be at different ones.
        """
        if call is not None:
            call.num_backwards += 1
        is_due = call is None or (self._algorithm.refuses_nonfinite and call.num_backwards == 1)
        if self._group.size == 1 or not is_due:
            return None
        grads = [_gradients_of(optimizer) for optimizer in self._optimizers]
        bad = [not are_finite(of_optimizer) for of_optimizer in grads]
        bad_anywhere = torch.tensor(bad, dtype=torch.uint8)
        work = self._group.all_reduce(bad_anywhere, ReduceOp.MAX, label="finite gradients", blocking=True)
        work.wait()
        self._is_bad = [bool(is_bad) for is_bad in bad_anywhere.tolist()]
        for of_optimizer, is_bad, is_bad_anywhere in zip(grads, bad, self._is_bad, strict=True):
            if is_bad_anywhere and not is_bad:
                _spoil(of_optimizer)
        return work

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to change weights by the gradients that are there.

        Raises:
            InvalidArgument: on all ranks, where one of them had NaN or Inf and the algorithm cannot send it.
        """
        if not self._algorithm.refuses_nonfinite or not any(self._is_bad):
            return
        if self._is_bad[self._optimizers.index_of(optimizer)] and not are_finite(_gradients_of(optimizer)):
            raise InvalidArgument(
                f"a gradient that {type(optimizer).__name__} would step with is NaN or Inf on some rank, and algorithm "
                f"{self._algorithm.name!r} could not send the weights that come of it. No rank has changed a weight; "
                "skip the step with zero_grad(), as torch.amp.GradScaler does"
            )


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p.grad for options in optimizer.param_groups for p in options["params"] if p.grad is not None]


def _spoil(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        if grad.numel():
            grad.detach()[(0,) * grad.dim()] = float("nan")
            return
