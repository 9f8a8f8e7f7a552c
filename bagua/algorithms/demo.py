"""demo: each rank keeps a momentum, and shares its largest frequencies only: what moves fast is synchronised.

Data path: policy. Per bucket an all_gather during backward, of what codec "topk" makes of the momentum: n - 1 messages.
Source: arXiv 2411.19870, version 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._outer import check_range
from bagua.algorithms._sparse import SenderMean
from bagua.algorithms.base import About, Algorithm, ParameterState
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.process_group import ReduceOp, Work
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class DeMo(Algorithm):
    """M <- beta M + (1 - beta) g; C(M) is sent and M <- M - C(M); what the optimizer gets as g is mean C(M).

    That mean is a momentum, so the optimizer is to have none of its own: torch.optim.SGD without momentum, AdamW with
    ``betas=(0.0, 0.95)``, or with ``betas=(0.0, 0.0)``, which makes the signed steps of the paper. Weights are the same
    on all ranks, M is each rank's own. Parameters whose dtype the codec does not encode (float64), and a single rank,
    send all of M.

    Args:
        momentum_decay: beta, 0 or more and below 1.
        codec: of what is sent: "topk", with its options; ``dct=1`` selects frequencies of blocks of 64 by 64.

    Example:
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.0))
        >>> model = bagua.with_bagua(model, optimizer, algorithm="demo")
    """

    about = About(
        sends="the 32 largest frequencies of each 4096 elements of a momentum, in 44 bits each",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="(n-1) G / 93",
        memory="2 G, and messages",
        use_when="few ranks, very slow links, and weights that must be equal after every step",
        paper="[2411.19870](https://arxiv.org/abs/2411.19870)",
    )

    momentum_decay: float = 0.999
    codec: str = "topk:chunk=4096,k=32,dct=1"

    is_linear = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("momentum_decay", self.momentum_decay, 0, 1)
        codec = codecs.get(self.codec)  # raises for an unknown one
        if codec.is_random or codec.is_expansive:
            raise InvalidArgument(f"codec {self.codec!r} is no contraction, so M would grow; take 'topk'")
        self._codec, self._mean = codec, SenderMean(codec, clips=False, counts_all=True)

    def parameter_state(self) -> dict[str, ParameterState]:
        return {"momentum": ParameterState(None, is_scaled=True)}

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return bucket_dtype(parameter) in self._codec.dtypes

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Generator[Work, None, None]:
        momentum = bucket.state("momentum")
        momentum.mul_(self.momentum_decay).add_(bucket.flat, alpha=1 - self.momentum_decay)
        bucket.zero_padding(momentum)
        if bucket.kind and group.size > 1:
            messages = self._mean.send(momentum, bucket, group)
            yield messages.work
            self._mean.receive(messages, bucket.flat)
        else:
            bucket.flat.copy_(momentum)
            momentum.zero_()
            reason = "" if bucket.kind else f"codec {self.codec} does not encode {bucket.dtype}"
            yield group.all_reduce(bucket, ReduceOp.AVG, reason=reason or "one rank")
