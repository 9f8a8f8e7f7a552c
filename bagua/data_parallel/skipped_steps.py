"""Where gradients stay local: a step that the GradScaler of one rank will skip is skipped by all.

Data path: end of backward, one small message while a GradScaler is in use. Whether one is the ranks' first steps show,
which they tell one another in the same message, so that all know the same. GradScaler skips the step of an optimizer
when it finds NaN or Inf among its gradients, so a rank that hears of another one's writes a NaN among its own, as a
mean of gradients would have. An algorithm whose codec would spread NaN refuses such a step where nothing skips it.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from bagua.algorithms import Algorithm
from bagua.buckets import are_finite
from bagua.data_parallel.failures import ending
from bagua.data_parallel.followed_optimizers import FollowedOptimizers
from bagua.data_parallel.optimizer_hooks import Call
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import InvalidArgument

_SCALER_FILE = torch.amp.GradScaler.step.__code__.co_filename
_UNKNOWN, _PLAIN, _SCALED = range(3)  # what is known of the steps: whether a GradScaler makes them


class SkippedSteps:
    """Agrees, per optimizer, whether all ranks' gradients are finite: all that it steps, as GradScaler looks at."""

    def __init__(self, optimizers: FollowedOptimizers, algorithm: Algorithm, group: ProcessGroup) -> None:
        self._optimizers, self._algorithm, self._group = optimizers, algorithm, group
        self._is_bad: list[bool] = []  # by optimizer: a gradient of some rank's was not finite when last asked
        is_certain = algorithm.skips_together() or algorithm.refuses_nonfinite
        self._agreed = _SCALED if is_certain else _UNKNOWN  # equal on all ranks
        self._are_scaled: dict[int, bool] = {}  # by optimizer: whether a GradScaler has made a step, seen by this rank

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` is about to change weights while gradients stay local.

        Raises:
            InvalidArgument: a GradScaler makes the step and the ranks do not agree on skipped steps any more.
        """
        if self._agreed == _SCALED or self._group.size == 1 or self._algorithm.skips_together() is not None:
            return
        is_scaled = _is_made_by_scaler()
        index = self._optimizers.index_of(optimizer)
        self._are_scaled[index] = is_scaled or self._are_scaled.get(index, False)
        if is_scaled and self._agreed == _PLAIN:
            raise ending(
                self._group,
                InvalidArgument(
                    f"rank {self._group.rank}: a GradScaler makes a step of {type(optimizer).__name__} after steps "
                    "that none made, so the ranks do not agree on the steps that it skips; pass skip_together=True to "
                    "with_bagua",
                    rank=self._group.rank,
                ),
            )

    def agree(self, call: Call | None) -> Work | None:
        """A synchronising backward has ended; all ranks call it. Returns the completed message, if there was one.

        Args:
            call: whose closure the backward was in. A GradScaler takes no closures, and after the first backward in one
                the ranks may be at different ones.
        """
        if call is not None:
            call.num_backwards += 1
        is_due = call is None or (self._algorithm.refuses_nonfinite and call.num_backwards == 1)
        if self._group.size == 1 or not is_due or self._agreed == _PLAIN:
            return None
        grads = [_gradients_of(optimizer) for optimizer in self._optimizers]
        bad = [not are_finite(of_optimizer) for of_optimizer in grads]
        # An optimizer whose first steps are skipped is not seen yet, whatever the others do.
        is_scaled, is_unknown = any(self._are_scaled.values()), len(self._are_scaled) < len(grads)
        message = torch.tensor([*bad, is_scaled, is_unknown], dtype=torch.uint8)
        work = self._group.all_reduce(message, ReduceOp.MAX, label="finite gradients", blocking=True)
        work.wait()
        *self._is_bad, is_scaled, is_unknown = map(bool, message.tolist())
        if is_scaled or not is_unknown:
            self._agreed = max(self._agreed, _SCALED if is_scaled else _PLAIN)
        for of_optimizer, is_bad, is_bad_anywhere in zip(grads, bad, self._is_bad, strict=True):
            if is_bad_anywhere and not is_bad:
                _inject_nan(of_optimizer)
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


def _inject_nan(grads: list[torch.Tensor]) -> None:
    for grad in grads:
        if grad.numel():
            grad.detach()[(0,) * grad.dim()] = float("nan")
            return


def _is_made_by_scaler() -> bool:
    """Whether an enabled ``GradScaler.step`` is on the stack: torch tells an optimizer's hooks nothing of it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _SCALER_FILE and frame.f_code.co_name == "step":
            scaler = frame.f_locals.get("self")
            return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()
        frame = frame.f_back
    return False
