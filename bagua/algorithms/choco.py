"""choco: weights move towards what is known of the neighbours' weights, which learn of them by coded differences.

Data path: policy. After the optimizer's step one all_to_all per bucket brings the codes to the neighbours. Unlike
low_precision_decentralized, which it resembles, any codec will do: what a code leaves out stays in the difference, and
is sent later. Source: arXiv 1902.00340, 1907.09356.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._weights import ExchangedWeights
from bagua.algorithms.base import About, ParameterState
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument

_KNOWN, _GAP = "known", "gap"
_TOPOLOGIES = ("ring", "all")


@dataclasses.dataclass
class _Exchange:
    """An exchange of one bucket: the codes of its neighbours, in the order of the ranks, its own among them."""

    bucket: Bucket
    work: Work
    rows: torch.Tensor


@register
@dataclasses.dataclass(kw_only=True)
class Choco(ExchangedWeights):
    """q = C(x - k); k <- k + q; d <- d + mean q - q, over the neighbours and itself; x <- x + gamma d.

    k is what the neighbours know of this rank's weights x, as these are when the model is wrapped; d is the mean of
    what it knows of theirs, less its own k. Both are float32. Weights that the codec does not encode (float64) travel
    at full precision.

    Args:
        topology: "ring", both neighbours; "all", every rank.
        interval: every so many steps of an optimizer.
        codec: of the difference; "" for full precision.
        consensus: gamma, above 0 and at most 1; the coarser the codec, the smaller: 0.1 for "topk:k=64", where 0.3
            diverges.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="choco", codec="onebit", consensus=0.45)
    """

    about = About(
        sends="differences of the weights, 1 bit per element",
        to="both neighbours on a ring, or all ranks",
        when="after the optimizer's step, which waits",
        bytes_per_step="2 G / 32 (2 ranks: G / 32), divided by the interval; `all` (n-1) G / 32",
        memory="3 G, and messages",
        use_when="very slow links between neighbours, and a codec of few bits",
        paper="[1902.00340](https://arxiv.org/abs/1902.00340)",
    )

    topology: str = "ring"
    interval: int = 1
    codec: str = "onebit"
    consensus: float = 0.45

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.topology not in _TOPOLOGIES:
            raise InvalidArgument(
                f"topology is {self.topology!r}, expected {' or '.join(map(repr, _TOPOLOGIES))}: changing neighbours "
                "would not know one another"
            )
        if self.interval < 1:
            raise InvalidArgument(f"interval is {self.interval}, expected 1 or more")
        if not 0 < self.consensus <= 1:
            raise InvalidArgument(f"consensus is {self.consensus}, expected a number above 0 and at most 1")
        self._codec = codecs.get(self.codec) if self.codec else None  # raises for an unknown one
        if self._codec is not None and self._codec.is_expansive:
            raise InvalidArgument(
                f"codec {self.codec!r} is off by more than it says, so the differences would grow; take more bits"
            )

    def parameter_state(self) -> dict[str, ParameterState]:
        own = ParameterState(None, is_own=True)
        return {_KNOWN: own, _GAP: own}

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return self._codec is not None and bucket_dtype(parameter) in self._codec.dtypes

    def begin(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            bucket.load(flat=bucket.state(_KNOWN))

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        step = self.count_step(optimizer, self.interval)
        if step and group.size > 1:
            for exchange in [self._start(bucket, group, step) for bucket in buckets]:
                self._finish(exchange)

    def _neighbors(self, group: BucketGroup) -> list[int]:
        if self.topology == "all":
            return list(range(group.size))
        return sorted({(group.rank + step) % group.size for step in (-1, 0, 1)})

    def _start(self, bucket: Bucket, group: BucketGroup, step: int) -> _Exchange:
        bucket.load()
        known = bucket.state(_KNOWN)
        message = difference = bucket.flat.to(known.dtype) - known
        if bucket.kind:
            key = self._codec.with_seed(step, bucket.index, group.rank).seed if self._codec.is_random else None
            message = self._codec.encode(difference, key=key)
            difference = self._codec.decode(message, bucket.numel, known.dtype)
        known.add_(difference)
        bucket.state(_GAP).sub_(difference)
        neighbors = self._neighbors(group)
        rows = message.new_empty(len(neighbors), message.numel())
        splits = [int(rank in neighbors) for rank in range(group.size)]
        spec = self._codec.spec if bucket.kind else ""
        copies = message.expand(len(neighbors), -1).contiguous()
        work = group.all_to_all(rows, copies, splits, splits, of=bucket, encoded=spec)
        return _Exchange(bucket, work, rows)

    def _finish(self, exchange: _Exchange) -> None:
        exchange.work.wait()
        bucket, gap = exchange.bucket, exchange.bucket.state(_GAP)
        weight = 1 / len(exchange.rows)
        for row in exchange.rows:
            gap.add_(self._codec.decode(row, bucket.numel, gap.dtype) if bucket.kind else row, alpha=weight)
        for state in (gap, bucket.state(_KNOWN)):
            bucket.zero_padding(state)
        bucket.flat.copy_(bucket.flat.to(gap.dtype).add_(gap, alpha=self.consensus))
        bucket.store()
