"""dgc: of a momentum of each rank's gradients the largest elements are sent, and the others wait until they are.

Data path: policy. Per bucket an all_gather during backward, of what codec "topk" makes of what has waited: n - 1
messages. Source: Deep Gradient Compression, arXiv 1712.01887, whose threshold over a sample is here the largest of each
block of 4096.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Hashable

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._compressed import CountedGradients, is_bias
from bagua.algorithms._outer import check_range
from bagua.algorithms._sparse import SenderMean
from bagua.algorithms.base import About, ParameterState
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.process_group import ReduceOp, Work
from bagua.errors import InvalidArgument

_CHUNK, _DENSEST = 4096, 256


@register
@dataclasses.dataclass(kw_only=True)
class DGC(CountedGradients):
    """m <- mu m + g; v <- v + m; the k largest of each 4096 of v are sent, v and m are 0 there; g <- mean of the sent.

    So momentum is inside, and the optimizer is to be torch.optim.SGD without one. Vectors of up to 65,536 elements,
    such as biases, dtypes that the codec does not encode (float64), and all that a single rank has travel at full
    precision: g <- m <- mu m + mean g. To clip each rank's own gradient first, as the paper does for
    recurrent networks, clip it in ``parameter.register_hook``.

    Args:
        momentum: mu, 0 or more and below 1.
        k: elements sent of each 4096: 8, 16, 32, 64, 128 or 256.
        warmup_steps: steps in which k falls from 256 to its value by factors of 4 (at first of 2 if need be), in
            stretches of one length.

    Example:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model = bagua.with_bagua(model, optimizer, algorithm="dgc", warmup_steps=1000)
    """

    about = About(
        sends="the largest 1/512 of gradients that have added up with momentum, in 44 bits each",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="(n-1) G / 372",
        memory="4 G, and messages",
        use_when="few ranks, very slow links, and a model that is trained with SGD and momentum",
        paper="[1712.01887](https://arxiv.org/abs/1712.01887)",
    )

    momentum: float = 0.9
    k: int = 8
    warmup_steps: int = 0

    is_linear = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("momentum", self.momentum, 0, 1)
        if self.warmup_steps < 0:
            raise InvalidArgument(f"warmup_steps is {self.warmup_steps}, expected 0 or more")
        counts = [self.k]
        while self.warmup_steps and counts[0] < _DENSEST:
            counts.insert(0, min(4 * counts[0], _DENSEST))
        # One per stretch of the warm-up, and the last for what follows it.
        self._codecs = [codecs.get(f"topk:chunk={_CHUNK},k={k}") for k in counts]  # raises for another k

    def parameter_state(self) -> dict[str, ParameterState]:
        state = ParameterState(None, is_scaled=True)
        return {"momentum": state, "unsent": state}

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return bucket_dtype(parameter) in self._codecs[0].dtypes and not is_bias(parameter)

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Generator[Work, None, None]:
        momentum = bucket.state("momentum")
        if not bucket.kind or group.size == 1:
            reason = "one rank" if bucket.kind else "1-D parameters, or no dtype of the codec"
            yield group.all_reduce(bucket, ReduceOp.AVG, reason=reason)
            bucket.flat.copy_(momentum.mul_(self.momentum).add_(bucket.flat))
            if bucket.kind:  # what ranks before have not sent, if this is a checkpoint of several
                bucket.flat.add_(bucket.state("unsent"))
                bucket.state("unsent").zero_()
            return
        unsent, mean = bucket.state("unsent"), SenderMean(self._codec(), clips=False, counts_all=True)
        unsent.add_(momentum.mul_(self.momentum).add_(bucket.flat))
        bucket.zero_padding(unsent)
        messages = mean.send(unsent, bucket, group)
        momentum.masked_fill_(unsent == 0, 0)  # where it was sent, which is exact
        yield messages.work
        mean.receive(messages, bucket.flat)

    def _codec(self) -> codecs.Codec:
        num_stretches = len(self._codecs) - 1
        if self._num_exchanges >= self.warmup_steps:
            return self._codecs[-1]
        return self._codecs[self._num_exchanges * num_stretches // self.warmup_steps]
