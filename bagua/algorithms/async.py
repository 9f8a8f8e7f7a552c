"""async: every rank steps at its own pace, and now and then the weights are averaged in the background.

Data path: policy. A round: a snapshot x~ of the weights goes into an all_reduce, on connections of its own, and
training goes on; at the first optimizer step after its end x <- x + (S/n - x~), S the sum of the snapshots, so that
the steps taken meanwhile stay. A rank takes part in a round when it comes to a step, so a slow rank makes rounds
longer, but nobody waits. Source: section 3.3 of arXiv 2107.01499.

Weights change at optimizer steps only, on the thread that trains, so there is no lock and a backward sees the weights
of its forward. Every round tells how many ranks want to stop; after one in which any does nobody begins another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms.base import About, Algorithm, Declaration, Training
from bagua.algorithms.registry import register
from bagua.bucket import Bucket
from bagua.errors import BaguaError, InvalidArgument
from bagua.group import ProcessGroup, ReduceOp, Work

_numbers: weakref.WeakKeyDictionary[ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Round:
    """From the snapshot to the correction of the weights."""

    works: list[tuple[Bucket, Work]]
    num_stopping: torch.Tensor  # of ranks; once `end` is completed
    end: Work


@register
@dataclasses.dataclass(kw_only=True)
class Async(Algorithm):
    """x <- x + (mean over ranks of x~ - x~), where x~ is what x was when the round began.

    Call ``model.bagua.pause()`` on all ranks before weights are saved, compared or loaded, and ``resume()`` after it:
    a round under way is in no checkpoint. A rank may end its training before the others; then the others train on
    without averaging. Each rank skips the steps that its own GradScaler skips.

    Args:
        sync_interval: seconds from the beginning of a round to that of the next one, at least; 0 for back to back.
        warmup_steps: so many optimizer steps average gradients instead, as gradient_allreduce does.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="async", sync_interval=0.2)    # doctest: +SKIP
    """

    about = About(
        sends="weights, full precision",
        to="all ranks",
        when="in the background, every so many seconds; no step waits",
        bytes_per_step="2 (n-1)/n G per round of averaging",
        memory="2 G",
        use_when="ranks differ in speed, or the network comes and goes",
        paper="[2107.01499](https://arxiv.org/abs/2107.01499)",
    )
    exchanges = "weights"
    is_lockstep = False

    sync_interval: float = 0.5
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sync_interval >= 0:
            raise InvalidArgument(f"sync_interval is {self.sync_interval}, expected 0 seconds or more")
        if self.warmup_steps < 0:
            raise InvalidArgument(f"warmup_steps is {self.warmup_steps}, expected 0 or more")

    def attach(self, training: Training) -> None:
        super().attach(training)
        self._num_steps = [0] * len(training.optimizers)
        self._round: _Round | None = None
        self._snapshots: dict[int, torch.Tensor] = {}  # by bucket
        self._buckets: Sequence[Bucket] = ()
        self._next_round_s = time.monotonic()
        self._is_stopping = False  # this rank wants no more rounds
        self._is_stopped = False  # some rank did, in the last round
        self._is_paused = False
        group = training.group
        number = next(_numbers.setdefault(group, itertools.count()))
        self._group = group.subgroup(f"async-{number}", range(group.size), group.timeout)
        self._group.before_close = functools.partial(_leave, weakref.ref(self))

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        if not self.synchronises_gradients():
            self._snapshots = {bucket.index: torch.empty_like(bucket.flat) for bucket in buckets}

    def declare(self, bucket: Bucket) -> Declaration:
        return Declaration("all_reduce")

    def synchronises_gradients(self) -> bool:
        return min(self._num_steps) < self.warmup_steps

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        return group.all_reduce(bucket.flat, ReduceOp.AVG, label=bucket.label)

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        if self._round is not None and self._round.end.is_completed():
            self._finish_round()

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        self._group.check()
        is_warm = not self.synchronises_gradients()
        self._num_steps[self.training.optimizers.index(optimizer)] += 1
        is_idle = self._round is None and not self._is_stopped and not self._is_paused
        if is_warm and is_idle and group.size > 1 and time.monotonic() >= self._next_round_s:
            self._begin_round()

    def _begin_round(self) -> None:
        self._next_round_s = time.monotonic() + self.sync_interval
        works = []
        for bucket in self._buckets:
            bucket.load()
            self._snapshots[bucket.index].copy_(bucket.flat)
            work = self._group.all_reduce(bucket.flat, ReduceOp.AVG, label=bucket.label)
            self.training.record(work, self._group)
            works.append((bucket, work))
        num_stopping = torch.tensor([int(self._is_stopping)])
        self._round = _Round(works, num_stopping, self._group.all_reduce(num_stopping, label="ranks that stop"))

    def _finish_round(self) -> None:
        ended, self._round = self._round, None
        ended.end.wait()
        for bucket, work in ended.works:
            work.wait()
            bucket.flat.sub_(self._snapshots[bucket.index])
            bucket.add_to_weights()
        self._is_stopped = bool(ended.num_stopping)

    def _stop(self) -> None:
        """Takes part in rounds until all ranks know that this one will not do so any more."""
        if self.training.group.size == 1 or self.synchronises_gradients():
            self._is_stopped = True
        while not self._is_stopped:
            if self._round is None:
                self._is_stopping = True
                self._begin_round()
            self._finish_round()

    def pause(self) -> None:
        if not self._is_paused:
            self._stop()
            self._group.barrier().wait()
            self._is_paused = True

    def resume(self) -> None:
        if self._is_paused:
            self._group.barrier().wait()
            self._is_paused = self._is_stopping = self._is_stopped = False

    def detach(self) -> None:
        self._group.close()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": list(self._num_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._round is not None:
            raise InvalidArgument("a round of averaging is under way; call model.bagua.pause() before loading")
        self._num_steps = list(state["num_steps"])


def _leave(algorithm_ref: weakref.ref[Async]) -> None:
    """The group of the rounds is about to close."""
    algorithm = algorithm_ref()
    if algorithm is not None:
        with contextlib.suppress(BaguaError):  # of a group that has failed, which others report
            algorithm._stop()
