"""sparseloco: local steps, and then an outer step on the largest elements of what the ranks have moved, in 2 bits each.

Data path: policy, on the engine of ``_outer.py``. Per exchange of a fragment an all_gather per bucket: n - 1 messages
of its codec. Source: arXiv 2508.15706.
"""

from __future__ import annotations

import dataclasses
import math

from bagua import codecs
from bagua.algorithms._outer import RESIDUAL, OuterSGD, StreamedSteps, check_range
from bagua.algorithms._sparse import SenderMean, SparseDeltas
from bagua.algorithms.base import About
from bagua.algorithms.registry import register
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class SparseLoCo(StreamedSteps):
    """D = reference - weights; e <- beta e + D; C(e) is sent and e <- e - C(e); reference <- reference - lr mean C(e).

    The mean of an element is over the ranks that have sent it; each rank's chunk is scaled down to the median norm of
    the ranks' before. The error feedback e takes the place of an outer momentum. The states of the optimizer stay each
    rank's own.

    Args:
        outer_lr: lr of the formula.
        feedback_decay: beta.
        codec: of what is sent: "topk", with its options.
        clip_to_median: False leaves the norms of chunks as they are.
        counts_all: divide by all ranks instead of the senders of an element, as in the paper's formula.
        others: those of :class:`bagua.algorithms._outer.StreamedSteps`: sync_every (H), fragments (P), overlap_steps
            (tau), merge (alpha), warmup_steps, state_dtype, state_device.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="sparseloco", sync_every=30)
    """

    about = About(
        sends="the largest 1/64 of how far the weights have moved, in 14 bits each",
        to="all ranks",
        when="after every k-th optimizer step, which waits; with `overlap_steps` during the steps that follow",
        bytes_per_step="(n-1) G / 141 / k",
        memory="3 G, and messages",
        use_when="the slowest links, and few ranks: the internet",
        paper="[2508.15706](https://arxiv.org/abs/2508.15706)",
    )

    outer_lr: float = 0.4
    feedback_decay: float = 0.95
    codec: str = "topk:chunk=4096,k=64,bits=2"
    clip_to_median: bool = True
    counts_all: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("outer_lr", self.outer_lr, 0, math.inf, is_least_allowed=False)
        check_range("feedback_decay", self.feedback_decay, 0, math.nextafter(1, 2), is_least_allowed=False)
        codec = codecs.get(self.codec)  # raises for an unknown one
        if codec.is_random or codec.is_expansive:
            raise InvalidArgument(f"codec {self.codec!r} is no contraction, so its residuals would grow; take 'topk'")
        mean = SenderMean(codec, self.clip_to_median, self.counts_all)
        deltas = SparseDeltas(mean, self.feedback_decay, RESIDUAL)
        self.set_parts(self.make_schedule(), deltas, OuterSGD(self.outer_lr), self.make_states(RESIDUAL))
