"""low_precision_decentralized: neighbours on a ring exchange, in few bits, how far their weights have moved.

Data path: policy. After the optimizer's step one difference_ring_average of the weights per bucket. Every rank keeps
replicas of its own weights as the neighbours know them, and of both neighbours'; only differences to these travel, so
that coarse codes are enough. Source: DCD-PSGD, arXiv 1803.06443; D_LP_S of the paper (arXiv 2107.01499).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._weights import ExchangedWeights
from bagua.algorithms.base import About, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket, bucket_dtype
from bagua.distributed.checkpoints import check_writer, writer_of
from bagua.distributed.devices import HostCopy
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class LowPrecisionDecentralized(ExchangedWeights):
    """z = x + L/3 + R/3 - 5w/3; w += C(z), L and R += what the neighbours sent; x <- w.

    w, L and R are the replicas: own, left, right, equal to the weights when the model is wrapped, in float32. w is bit
    by bit what the right neighbour has as L and the left one as R. Two ranks are each other's left and right; a single
    rank sends nothing and its weights stay as the optimizer leaves them. Weights of types that the codec does not
    encode (float64) are averaged on the ring at full precision instead.

    Args:
        interval: every so many steps of an optimizer: after the first, the one `interval` later, and so on.
        codec: one whose loss is small beside what it encodes: not "onebit", "centroid" or "topk", since what is lost is
            not sent later, and not "qsgd:bits=2".
        seed: what a codec that rounds at random draws from, with the step and the offset of an element.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized")
    """

    about = About(
        sends="differences of the weights, 8 bits per element",
        to="both neighbours on a ring",
        when="after the optimizer's step, which waits",
        bytes_per_step="2 G / 4 (2 ranks: G / 4), divided by the interval",
        memory="3 G (2 ranks: 2 G), and two buckets",
        use_when="bandwidth binds: few bytes to two others, however many ranks there are; a ring mixes slowly",
        paper="[1803.06443](https://arxiv.org/abs/1803.06443)",
    )

    interval: int = 1
    codec: str = "minmax_uint8"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval < 1:
            raise InvalidArgument(f"interval is {self.interval}, expected 1 or more")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed is {self.seed}, expected 0 to 2**64 - 1")
        self._codec = codec = codecs.get(self.codec)  # raises for an unknown one
        if codec.needs_error_feedback or codec.is_expansive:
            raise InvalidArgument(
                f"codec {self.codec!r} loses about as much as it sends, and what is lost of a difference is lost for "
                "good; take one such as 'minmax_uint8' or 'qsgd:bits=4'"
            )
        if self.seed and not codec.is_random:
            raise InvalidArgument(
                f"seed is {self.seed}, but codec {self.codec!r} draws nothing at random; leave it out"
            )

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        return bucket_dtype(parameter) in self._codec.dtypes

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._replicas: dict[int, tuple[torch.Tensor, ...]] = {}  # by bucket: own, left, right
        self._scratch: list[torch.Tensor] = []  # of two buckets, on their way out and in
        self._loading: dict[str, Any] | None = None
        # On a device: the buckets of an exchange with their flags, True where weights are finite, and the flags' copy.
        self._flags: list[tuple[Bucket, torch.Tensor]] = []
        self._looks: list[tuple[list[Bucket], HostCopy]] = []

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._replicas = {}
        num_neighbors = min(self.training.group.size - 1, 2)
        if num_neighbors:
            largest = max(bucket.num_bytes for bucket in buckets)
            empty = self.training.group.empty
            self._scratch = [empty(largest, torch.uint8, buckets[0].device) for _ in range(min(2, len(buckets)))]
        for bucket in buckets if num_neighbors else ():
            if bucket.kind:  # a codec is for its dtype
                is_float32 = bucket.dtype == torch.float32
                own = bucket.flat if is_float32 else torch.empty_like(bucket.flat, dtype=torch.float32)
                others = [torch.empty_like(own) for _ in range(num_neighbors)]
                self._replicas[bucket.index] = (own, others[0], others[-1])
        loading, self._loading = self._loading, None
        if loading is not None and loading["replicas"] is None:
            self.begin(buckets)
        elif loading is not None:
            self._load(loading["replicas"])

    def begin(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket.index in self._replicas:
                bucket.load()
                for replica in self._replicas[bucket.index]:
                    replica.copy_(bucket.flat)

    def before_forward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        looks, self._looks = self._looks, []
        for exchanged, are_finite in looks:
            for bucket, is_finite in zip(exchanged, are_finite.get().tolist(), strict=True):
                if not is_finite:
                    raise self._ended(bucket)

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        step = self.count_step(optimizer, self.interval)
        if group.size == 1 or not step:
            return
        under_way: list[tuple[Bucket, torch.Tensor, Work]] = []
        for number, bucket in enumerate(buckets):
            if len(under_way) == len(self._scratch):
                self._finish(*under_way.pop(0))
            flat = self._scratch[number % len(self._scratch)][: bucket.num_bytes].view(bucket.dtype)
            bucket.load(flat=flat)
            under_way.append((bucket, flat, self._start(bucket, flat, step)))
        for exchange in under_way:
            self._finish(*exchange)
        if self._flags:
            flags, self._flags = self._flags, []
            self._looks.append(([bucket for bucket, _ in flags], HostCopy(torch.stack([flag for _, flag in flags]))))

    def _start(self, bucket: Bucket, flat: torch.Tensor, step: int) -> Work:
        group, codec = self.training.group, self._codec
        if not bucket.kind:
            reason = f"codec {self.codec} does not encode {bucket.dtype}"
            return group.neighbor_average(bucket, "ring", flat=flat, reason=reason)
        coded = codec.with_seed(self.seed, step, bucket.index) if codec.is_random else codec
        return group.difference_ring_average(bucket, self._replicas[bucket.index], flat=flat, codec=coded)

    def _finish(self, bucket: Bucket, flat: torch.Tensor, work: Work) -> None:
        work.wait()
        if work.nonfinite_blocks:
            raise self._ended(bucket)
        if work.nonfinite_blocks is None and bucket.kind:  # on a device, where a block with NaN comes out as NaN
            self._flags.append((bucket, flat.isfinite().all()))
        bucket.store(flat=flat)
        for replica in self._replicas.get(bucket.index, ()):
            bucket.zero_padding(replica)  # where the weights have no part what the codec rounds would add up

    def _ended(self, bucket: Bucket) -> InvalidArgument:
        error = InvalidArgument(
            f"weights of {bucket.label} ({', '.join(bucket.names)}) became NaN or Inf, which codec {self.codec!r} "
            "cannot send; go back to a checkpoint, with a smaller learning rate",
            bucket=bucket.label,
        )
        self.training.group.poison(error)
        return error

    def state_dict(self) -> dict[str, Any]:
        replicas = {index: [replica.clone() for replica in replicas] for index, replicas in self._replicas.items()}
        return {**super().state_dict(), "place": writer_of(self.training.group), "replicas": replicas}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["replicas"] is not None:
            check_writer(state["place"], self.training.group, "replicas of its own weights and its neighbours'")
        self._loading = state  # for the layout that follows
        self._looks = []  # at weights that are given up

    def state_of_all(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**states[0], "replicas": None}  # all ranks know one another: they have the same weights

    def _load(self, loading: dict[int, list[torch.Tensor]]) -> None:
        described = [
            {index: own.numel() for index, (own, *_) in replicas.items()} for replicas in (loading, self._replicas)
        ]
        if described[0] != described[1]:
            raise InvalidArgument(
                f"elements by bucket are {described[0]} in the checkpoint and {described[1]} here; load it with the "
                "same model and bucket_bytes"
            )
        for index, replicas in self._replicas.items():
            for replica, loaded in zip(replicas, loading[index], strict=True):
                replica.copy_(loaded)
