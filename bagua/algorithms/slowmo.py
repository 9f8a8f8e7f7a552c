"""slowmo: local steps, an exact average, and then a step of slow momentum in units of the learning rate.

Data path: policy, on the engine of ``_outer.py``. Per exchange one all_reduce per bucket, 2 (n-1)/n of its bytes.
Source: arXiv 1910.00643.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch

from bagua.algorithms._outer import MOMENTUM, REFERENCE, Mean, OuterSteps, Schedule, check_range
from bagua.algorithms.base import About, ParameterState
from bagua.algorithms.registry import register
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class SlowMomentum:
    """The outer rule u <- beta u + D / lr; reference <- reference - slow_lr lr u, with the lr of the local steps.

    Attributes:
        beta: of the formula.
        slow_lr: of it.
    """

    beta: float
    slow_lr: float

    needs_rate: ClassVar[bool] = True

    def step(
        self, reference: torch.Tensor, delta: torch.Tensor, momentum: torch.Tensor | None, learning_rate: float
    ) -> None:
        """See ``OuterRule``; the limit for an lr of 0 is reference - slow_lr D, and u stays as it is."""
        assert momentum is not None
        if not learning_rate:
            reference.sub_(delta, alpha=self.slow_lr)
            return
        momentum.mul_(self.beta).add_(delta, alpha=1 / learning_rate)
        reference.sub_(momentum, alpha=self.slow_lr * learning_rate)


@register
@dataclasses.dataclass(kw_only=True)
class SlowMo(OuterSteps):
    """D = reference - mean weights; u <- beta u + D / lr; reference <- reference - slow_lr lr u; weights <- reference.

    The states of the optimizer stay each rank's own. lr is that of the parameter's group at the exchange.

    Args:
        sync_every: the local steps of each optimizer between two exchanges.
        slow_momentum: beta.
        slow_lr: of the formula. With 1, and beta 0, it is ``local_sgd`` with ``momentum="keep"``.
        warmup_steps: so many steps of every optimizer first average gradients.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="slowmo", sync_every=12)
    """

    about = About(
        sends="how far the weights have moved since the last exchange, full precision",
        to="all ranks",
        when="after every k-th optimizer step, which waits",
        bytes_per_step="2 (n-1)/n G / k",
        memory="3 G",
        use_when="as `local_sgd`, where its loss lags behind; the learning rate is that of the synchronous run",
        paper="[1910.00643](https://arxiv.org/abs/1910.00643)",
    )

    sync_every: int = 12
    slow_momentum: float = 0.5
    slow_lr: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = Schedule(self.sync_every, warmup_steps=self.warmup_steps)
        check_range("slow_momentum", self.slow_momentum, 0, 1)
        check_range("slow_lr", self.slow_lr, 0, math.inf, is_least_allowed=False)
        states = {REFERENCE: ParameterState(None), MOMENTUM: ParameterState(None)}
        self.set_parts(schedule, Mean(), SlowMomentum(self.slow_momentum, self.slow_lr), states)

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check(optimizers)
        for index, optimizer in enumerate(optimizers):
            for number, options in enumerate(optimizer.param_groups):
                if not isinstance(options.get("lr"), (int, float, torch.Tensor)):
                    raise InvalidArgument(
                        f"algorithm 'slowmo' counts in units of the learning rate, but lr of group {number} of "
                        f"optimizers[{index}] ({type(optimizer).__name__}) is {options.get('lr')!r}; take 'diloco'"
                    )
