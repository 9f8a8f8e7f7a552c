"""gradient_allreduce: every gradient becomes its mean over all ranks, at full precision.

Data path: policy. One all_reduce per bucket, during backward. Per rank and step 2 (n-1)/n times the
gradient bytes travel. The primitive C_FP_S of the paper (arXiv 2107.01499); what torch DDP does.
"""

from __future__ import annotations

import dataclasses

from bagua.algorithms.base import About, Algorithm, Declaration
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work


@register
@dataclasses.dataclass(kw_only=True)
class GradientAllReduce(Algorithm):
    """g <- mean over ranks of g.

    Args:
        average: divide the sum by the number of ranks. Without it gradients must be cleared between
            two synchronising backwards (accumulate inside no_sync): a sum that is summed again counts n times.
        hierarchical: reduce inside each node first, so that the network carries one tensor per node instead of one
            per rank.

    Example:
        >>> model = bagua.with_bagua(model, [optimizer], algorithm="gradient_allreduce")
    """

    about = About(
        sends="gradients, full precision",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G",
        memory="0",
        use_when="the network is fast, or nothing may be rounded: what DDP does",
        paper="[2107.01499](https://arxiv.org/abs/2107.01499)",
    )

    average: bool = True
    hierarchical: bool = False

    def declare(self, bucket: Bucket) -> Declaration:
        return Declaration("all_reduce", hierarchical=self.hierarchical)

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        op = ReduceOp.AVG if self.average else ReduceOp.SUM
        return group.all_reduce(bucket.flat, op, hierarchical=self.hierarchical, label=bucket.label)
