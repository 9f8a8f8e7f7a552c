"""local_sgd: every rank steps on its own gradients, and every k-th step the weights are averaged over all ranks.

Data path: policy, on the engine of ``_outer.py`` without an outer rule. No communication in backward; after the k-th
optimizer step one all_reduce of the weights per bucket. Sources: arXiv 1805.09767; synchronous first and local later
("post-local"): arXiv 1808.07217.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._outer import Mean, OuterSteps, Schedule
from bagua.algorithms.base import About
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.process_group import ReduceOp
from bagua.errors import InvalidArgument

_MOMENTUM = ("average", "reset", "keep")


@register
@dataclasses.dataclass(kw_only=True)
class LocalSGD(OuterSteps):
    """k local steps, then x <- mean over ranks of x.

    Each optimizer counts its own steps. In the synchronous steps gradients are averaged as by gradient_allreduce.

    Args:
        sync_every: k. With 1 and plain SGD it equals averaging the gradients.
        post_local_after: so many steps of every optimizer are synchronous, before the local ones begin.
        momentum: the fate of an optimizer's state when the weights are averaged. "average": tensors of the shape of
            their parameter (momentum, Adam's moments) are averaged too, where all ranks have them; as many bytes again
            for each. "reset": it begins anew. "keep": each rank keeps its own.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="local_sgd", sync_every=8)
    """

    about = About(
        sends="weights, and by option the optimizer's moments, full precision",
        to="all ranks",
        when="after every k-th optimizer step, which waits",
        bytes_per_step="2 (n-1)/n G / k; with `momentum='average'` times 1 + the number of moments",
        memory="G",
        use_when="bandwidth is far too low for an exchange per step; large batches",
        paper="[1805.09767](https://arxiv.org/abs/1805.09767), post-local [1808.07217](https://arxiv.org/abs/1808.07217)",
    )

    keeps_mean = True

    sync_every: int = 4
    post_local_after: int = 0
    momentum: str = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.post_local_after < 0:
            raise InvalidArgument(f"post_local_after is {self.post_local_after}, expected 0 or more")
        if self.momentum not in _MOMENTUM:
            raise InvalidArgument(f"momentum is {self.momentum!r}, expected one of {', '.join(map(repr, _MOMENTUM))}")

        self.set_parts(Schedule(self.sync_every, warmup_steps=self.post_local_after), Mean(), None)

    def after_exchange(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        if group.size == 1:
            return
        if self.momentum == "reset":
            for member in (member for bucket in buckets for member in bucket.members):
                optimizer.state.pop(member.parameter, None)
        elif self.momentum == "average":
            self._average_moments(optimizer, buckets, group)

    def _average(self, exchanges: Sequence[tuple[Bucket, Sequence[torch.Tensor]]], group: BucketGroup) -> None:
        """Averages the tensors given for the members of a bucket; those of one are copied while others travel."""
        works = []
        for bucket, tensors in exchanges:
            bucket.load(tensors)
            works.append(group.all_reduce(bucket, ReduceOp.AVG))
        for (bucket, tensors), work in zip(exchanges, works, strict=True):
            work.wait()
            bucket.store(tensors)

    def _average_moments(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Averages the moments of the parameters that all ranks have used: a rank has none of others."""
        members = [member for bucket in buckets for member in bucket.members]
        moments = {member.index: _moments_of(optimizer, member.parameter) for member in members}
        num_moments = torch.tensor([len(moments[member.index]) for member in members], dtype=torch.uint8, device="cpu")
        group.all_reduce(num_moments, ReduceOp.MIN, label="numbers of moments", blocking=True).wait()
        shared = {m.index: moments[m.index][:num] for m, num in zip(members, num_moments.tolist(), strict=True)}
        for index in range(max(map(len, shared.values()), default=0)):
            exchanges = []
            for bucket in buckets:
                # A member without this moment keeps its segment of the message.
                tensors = [shared[m.index][index] if index < len(shared[m.index]) else m.view for m in bucket.members]
                if any(tensor is not m.view for tensor, m in zip(tensors, bucket.members, strict=True)):
                    exchanges.append((bucket, tensors))
            self._average(exchanges, group)


def _moments_of(optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
    """Returns the element-wise state of a parameter, in the order of its names."""
    state = optimizer.state.get(parameter, {})
    return [
        value
        for key, value in sorted(state.items(), key=lambda item: str(item[0]))
        if isinstance(value, torch.Tensor)
        and (value.is_floating_point() or value.is_complex())
        and value.shape == parameter.shape
        and key != "step"  # of the shape of a parameter without dimensions
    ]
