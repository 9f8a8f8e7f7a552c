"""noloco: local steps, and then an outer step with one other rank, drawn anew each time; nothing waits for all ranks.

Data path: policy, on the engine of ``_outer.py``. Per exchange of a fragment one neighbor_average per bucket with a
partner, its bytes once. Ranks are never equal; they stay near one another. Source: arXiv 2506.10911.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._outer import MOMENTUM, REFERENCE, OuterSGD, StreamedSteps, check_range
from bagua.algorithms.base import About
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.arguments import check_topology
from bagua.distributed.process_group import ReduceOp, Work


@dataclasses.dataclass(frozen=True)
class PairMean:
    """The ``Aggregate`` lr mean(D) - gamma (mean(reference) - reference), means over a pair of ranks.

    One message has both: a rank sends gamma reference - lr D.

    Attributes:
        lr, gamma: of the formula.
        topology: of ``bagua.neighbor_average``.
        sync_every: the steps from one exchange of a fragment to the next, by which they are counted.
    """

    lr: float
    gamma: float
    topology: str
    sync_every: int

    def start(self, bucket: Bucket, group: BucketGroup, step: int) -> tuple[Work, torch.Tensor]:
        """See ``Aggregate``."""
        flat = bucket.flat
        message = torch.mul(bucket.state(REFERENCE).to(flat.device), self.gamma).sub_(flat, alpha=self.lr)
        work = group.neighbor_average(bucket, self.topology, step // self.sync_every, flat=message)
        return work, message

    def finish(self, bucket: Bucket, started: tuple[Work, torch.Tensor]) -> None:
        """See ``Aggregate``."""
        work, mean = started
        work.wait()
        reference = bucket.state(REFERENCE).to(mean.device)
        # Rounded as what was sent: where nothing has moved this is 0, bit for bit.
        bucket.flat.copy_(torch.mul(reference, self.gamma).sub_(mean))


@register
@dataclasses.dataclass(kw_only=True)
class NoLoCo(StreamedSteps):
    """m <- mu m - lr mean(D) + gamma (mean(reference) - reference); reference <- reference + m; weights <- reference.

    D = reference - weights; the means are over this rank and its partner, drawn by the number of the exchange. The
    reference is each rank's own; ``bagua.average_model`` gives the mean of all ranks.

    Args:
        outer_lr: lr of the formula.
        outer_momentum: mu of it.
        consensus: gamma, how much the references of a pair move towards their mean.
        topology: "matching" or another one of ``bagua.neighbor_average``; "all" is DiLoCo with heavy ball momentum.
        others: those of :class:`bagua.algorithms._outer.StreamedSteps`: sync_every (H), fragments (P), overlap_steps
            (tau), merge (alpha), warmup_steps, state_dtype, state_device.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="noloco", sync_every=50)
    """

    about = About(
        sends="a rank's reference and how far its weights have moved, as one message, full precision",
        to="one rank, drawn anew for each exchange",
        when="after every k-th optimizer step, which waits; with `overlap_steps` during the steps that follow",
        bytes_per_step="G / k",
        memory="3 G, and G while an exchange is under way",
        use_when="many ranks far apart, where an all_reduce would wait for the slowest link",
        paper="[2506.10911](https://arxiv.org/abs/2506.10911)",
    )

    sync_every: int = 50
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    consensus: float = 0.7
    topology: str = "matching"

    has_one_reference = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("outer_lr", self.outer_lr, 0, math.inf, is_least_allowed=False)
        check_range("outer_momentum", self.outer_momentum, 0, 1)
        check_range("consensus", self.consensus, 0, math.inf)
        check_topology(self.topology, 0, torch.float32)
        pairs = PairMean(self.outer_lr, self.consensus, self.topology, self.sync_every)
        rule = OuterSGD(1.0, self.outer_momentum, nesterov=False)
        self.set_parts(self.make_schedule(), pairs, rule, self.make_states(*[MOMENTUM] * bool(self.outer_momentum)))

    def synchronize(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Gives all ranks the mean of their references and of their outer momenta, and takes an outer step of all."""
        if self.stage().synchronises_gradients:
            return
        for index, exchanges in enumerate(self._exchanges):
            while exchanges:
                self._finish(index, exchanges.pop(0), 0.0)
            mine = [bucket for bucket in buckets if bucket.optimizer_index == index]
            for bucket in mine:
                has_changed = self._merged_at[index][bucket.fragment] != self._num_local_steps[index]
                self._synchronize(bucket, group, has_changed)
            self._merged_at[index] = [self._num_local_steps[index]] * self.schedule.fragments

    def _synchronize(self, bucket: Bucket, group: BucketGroup, has_changed: bool) -> None:
        flat = bucket.flat
        if has_changed:
            bucket.load()
            torch.sub(bucket.state(REFERENCE).to(flat.device, flat.dtype), flat, out=flat)
            group.all_reduce(bucket, ReduceOp.AVG).wait()
        kept = [bucket.state(name) for name in self.parameter_state()]
        for state in kept:
            group.all_reduce(state, ReduceOp.AVG, label=bucket.label).wait()
        if has_changed:
            here = [state.to(flat.device) for state in kept]
            self.rule.step(here[0], flat.mul_(self.outer_lr), *(here[1:] or [None]), 0.0)
            for state, value in zip(kept, here, strict=True):
                state.copy_(value)
        flat.copy_(kept[0])
        bucket.store()
