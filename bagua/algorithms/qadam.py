"""qadam: after a warm-up of plain Adam the ranks average their momentum under a codec, while Adam's v is frozen.

Data path: policy, together with the optimizer ``bagua.optim.QAdam``. In backward each rank forms the momentum that its
own gradient would lead to, m_i = b1 m + (1 - b1) (g_i + weight_decay x), the compressed all_reduce averages these, and
what is left as the gradient is the one that leads from m to their mean. So clipping, unscaling and a skipped step mean
what they mean elsewhere, and the optimizer updates m once per step. Source: 1-bit Adam, arXiv 2102.02888.

Invariant: what is left as the gradient is linear in what the codec gives back, whatever the loss scale below is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bagua import codecs
from bagua.algorithms._adam import AdamOptions, warmup_of_all
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._compressed import CompressedGradients
from bagua.algorithms.base import About, Stage, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, Member
from bagua.distributed.devices import multiplied
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument

_WARMUP, _COMPRESSED = "warm-up", "compressed"


@register
@dataclasses.dataclass(kw_only=True)
class QAdam(AdamOptions, CompressedGradients):
    """Warm-up: g <- mean g, Adam. Then: m <- mean over ranks of C(m_i), and x <- x - lr m / (sqrt(v) + eps).

    The model's optimizers must be ``bagua.optim.QAdam``, and step all its parameters that train. The options of Adam
    may be given to either; given to both they must be equal.

    A GradScaler makes the gradients in backward S times as large as those that m is made of. So what is encoded is
    b1 S m + (1 - b1) (S g_i + S weight_decay x), with S the scale of a ``bagua.amp.GradScaler``; with another scaler S
    is taken for 1, and the codec sees little of m.

    A parameter that comes late has a warm-up of its own, and its bucket travels at full precision until that ends; with
    ``find_unused_parameters=True`` so does the bucket of a parameter that is never used: freeze it. The declaration of
    the bucket says so.

    Args:
        warmup_steps, betas, eps, weight_decay, variance_floor: as for QAdam.
        codec: of the momentum after the warm-up: "minmax_uint8"; "onebit", which is 1-bit Adam; or another one.
        error_feedback: by default where the codec needs it.
        hierarchical, state_dtype, seed, min_compressed_bytes: as in CompressedGradients.

    Example:
        >>> optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=200)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="qadam", codec="onebit")
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

    def codec_spec(self) -> str:
        return self.codec

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._coded: list[Member] = []  # those that a codec is for, in an order that all layouts share
        self._is_warm, self._late = False, []

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        members = sorted((m for bucket in buckets for m in bucket.members), key=lambda member: member.index)
        unknown = [member.name for member in members if id(member.parameter) not in self.places]
        if unknown:
            raise InvalidArgument(
                "algorithm 'qadam' sends the momentum of every parameter that trains, but no optimizer that was passed "
                f"to with_bagua steps {_listed(unknown)}; pass all optimizers of the model, and freeze what none of "
                "them steps"
            )
        coded = {m.index for bucket in buckets if not super(QAdam, self).exempt(bucket) for m in bucket.members}
        self._coded = [member for member in members if member.index in coded]
        self._names_of = {bucket.index: [member.name for member in bucket.members] for bucket in buckets}
        super().lay_out(buckets)

    def stage(self) -> Stage:
        """The warm-up of the model, or what follows it; asked once per backward, so ``exempt`` need not count again."""
        self._is_warm = all(optimizer.num_steps() >= warmup_of_all(optimizer) for optimizer in self.training.optimizers)
        self._late = [member.name for member in self._coded if self._is_warm and not self._has_warmed_up(member)]
        if not self._is_warm:
            return Stage(_WARMUP)
        return Stage(f"{_COMPRESSED} but for {', '.join(self._late)}" if self._late else _COMPRESSED)

    def exempt(self, bucket: Bucket) -> str:
        reason = super().exempt(bucket)
        if reason or not self._is_warm:
            return reason or _WARMUP
        late = [name for name in self._late if name in self._names_of[bucket.index]]
        return f"{_WARMUP} of {_listed(late)}" if late else ""

    def _has_warmed_up(self, member: Member) -> bool:
        optimizer, options = self.optimizer_of(member)
        return optimizer.is_warm(member.parameter, options)

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work:
        if self.exempt(bucket) or group.size == 1:
            return super().communicate(bucket, group)
        terms: list[tuple[Member, _Terms]] = []

        def form_momentum() -> None:
            terms.extend((member, self._terms(member)) for member in bucket.members)
            for member, of_member in terms:
                if of_member.decay:
                    member.view.add_(multiplied(member.parameter.detach(), of_member.scale), alpha=of_member.decay)
                member.view.mul_(1 - of_member.beta)
                if of_member.exp_avg is not None:
                    member.view.add_(multiplied(of_member.exp_avg, of_member.scale), alpha=of_member.beta)

        def leave_gradients() -> None:
            for member, of_member in terms:
                if of_member.exp_avg is not None:
                    member.view.sub_(multiplied(of_member.exp_avg, of_member.scale), alpha=of_member.beta)
                member.view.div_(1 - of_member.beta)
                if of_member.decay:
                    member.view.sub_(multiplied(member.parameter.detach(), of_member.scale), alpha=of_member.decay)

        work = super().communicate(bucket, group, form_momentum)
        work.finish_with(leave_gradients)
        return work

    def _terms(self, member: Member) -> _Terms:
        optimizer, options = self.optimizer_of(member)
        exp_avg = optimizer.state.get(member.parameter, {}).get("exp_avg")
        return _Terms(exp_avg, options["betas"][0], options["weight_decay"], self.training.loss_scale)


class _Terms(NamedTuple):
    """The terms of a parameter's momentum, beside its gradient."""

    exp_avg: torch.Tensor | None  # None where the parameter has not stepped yet
    beta: float
    decay: float
    scale: float | torch.Tensor  # S


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
