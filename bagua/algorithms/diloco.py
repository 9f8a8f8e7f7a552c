"""diloco: H local steps of any optimizer, and then a step of Nesterov's SGD on the mean of what the ranks have moved.

Data path: policy, on the engine of ``_outer.py``. Per exchange of a fragment one all_reduce per bucket, 2 (n-1)/n of
its bytes. Sources: arXiv 2311.08105; in fragments, overlapped and in few bits (Streaming DiLoCo): arXiv 2501.18512.
"""

from __future__ import annotations

import dataclasses
import math

from bagua import codecs
from bagua.algorithms._outer import MOMENTUM, RESIDUAL, Mean, OuterSGD, StreamedSteps, check_range
from bagua.algorithms.base import About
from bagua.algorithms.registry import register
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class DiLoCo(StreamedSteps):
    """D = reference - weights; b <- mu b + mean D; reference <- reference - lr (mean D + mu b); weights <- reference.

    The states of the optimizer stay each rank's own. Each rank needs 1/n of the tokens that one process would train on.

    Args:
        outer_lr: lr of the formula.
        outer_momentum: mu of it; 0 for plain SGD. With a small H 0.9 is too much.
        codec: of what travels, such as "fp4_e3m0" or "minmax_uint8"; "": full precision.
        error_feedback: what a codec leaves out is added to the next exchange.
        feedback_decay: beta, the share of it that is.
        others: those of :class:`bagua.algorithms._outer.StreamedSteps`: sync_every (H), fragments (P), overlap_steps
            (tau), merge (alpha), warmup_steps, state_dtype, state_device.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="diloco", sync_every=30)
    """

    about = About(
        sends="how far the weights have moved since the last exchange, full precision or in a codec",
        to="all ranks",
        when="after every k-th optimizer step, which waits; with `overlap_steps` during the steps that follow",
        bytes_per_step="2 (n-1)/n G / k",
        memory="3 G, without outer momentum 2 G; with error feedback (1 + 1/n) G more, in bfloat16 half of that "
        "and of b",
        use_when="the ranks are far apart (the internet): one exchange in tens or hundreds of steps",
        paper="[2311.08105](https://arxiv.org/abs/2311.08105), streaming [2501.18512](https://arxiv.org/abs/2501.18512)",
    )

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    codec: str = ""
    error_feedback: bool = False
    feedback_decay: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("outer_lr", self.outer_lr, 0, math.inf, is_least_allowed=False)
        check_range("outer_momentum", self.outer_momentum, 0, 1)
        check_range("feedback_decay", self.feedback_decay, 0, math.nextafter(1, 2), is_least_allowed=False)
        if self.error_feedback and not self.codec:
            raise InvalidArgument("error_feedback=True without a codec, where nothing is left out; pass a codec too")
        if self.feedback_decay != 1 and not self.error_feedback:
            raise InvalidArgument(f"feedback_decay is {self.feedback_decay}, but there is no error_feedback to decay")
        codec = codecs.get(self.codec) if self.codec else None  # raises for an unknown one
        if codec is not None:
            codec.check_error_feedback(self.error_feedback)
        states = self.make_states(*[MOMENTUM] * bool(self.outer_momentum), *[RESIDUAL] * self.error_feedback)
        aggregate = Mean(codec, self.feedback_decay if self.error_feedback else None)
        self.set_parts(self.make_schedule(), aggregate, OuterSGD(self.outer_lr, self.outer_momentum), states, codec)
