"""qadam: after a warm-up of plain Adam the ranks average their momentum under a codec, while Adam's v stands still.

Data path: policy, together with the optimizer ``bagua.optim.QAdam``. In backward each rank forms the momentum that its
own gradient would lead to, m_i = b1 m + (1 - b1) (g_i + weight_decay x), the compressed all_reduce averages these, and
what is left as the gradient is the one that leads from m to their mean. So clipping, unscaling and a skipped step mean
what they mean elsewhere, and the optimizer updates m once per step. Source: 1-bit Adam, arXiv 2102.02888.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from bagua import codecs, optim
from bagua.algorithms.base import About, Declaration, Training
from bagua.algorithms.compressed import CompressedGradients
from bagua.algorithms.registry import register
from bagua.bucket import Bucket, Member
from bagua.errors import InvalidArgument
from bagua.group import ProcessGroup, Work

_WARMUP, _COMPRESSED = "warm-up", "compressed"
_FAR = 100.0  # times the learning rate; with b1 = 0.9 and b2 = 0.999 no step of Adam is longer than 3.2 times


@register
@dataclasses.dataclass(kw_only=True)
class QAdam(CompressedGradients):
    """Warm-up: g <- mean g, Adam. Then: m <- mean over ranks of C(m_i), and x <- x - lr m / (sqrt(v) + eps).

    The model's optimizers must be ``bagua.optim.QAdam``. The options of Adam may be given to either; given to both they
    must be equal.

    Where v is tiny beside what the codec rounds of m, as behind ReLUs that hardly ever fire, rounding moves a weight
    further than its gradients do. Rank 0 looks for that in the first step after the warm-up, and a RuntimeWarning names
    the parameters and an eps that ends it.

    Args:
        warmup_steps, betas, eps, weight_decay: as for QAdam.
        codec: of the momentum after the warm-up: "minmax_uint8"; "onebit", which is 1-bit Adam; or another one.
        error_feedback: by default where the codec needs it.
        average, hierarchical, state_dtype, seed, min_compressed_bytes: as in CompressedGradients.

    Example:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=200)               # doctest: +SKIP
        >>> model = bagua.with_bagua(model, optimizer, algorithm="qadam", codec="onebit")    # doctest: +SKIP
    """

    about = About(
        sends="gradients at full precision in the warm-up, then momentum, 8 bits or 1 bit per element",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G in the warm-up, then a quarter of it, with `onebit` a 32nd",
        memory="0; with error feedback, which `onebit` brings, 2 (1 + 1/n) G, in bfloat16 half",
        use_when="the model is trained with Adam, for long",
        paper="[2102.02888](https://arxiv.org/abs/2102.02888)",
    )

    optimizer_class = optim.QAdam

    warmup_steps: int | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    codec: str = "minmax_uint8"
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        if self.error_feedback is None:
            self.error_feedback = codecs.get(self.codec).needs_error_feedback
        if not isinstance(self.error_feedback, bool):
            raise InvalidArgument(f"error_feedback is {self.error_feedback!r}, expected True, False or None")
        super().__post_init__()
        if not self.average:
            raise InvalidArgument("algorithm 'qadam' averages momentum; average=False would let it grow with the ranks")
        optim.check_options(self._adam_options())

    def _adam_options(self) -> dict[str, Any]:
        names = ("warmup_steps", "betas", "eps", "weight_decay")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def codec_spec(self) -> str:
        return self.codec

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check(optimizers)
        for index, optimizer in enumerate(optimizers):
            for name, value in self._adam_options().items():
                if name in optimizer.given and optimizer.given[name] != value:
                    raise InvalidArgument(
                        f"{name} is {value!r} for algorithm 'qadam' and {optimizer.given[name]!r} for "
                        f"optimizers[{index}]; give it to one of them"
                    )

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._group_of = {}
        for optimizer in training.optimizers:
            optimizer.set_options(self._adam_options())
            self._group_of.update(
                {id(p): (optimizer, group) for group in optimizer.param_groups for p in group["params"]}
            )
        self._num_steps = [optimizer.num_steps() for optimizer in training.optimizers]

    def stage(self) -> str:
        is_warm = all(
            num_steps >= max(group["warmup_steps"] for group in optimizer.param_groups)
            for optimizer, num_steps in zip(self.training.optimizers, self._num_steps, strict=True)
        )
        return _COMPRESSED if is_warm else _WARMUP

    def declare(self, bucket: Bucket) -> Declaration:
        declared = super().declare(bucket)
        if declared.codec is not None and self.stage() == _WARMUP:
            return dataclasses.replace(declared, codec=None, reason=_WARMUP)
        return declared

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        if bucket.declaration.codec is None or group.size == 1:
            return super().communicate(bucket, group)
        momenta = [self._momentum(member) for member in bucket.members]
        for member, (exp_avg, beta1, decay) in zip(bucket.members, momenta, strict=True):
            if decay is not None:
                member.view.add_(member.parameter.detach(), alpha=decay)
            member.view.mul_(1 - beta1)
            if exp_avg is not None:
                member.view.add_(exp_avg, alpha=beta1)

        def leave_gradients() -> None:
            for member, (exp_avg, beta1, decay) in zip(bucket.members, momenta, strict=True):
                if exp_avg is not None:
                    member.view.sub_(exp_avg, alpha=beta1)
                member.view.div_(1 - beta1)
                if decay is not None:
                    member.view.sub_(member.parameter.detach(), alpha=decay)

        work = super().communicate(bucket, group)
        work.finish_with(leave_gradients)
        return work

    def _momentum(self, member: Member) -> tuple[torch.Tensor | None, float, float | None]:
        """m, or None for a parameter that has not stepped yet, beta1, and the weight decay, None for 0."""
        optimizer, group = self._group_of[id(member.parameter)]
        exp_avg = optimizer.state.get(member.parameter, {}).get("exp_avg")
        return exp_avg, group["betas"][0], group["weight_decay"] or None

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        super().after_optimizer_step(optimizer, buckets, group)
        index = self.training.optimizers.index(optimizer)
        self._num_steps[index] += 1
        num_warmup = max(options["warmup_steps"] for options in optimizer.param_groups)
        if group.rank == 0 and self._num_steps[index] == num_warmup + 1:
            self._warn_of_far_steps(optimizer, {id(m.parameter): m.name for bucket in buckets for m in bucket.members})

    def _warn_of_far_steps(self, optimizer: optim.QAdam, name_of: dict[int, str]) -> None:
        """Looks at the step that was just made."""
        found = optimizer.steps_beyond(_FAR)
        if not found:
            return
        names = [name_of[id(parameter)] for parameter, _ in found]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        count, eps = sum(len(far) for _, far in found), max(float(far.max()) for _, far in found)
        warnings.warn(
            f"algorithm 'qadam': the first step after the warm-up moved {count} weights of {', '.join(names[:3])}{more}"
            f" by more than {_FAR:g} times the learning rate. Their gradients were close to 0 in the warm-up, and what "
            f"codec {self.codec!r} rounds is divided by sqrt(v) + eps. Training may diverge; with eps={eps:.0e} such a "
            "step is one learning rate at most. A longer warm-up does not help",
            RuntimeWarning,
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": list(self._num_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_steps = list(state["num_steps"])
        super().load_state_dict(state)
