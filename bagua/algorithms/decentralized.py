"""decentralized: weights are averaged with those of a few neighbours while the gradients are computed.

Data path: policy. Before the forward pass one neighbor_average of the weights per bucket is started, which copies them
by itself meanwhile; before the optimizer steps its result takes the place of the weights: x <- p - lr g(x), p the
average of x_t over the neighbourhood. The primitive D_FP_S of the paper (arXiv 2107.01499); source: arXiv 1705.09056.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._weights import ExchangedWeights
from bagua.algorithms.base import About, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.arguments import check_topology
from bagua.distributed.process_group import Work
from bagua.errors import BaguaError, InvalidArgument


@dataclasses.dataclass
class _Exchange:
    """An exchange of the weights of one optimizer, from its start to the optimizer's step."""

    works: list[tuple[Bucket, Work]]
    versions: list[tuple[int, int]]  # the parameters' when they were sent: a change since would be lost


@register
@dataclasses.dataclass(kw_only=True)
class Decentralized(ExchangedWeights):
    """x <- sum over the neighbours and itself of w_ij x_j, and then the optimizer's step on it.

    The averaged weights take their place when the optimizer steps, so weights must not be changed between a
    forward with gradients and the step that follows it (which raises, unless it was done in place through ``.data``: of
    that torch tells nothing). A forward that no step follows counts, too: validate under ``torch.no_grad()``. Each
    optimizer's weights are exchanged once per step of it.

    Args:
        topology: who averages with whom, as in ``bagua.neighbor_average``: "all"; "ring", both neighbours; "shift_one"
            and "matching", pairs that change; "exponential", one sender and one receiver, at distances 1, 2, 4, ...
        interval: every so many steps.
        hierarchical: the nodes' means are averaged by the topology of nodes, which count by their ranks. On one node
            that is the mean of all ranks, whatever the topology.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="decentralized", topology="ring")
    """

    about = About(
        sends="weights, full precision",
        to="all ranks, or neighbours: two on a ring, or one that changes",
        when="during forward and backward; the optimizer's step waits",
        bytes_per_step="`all` 2 (n-1)/n G, and so `ring` of 2 or 3 ranks; of more 2 G; `exponential` and `shift_one` "
        "G, `shift_one` of an odd n (n-1)/n G, a mean; divided by the interval",
        memory="G",
        use_when="bandwidth binds and nothing may be rounded: `shift_one` sends half as much, during forward too",
        paper="[1705.09056](https://arxiv.org/abs/1705.09056)",
    )

    topology: str = "all"
    interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval < 1:
            raise InvalidArgument(f"interval is {self.interval}, expected 1 or more")
        check_topology(self.topology, 0, torch.float32)

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._num_exchanges = [0] * len(training.optimizers)
        self._pending: dict[int, _Exchange] = {}
        # A program may end after a forward that no step has followed, while other ranks still need its weights.
        training.group.before_close.append(functools.partial(_end_exchanges, weakref.ref(self)))

    def before_forward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        for index in range(len(self.training.optimizers)):
            if index not in self._pending and self._is_due(index):
                self._start(index, [bucket for bucket in buckets if bucket.optimizer_index == index], group)

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        index = self.index_of(optimizer)
        if not self._is_due(index):
            return
        if index not in self._pending:  # its closure will run the forward
            self._start(index, buckets, group)
        exchange = self._pending[index]
        if exchange.versions != _versions(buckets):
            error = InvalidArgument(
                "weights were changed between a forward with gradients and the optimizer's step, which algorithm "
                f"{self.name!r} would undo: their average is under way since that forward, though no step had followed "
                "it, as in a validation with gradients. Have such forwards under torch.no_grad(), and change weights "
                "before the next; model.bagua.load_state_dict starts anew"
            )
            group.poison(error)
            raise error
        del self._pending[index]
        for bucket, work in exchange.works:
            work.wait()
            bucket.store()
        self._num_exchanges[index] += 1

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        self.num_steps[self.index_of(optimizer)] += 1

    def _is_due(self, index: int) -> bool:
        return self.training.group.size > 1 and self.num_steps[index] % self.interval == 0

    def _start(self, index: int, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        works = []
        for bucket in buckets:
            weights = bucket.weights()
            if weights is None:
                bucket.load()
            work = group.neighbor_average(
                bucket, self.topology, self._num_exchanges[index], hierarchical=self.hierarchical, parts=weights
            )
            works.append((bucket, work))
        self._pending[index] = _Exchange(works, _versions(buckets))

    def detach(self) -> None:
        for exchange in self._pending.values():
            for _, work in exchange.works:
                work.wait()
        self._pending = {}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_exchanges": list(self._num_exchanges)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detach()
        super().load_state_dict(state)
        self._num_exchanges = list(state["num_exchanges"])


def _end_exchanges(algorithm_ref: weakref.ref[Decentralized]) -> None:
    algorithm = algorithm_ref()
    if algorithm is not None:
        with contextlib.suppress(BaguaError):  # a failure of the group is raised by what it ends
            algorithm.detach()


def _versions(buckets: Sequence[Bucket]) -> list[tuple[int, int]]:
    """Returns torch's counts of changes, and addresses: ``parameter.data = ...`` gives a parameter other memory."""
    parameters = (member.parameter for bucket in buckets for member in bucket.members)
    return [(parameter._version, parameter.data_ptr()) for parameter in parameters]
