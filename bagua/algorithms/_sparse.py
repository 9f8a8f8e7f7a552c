"""SenderMean: the mean of messages of which each has some elements only, aggregated alike on all ranks.

Data path: policy -> **messages of all ranks** -> their mean. An all_gather of what a codec makes of each rank's values:
(n-1) messages per rank. Every rank decodes them in the order of the ranks, so that all get the same bits. Source:
SparseLoCo, arXiv 2508.15706.
"""

from __future__ import annotations

import dataclasses

import torch

from bagua import codecs
from bagua.algorithms._bucket_group import BucketGroup
from bagua.buckets import Bucket
from bagua.distributed.process_group import Work


@dataclasses.dataclass(frozen=True)
class Messages:
    """The messages of all ranks, on their way.

    Attributes:
        work: the all_gather.
        rows: one message per rank.
    """

    work: Work
    rows: torch.Tensor


@dataclasses.dataclass(frozen=True)
class SenderMean:
    """The mean of each element over the ranks that have sent it.

    Attributes:
        codec: of the messages.
        clips: True to scale each rank's chunk down to the median of the ranks' norms first. A chunk is a block of the
            codec.
        counts_all: True to divide by all ranks instead of by the senders.
    """

    codec: codecs.Codec
    clips: bool = True
    counts_all: bool = False

    def send(self, values: torch.Tensor, bucket: Bucket, group: BucketGroup) -> Messages:
        """Starts the exchange of ``values`` for ``bucket``, float32 and flat, and subtracts what is sent of them."""
        message = self.codec.encode(values)
        values.sub_(self.codec.decode(message, values.numel(), values.dtype))
        rows = message.new_empty(group.size, message.numel())
        work = group.all_gather(rows.view(-1), message, of=bucket, encoded=self.codec.spec)
        return Messages(work, rows)

    def receive(self, messages: Messages, into: torch.Tensor) -> None:
        """Waits, and writes the mean to ``into``, flat."""
        messages.work.wait()
        rows = messages.rows
        num_ranks, numel = len(rows), into.numel()
        scales = self._scales(rows, numel) if self.clips and num_ranks > 1 else None
        total = torch.zeros(numel, dtype=torch.float32, device=into.device)
        count = None if self.counts_all else torch.zeros_like(total)
        for rank, row in enumerate(rows):
            if count is None and scales is None:
                self.codec.decode_add(row, total)
                continue
            values = self.codec.decode(row, numel, torch.float32)
            if count is not None:
                count += values != 0
            total += values if scales is None else _by_chunk(values, scales[rank], self.codec.block_numel)
        into.copy_(total.div_(num_ranks if count is None else count.clamp_(min=1)))

    def _scales(self, rows: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns a factor of each rank's chunks, 1 where the norm is at most the median of the ranks' norms."""
        size = self.codec.block_numel
        norms = torch.stack([_chunks(self.codec.decode(row, numel, torch.float32), size).norm(dim=1) for row in rows])
        median = norms.quantile(0.5, dim=0)
        return torch.where(norms > median, median / norms, 1.0)


def _chunks(values: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)


def _by_chunk(values: torch.Tensor, factors: torch.Tensor, size: int) -> torch.Tensor:
    return (_chunks(values, size) * factors[:, None]).view(-1)[: len(values)]


@dataclasses.dataclass(frozen=True)
class SparseDeltas:
    """The ``Aggregate`` of deltas by a SenderMean, with error feedback: e <- beta e + D, C(e) is sent, e <- e - C(e).

    Attributes:
        mean: of what is sent.
        decay: beta.
        state: the name of e.
    """

    mean: SenderMean
    decay: float
    state: str

    def start(self, bucket: Bucket, group: BucketGroup, step: int) -> Messages:
        """See ``Aggregate``."""
        kept = bucket.state(self.state)
        values = kept.float() if kept.dtype is not torch.float32 else kept
        values.mul_(self.decay).add_(bucket.flat)
        bucket.zero_padding(values)
        messages = self.mean.send(values, bucket, group)
        if values is not kept:
            kept.copy_(values)
        return messages

    def finish(self, bucket: Bucket, started: Messages) -> None:
        """See ``Aggregate``."""
        self.mean.receive(started, bucket.flat)
