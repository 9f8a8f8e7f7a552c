"""gradient_allreduce: every gradient becomes its mean over all ranks, at full precision.

Data path: policy. One all_reduce per bucket, during backward. Per rank and step 2 (n-1)/n times the
gradient bytes travel. The primitive C_FP_S of the paper (arXiv 2107.01499); what torch DDP does.
"""

from __future__ import annotations

import dataclasses

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms.base import About, Algorithm
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.process_group import ReduceOp, Work


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

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work:
        op = ReduceOp.AVG if self.average else ReduceOp.SUM
        return group.all_reduce(bucket, op, hierarchical=self.hierarchical)
