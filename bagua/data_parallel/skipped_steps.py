"""Where gradients stay local: a step that the GradScaler of one rank will skip is skipped by all.

Data path: end of backward, one small message while a GradScaler is in use. Whether one is the ranks' first steps show,
of which they tell one another before it, so that all know the same. GradScaler skips the step of an optimizer when it
finds NaN or Inf among its gradients, so a rank that hears of another one's writes a NaN among its own, as a mean of
gradients would have. An algorithm whose codec would spread NaN refuses such a step where nothing skips it.

On a device all of this is enqueued and the host goes on. A step that should have been refused has then changed weights,
and is an error when the next forward or backward begins, unless the host is asked to wait in each backward.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

from bagua.algorithms import Algorithm
from bagua.buckets import are_finite, finite_flag
from bagua.data_parallel.failures import ending
from bagua.data_parallel.followed_optimizers import FollowedOptimizers
from bagua.data_parallel.nonfinite_guard import gradients_of
from bagua.data_parallel.optimizer_hooks import Call
from bagua.distributed.devices import HostCopy
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import InvalidArgument

_SCALER_FILE = torch.amp.GradScaler.step.__code__.co_filename
_UNKNOWN, _PLAIN, _SCALED = range(3)  # what is known of the steps: whether a GradScaler makes them


class SkippedSteps:
    """Agrees, per optimizer, whether all ranks' gradients are finite: all that it steps, as GradScaler looks at.

    Args:
        device: of the model, where the ranks agree.
        is_late: whether nothing may wait for that device.
    """

    def __init__(
        self,
        optimizers: FollowedOptimizers,
        algorithm: Algorithm,
        group: ProcessGroup,
        device: torch.device,
        is_late: bool,
    ) -> None:
        self._optimizers, self._algorithm, self._group = optimizers, algorithm, group
        self._device, self._is_late = device, is_late
        self._is_bad: list[bool] = []  # by optimizer: a gradient of some rank's was not finite when last asked
        self._late: HostCopy | None = None  # the same, on its way
        # Optimizers that have stepped since, and whether their gradients were finite, which others may have changed.
        self._used: list[tuple[int, HostCopy]] = []
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

    def agree(self, call: Call | None) -> list[Work]:
        """A synchronising backward has ended; all ranks call it. Returns the completed messages.

        Args:
            call: whose closure the backward was in. A GradScaler takes no closures, and after the first backward in one
                the ranks may be at different ones.
        """
        if call is not None:
            call.num_backwards += 1
        is_due = call is None or (self._algorithm.refuses_nonfinite and call.num_backwards == 1)
        if self._group.size == 1 or not is_due:
            return []
        works = [self._agree_on_scaler()] if self._agreed == _UNKNOWN else []
        if self._agreed != _PLAIN:
            works.append(self._agree_on_gradients())
        return works

    def _agree_on_scaler(self) -> Work:
        # An optimizer whose first steps are skipped is not seen yet, whatever the others do.
        is_unknown = len(self._are_scaled) < len([*self._optimizers])
        message = torch.tensor([any(self._are_scaled.values()), is_unknown], dtype=torch.uint8, device="cpu")
        work = self._group.all_reduce(message, ReduceOp.MAX, label="scaled steps", blocking=True)
        work.wait()
        is_scaled, is_unknown = map(bool, message.tolist())
        if is_scaled or not is_unknown:
            self._agreed = _SCALED if is_scaled else _PLAIN
        return work

    def _agree_on_gradients(self) -> Work:
        grads = [_gradients_of(optimizer) for optimizer in self._optimizers]
        is_on_host = self._device.type == "cpu"
        if is_on_host:
            own = torch.tensor(
                [not are_finite(of_optimizer) for of_optimizer in grads], dtype=torch.uint8, device="cpu"
            )
        else:
            are_good = torch.stack([finite_flag(of_optimizer, self._device) for of_optimizer in grads])
            own = are_good.logical_not().to(torch.uint8)
        agreed = own.clone()
        work = self._group.all_reduce(agreed, ReduceOp.MAX, label="finite gradients", blocking=True)
        work.wait()
        if not (is_on_host and torch.equal(agreed, own)):
            for of_optimizer, is_bad_elsewhere in zip(grads, agreed > own, strict=True):
                _inject_nan(of_optimizer, is_bad_elsewhere)
        if self._algorithm.refuses_nonfinite:
            self._forget()
            if self._is_late:
                self._late = HostCopy(agreed)
            else:
                self._is_bad = list(map(bool, agreed.tolist()))
        return work

    def settle(self) -> InvalidArgument | None:
        """A forward or backward begins: what to raise, where a step has changed weights by what is not finite.

        Waits for the device to have come to the end of the last backward, if a step has followed it.
        """
        if self._late is None or not self._used:
            return None  # a step may follow
        is_bad, used = list(map(bool, self._late.get().tolist())), self._used
        self._forget()
        self._is_bad = is_bad  # of another optimizer's step the host knows it in time
        names = [type(optimizer).__name__ for optimizer in self._optimizers]
        wrong = [names[index] for index, look in used if is_bad[index] and not look.get()]
        if not wrong:
            return None
        return InvalidArgument(
            f"in the last step a gradient was NaN or Inf on some rank, and algorithm {self._algorithm.name!r} cannot "
            f"send the weights that {wrong[0]} has made of it. They have changed by it on all ranks: load a "
            "checkpoint, by model.bagua.load_state_dict too. torch.amp.GradScaler skips such a step; "
            'with_bagua(..., nonfinite_check="sync") refuses it, and waits for the device in each backward'
        )

    @property
    def has_steps(self) -> bool:
        """Whether ``settle`` may have to tell of a step."""
        return bool(self._used)

    def forget_steps(self) -> None:
        """The weights that the last steps have made are given up."""
        self._used = []

    def refused_ids(self) -> frozenset[int]:
        """The ids of the parameters whose optimizers may not step with the gradients that are there; after ``settle``.

        Waits for the device.
        """
        is_bad = self._is_bad if self._late is None else map(bool, self._late.get().tolist())
        of_bad = [optimizer for optimizer, bad in zip(self._optimizers, is_bad, strict=False) if bad]
        return frozenset(id(p) for optimizer in of_bad for options in optimizer.param_groups for p in options["params"])

    def _forget(self) -> None:
        self._is_bad, self._late, self._used = [], None, []

    def check_step(self, optimizer: torch.optim.Optimizer, is_certain: bool) -> None:
        """``optimizer`` is about to change weights by the gradients that are there, unless its closure raises first.

        Raises:
            InvalidArgument: on all ranks, where one of them had NaN or Inf and the algorithm cannot send it.
        """
        if self._late is not None and is_certain:
            look = HostCopy(finite_flag(_gradients_of(optimizer), self._device))
            self._used.append((self._optimizers.index_of(optimizer), look))
        if not any(self._is_bad):
            return
        if self._is_bad[self._optimizers.index_of(optimizer)] and not are_finite(_gradients_of(optimizer)):
            raise InvalidArgument(
                f"a gradient that {type(optimizer).__name__} would step with is NaN or Inf on some rank, and algorithm "
                f"{self._algorithm.name!r} could not send the weights that come of it. No rank has changed a weight; "
                "skip the step with zero_grad(), as torch.amp.GradScaler does"
            )


def _gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return gradients_of(p for options in optimizer.param_groups for p in options["params"])


def _inject_nan(grads: list[torch.Tensor], is_due: torch.Tensor) -> None:
    """Writes a NaN among them if it is due, a bool of no dimensions, which the host does not look at."""
    for grad in grads:
        # Of .data no graph that create_graph=True has made hears, whose values are as they were if it is not due.
        values = grad.data._values() if grad.layout is torch.sparse_coo else grad.data
        if values.numel():
            values[(0,) * values.dim()].masked_fill_(is_due.to(values.device), float("nan"))
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
