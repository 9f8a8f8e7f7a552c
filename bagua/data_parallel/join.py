"""Join: training on while ranks run out of inputs; torch.distributed's context of that name, for a wrapped model.

Data path: before every forward the ranks exchange a byte, what they are about to do. A rank that has left its ``with``
block takes part in the backwards of the others with gradients of zero, until all have left theirs; then it gets the
model and the optimizers' states of one that went on to the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from bagua.data_parallel.errors import fatal
from bagua.data_parallel.initial_sync import OptimizerStates, broadcast_model
from bagua.data_parallel.reducer import Reducer
from bagua.errors import InvalidArgument

__all__ = ["join"]

# The next action of a rank: it has left the block; a forward whose backward stays local; one in eval() or train() whose
# backward synchronises.
_LEFT, _LOCAL, _SYNCHRONISING = 0, 1, 2


class Joining:
    """The state of one ``join``; the reducer calls it.

    Args:
        reducer: of the wrapped model.
        divides_by_all: True to count the zeros of ranks that have left.
    """

    def __init__(self, reducer: Reducer, divides_by_all: bool) -> None:
        self._reducer, self._divides_by_all = reducer, divides_by_all
        self._num_active = reducer.group.size
        self.first_active = 0  # the lowest rank that has inputs; rank 0 before the first forward

    def before_forward(self, is_training: bool) -> None:
        """Reports a forward to the ranks that have left."""
        self._exchange(_SYNCHRONISING + is_training if self._reducer.synchronises else _LOCAL)

    def _exchange(self, own: int) -> int:
        """Returns what the active ranks do; _LEFT where there are none."""
        group = self._reducer.group
        plans = torch.empty(group.size, dtype=torch.uint8, device="cpu")
        work = group.all_gather(plans, torch.tensor([own], dtype=torch.uint8, device="cpu"), blocking=True)
        work.label = "join"
        work.wait()
        active = plans.nonzero().flatten().tolist()
        if not active:
            return _LEFT
        self._num_active, self.first_active = len(active), active[0]
        return int(plans.max())

    def after_backward(self) -> None:
        """Rescales the mean, which has counted zeros."""
        group, averages = self._reducer.group, getattr(self._reducer.algorithm, "average", True)
        if not self._divides_by_all and averages and self._num_active < group.size:
            grads = [member.local_grad() for member in self._reducer.storage.members]
            torch._foreach_mul_([grad for grad in grads if grad is not None], group.size / self._num_active)

    def shadow(self) -> bool:
        """Takes part until all ranks have left; returns True if some rank left before others."""
        had_to_wait = False
        while (plan := self._exchange(_LEFT)) != _LEFT:
            had_to_wait = True
            if plan >= _SYNCHRONISING:
                self._backward_of_zeros(bool(plan - _SYNCHRONISING))
        return had_to_wait

    @torch.enable_grad()
    def _backward_of_zeros(self, is_training: bool) -> None:
        reducer = self._reducer
        parameters = reducer.storage.parameters
        for parameter in parameters:
            parameter.grad = None
        reducer.before_forward(is_training, is_shadow=True)
        reducer.after_forward(is_training)
        total = torch.zeros((), requires_grad=True, device="cpu") * 1
        if not reducer.finds_unused:
            for parameter in parameters:
                product = (parameter * 0).sum()
                total = total + (product.real if product.is_complex() else product).to("cpu")
        total.register_hook(lambda grad: reducer.backward_begins(is_training, grad))
        total.backward()
        for parameter in parameters:
            parameter.grad = None


@contextlib.contextmanager
def join(reducer: Reducer, model: torch.nn.Module, divide_by_initial_world_size: bool = True) -> Iterator[None]:
    """Runs a block of training on every rank, however many batches each has; see ``BaguaHandle.join``."""
    reducer.group.check()
    if reducer.algorithm.exchanges != "gradients":
        raise InvalidArgument(
            f"join is for algorithms that exchange gradients; {reducer.algorithm.name!r} exchanges weights, so give "
            "all ranks the same number of batches"
        )
    if reducer.scope.others:
        raise InvalidArgument(
            "join with groups=: a rank without inputs has no tokens for the experts of others, which wait for them; "
            "give all ranks the same number of batches"
        )
    if float(reducer.training.loss_scale) != 1:
        raise InvalidArgument(
            "join with a GradScaler: a rank without inputs does not see the scale change; give all ranks the same "
            "number of batches, or train in bfloat16"
        )
    if reducer.joining is not None:
        raise InvalidArgument("join is active for this model already; leave that block first")
    joining = reducer.joining = Joining(reducer, divide_by_initial_world_size)
    try:
        yield
        with fatal(reducer.group, "join"):
            is_uneven = any(reducer.group.all_gather_plain(joining.shadow()))
            last = joining.first_active
            if is_uneven:
                states = OptimizerStates(reducer.training.optimizers, model, reducer.scope, last)
                states.receive()
                broadcast_model(model, reducer.scope, last)
                states.take_over()
    finally:
        reducer.joining = None
