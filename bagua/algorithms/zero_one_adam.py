"""zero_one_adam: Adam in a warm-up, then local steps whose momentum is averaged in one bit, ever more rarely.

Data path: policy, on the engine of ``_outer.py``, with ``bagua.optim.QAdam``. What travels of D, how far the weights
have moved since the last exchange, is u = D (sqrt(v) + eps), the sum of the steps' lr m: so the mean of u gives the
ranks one m again, too. Source: 0/1 Adam, arXiv 2202.06009.

Invariant: v is the same on all ranks, since every step that refreshes it is on averaged gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from bagua import codecs, optim
from bagua.algorithms._adam import AdamOptions, training_groups, warmup_of_all
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._compressed import is_bias
from bagua.algorithms._outer import REFERENCE, RESIDUAL, Mean, OuterSGD, OuterSteps, Schedule, check_range
from bagua.algorithms.base import About, ParameterState, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class ZeroOneAdam(AdamOptions, OuterSteps):
    """Steps of QAdam; at an exchange u <- mean of C(u), m <- u / sum of lr, weights <- reference - u / (sqrt(v) + eps).

    u sums lr m over the steps since the last exchange, where lr stands for lr / (1 - b1^t); C is a codec with error
    feedback. In the warm-up, steps that refresh v (``refresh_doubling`` of QAdam) average gradients, and u is exchanged
    after each of the others; after the warm-up, at distances that double.

    With ``codec`` parameters of one dimension travel at full precision. What the codec leaves out of u stays as it is
    when the learning rate falls, so m is off by more after a sudden fall.

    The model's optimizers must be ``bagua.optim.QAdam``. The options of Adam may be given to either; given to both they
    must be equal. A parameter must take part in every step, or in none: one that came late would learn v on this rank
    alone, and is refused by name.

    Args:
        warmup_steps, betas, eps, weight_decay, variance_floor: as for QAdam.
        refresh_doubling: as for QAdam; 16 in the paper. In one bit it wants a long run: see docs/convergence.md.
        interval_doubling: the distance of exchanges doubles after so many steps. The paper doubles it when the learning
            rate has halved.
        max_interval: the distance at which that ends.
        codec: of u; "" for full precision.
        state_dtype: "float32" or "bfloat16", of what the codec leaves out.

    Example:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=1000)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="zero_one_adam")
    """

    about = About(
        sends="gradients at full precision in the warm-up; then momentum, summed over local steps, in 1 bit",
        to="all ranks",
        when="after an optimizer step, which waits; at last after every 16th",
        bytes_per_step="2 (n-1)/n G / 32, at last divided by 16",
        memory="2 G, and (1 + 1/n) G for error feedback, in bfloat16 half of that",
        use_when="the model is trained with Adam, for long, on slow links",
        paper="[2202.06009](https://arxiv.org/abs/2202.06009)",
    )

    keeps_mean = True

    refresh_doubling: int | None = None
    interval_doubling: int = 1000
    max_interval: int = 16
    codec: str = "onebit"
    state_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("interval_doubling", "max_interval"):
            check_range(name, getattr(self, name), 1, float("inf"))
        if self.state_dtype not in ("float32", "bfloat16"):
            raise InvalidArgument(f"state_dtype is {self.state_dtype!r}, expected 'float32' or 'bfloat16'")
        codec = codecs.get(self.codec) if self.codec else None  # raises for an unknown one
        states, decay = {REFERENCE: ParameterState(None)}, None
        if codec is not None:
            codec.check_error_feedback(True)
            states[RESIDUAL], decay = ParameterState(getattr(torch, self.state_dtype), is_scaled=True), 1.0
        self.set_parts(Schedule(1), Mean(codec, decay), OuterSGD(1.0), states, codec)

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._sums = [[0.0] * len(optimizer.param_groups) for optimizer in training.optimizers]  # of lr / (1 - b1^t)

    def begin(self, buckets: Sequence[Bucket]) -> None:
        self.num_steps = [optimizer.num_steps() for optimizer in self.training.optimizers]
        super().begin(buckets)

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return super().bucket_class(parameter) and not is_bias(parameter)

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check(optimizers)
        for parameter in (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]):
            if parameter.dtype.itemsize < 4:
                raise InvalidArgument(
                    f"algorithm {self.name!r} makes momentum of how far weights have moved, which {parameter.dtype} "
                    "rounds away; keep weights in float32, under torch.autocast, or take algorithm 'qadam'"
                )

    # --- which steps

    def averages(self, index: int) -> bool:
        step, groups = self.num_steps[index] + 1, training_groups(self.training.optimizers[index])
        return self.training.group.size == 1 or any(optim.refreshes_v(step, options) for options in groups)

    def due(self, index: int) -> int | None:
        num_after = self.num_steps[index] - warmup_of_all(self.training.optimizers[index])
        if num_after <= 0:
            return 0
        num_doublings = (int(num_after) - 1) // self.interval_doubling
        return 0 if num_after % min(2 ** min(num_doublings, 32), self.max_interval) == 0 else None

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        index, step = self.index_of(optimizer), optimizer.num_steps()
        if step != self.num_steps[index] + 1:
            raise InvalidArgument(
                f"optimizers[{index}] has made {step} steps, expected {self.num_steps[index] + 1}: give each of its "
                "steps a gradient, and load model.bagua's state with the optimizer's, or call with_bagua after loading"
            )
        sums = [0.0] * len(optimizer.param_groups)
        if not self.averages(index):
            rates = [options["lr"] / (1 - options["betas"][0] ** step) for options in optimizer.param_groups]
            sums = [total + rate for total, rate in zip(self._sums[index], rates, strict=True)]
        self._sums[index] = sums
        super().after_optimizer_step(optimizer, buckets, group)

    # --- an exchange

    def to_sent(self, bucket: Bucket) -> None:
        for member in bucket.members:
            optimizer, options = self.optimizer_of(member)
            num_steps, state = self.num_steps[bucket.optimizer_index], optimizer.state.get(member.parameter)
            if not state:  # it has never been used, nor moved
                continue
            if state["step"] != num_steps:
                raise InvalidArgument(
                    f"{member.name} has made {int(state['step'])} steps of {num_steps}, so the ranks have no common v "
                    f"of it; algorithm {self.name!r} needs its gradient in every step: use it in each, freeze it, or "
                    "take algorithm 'qadam'"
                )
            member.view.mul_(optimizer.denominator(member.parameter, options))

    def from_sent(self, bucket: Bucket) -> None:
        for member in bucket.members:
            optimizer, options = self.optimizer_of(member)
            index, number = self.places[id(member.parameter)]
            total = self._sums[index][number]
            state = optimizer.state.get(member.parameter)
            if not state:
                member.view.zero_()
                continue
            member.view.mul_(state["exp_avg_sq"].sign())  # where v is 0 nothing moves
            if total:
                state["exp_avg"].copy_(member.view / total)
            member.view.div_(optimizer.denominator(member.parameter, options))

    def _finish(self, index: int, exchange: Any, merge: float) -> None:
        super()._finish(index, exchange, merge)
        self._sums[index] = [0.0] * len(self._sums[index])

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "sums": [list(sums) for sums in self._sums]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._sums = [list(sums) for sums in state["sums"]]
