"""async_averaging, or "async": ranks step at their own pace, and weights are averaged in the background now and then.

Data path: policy. A round: a snapshot x~ of the weights goes into an all_reduce, on connections of its own, and
training goes on; at the first step of each optimizer after its end x <- x + (S/n - x~) for that optimizer's weights, S
the sum of the snapshots, so that the steps taken meanwhile stay. A rank takes part in a round when it comes to a step,
so a slow rank makes rounds longer, but nobody waits. Source: section 3.3 of arXiv 2107.01499.

Weights change at steps of their own optimizer only, on the thread that trains, so there is no lock, and a backward
sees the weights of its forward wherever it does so without bagua. A round begins when all corrections of the last one
are made. It tells which ranks want to stop; after one in which any does nobody begins another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._weights import loaded_steps
from bagua.algorithms.base import About, Algorithm, Stage, Training
from bagua.algorithms.registry import register
from bagua.buckets import Bucket
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.errors import Aborted, BaguaError, InvalidArgument

logger = logging.getLogger("bagua")

# A rank's intention for the next round: it takes part, it pauses, or it leaves for good.
_STAYS, _PAUSES, _LEAVES = range(3)

_MAX_TEXT = 500  # characters of an exception that the other ranks are told

_DROPPED = (
    "a model was dropped while algorithm 'async' averages its weights: two threads and the connections of its rounds "
    "stay open until the group closes; call model.bagua.remove() before dropping the model"
)

_numbers: weakref.WeakKeyDictionary[ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


@dataclasses.dataclass
class _Round:
    """A round, from the snapshot to the last correction of the weights."""

    works: dict[int, Work]  # by bucket, of those that are not corrected yet
    intentions: torch.Tensor  # by rank; once `end` is completed
    end: Work
    seen_s: float | None = math.inf  # when this rank first noticed its end; None again once it has warned


@register
@dataclasses.dataclass(kw_only=True)
class AsyncAveraging(Algorithm):
    """x <- x + (mean over ranks of x~ - x~), where x~ is what x was when the round began.

    Call ``model.bagua.pause()`` on all ranks before weights are saved, compared or loaded, and ``resume()`` after it:
    a round under way is in no checkpoint. Each rank skips the steps that its own GradScaler skips.

    A rank may end its training before the others, with ``model.bagua.remove()`` or ``bagua.destroy_process_group()``:
    it waits for their next round, and they train on without averaging, with a warning in the log "bagua" that names it.
    After an exception they get an error instead, at their next step: one that ends the program, and one during which
    either of the two is called, in a ``finally`` or an ``except``. (Not SystemExit(0), StopIteration and GeneratorExit,
    which are ends. Of a plain ``sys.exit(1)`` outside of a ``try`` Python tells nobody: to the others it is an end.)
    One of the two is required while the model exists: a model that is merely dropped leaves two threads and its
    connections open until the group closes, and rounds of other ranks wait for it until they fail.

    Every optimizer has to step now and then, and every rank to come to a step well within the group's timeout: each
    optimizer's weights are corrected at its own step, and the next round begins after the last of them. A warning
    names an optimizer that rounds wait for.

    Args:
        sync_interval: seconds from the beginning of a round to that of the next one, at least; 0 for back to back. At
            most half of the group's timeout, which is the deadline of a rank that waits for the others' next round.
        warmup_steps: so many optimizer steps average gradients instead, as gradient_allreduce does.

    Example:
        >>> model = bagua.with_bagua(model, optimizer, algorithm="async_averaging", sync_interval=0.2)
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
        group = training.group
        number = next(
            _numbers.setdefault(group.process_group, itertools.count())
        )  # first: all ranks count alike, who refuses too
        timeout_s = group.timeout.total_seconds()
        if self.sync_interval > timeout_s / 2:
            raise InvalidArgument(
                f"sync_interval is {self.sync_interval:g} s, expected at most half of the group's timeout, which is "
                f"{timeout_s:g} s: a rank that ends waits for the others' next round; make the interval shorter, or "
                "the timeout of init_process_group or new_group longer"
            )
        super().attach(training)
        self._num_steps = [0] * len(training.optimizers)
        self._round: _Round | None = None
        self._snapshots: dict[int, torch.Tensor] = {}  # by bucket
        self._buckets: Sequence[Bucket] = ()
        self._next_round_s = time.monotonic()
        self._intention = _STAYS
        self._is_stopped = False  # some rank did not stay, in the last round
        self._is_paused = False
        self._rounds = group.subgroup(f"async-{number}", range(group.size), group.timeout)
        self._group = self._rounds.process_group
        self._dropped = weakref.finalize(self, warnings.warn, _DROPPED, ResourceWarning)
        self._dropped.atexit = False
        self._group.before_close.append(
            functools.partial(
                _leave, weakref.ref(self), weakref.ref(self._group), group.process_group, sys.exc_info()[1]
            )
        )

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = tuple(buckets)
        if not self.stage().synchronises_gradients:
            self._snapshots = {bucket.index: torch.empty_like(bucket.flat) for bucket in buckets}

    def stage(self) -> Stage:
        return Stage(synchronises_gradients=min(self._num_steps) < self.warmup_steps)

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work:
        return group.all_reduce(bucket, ReduceOp.AVG)

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        if self._round is not None and self._round.end.is_completed():
            self._correct(buckets)
            self._warn_if_stalled()

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        self._group.check()
        is_warm = not self.stage().synchronises_gradients
        self._num_steps[self.training.optimizers.index(optimizer)] += 1
        is_idle = self._round is None and not self._is_stopped and not self._is_paused
        if is_warm and is_idle and group.size > 1 and time.monotonic() >= self._next_round_s:
            self._begin_round()

    def _begin_round(self) -> None:
        self._next_round_s = time.monotonic() + self.sync_interval
        works = {}
        for bucket in self._buckets:
            snapshot = self._snapshots[bucket.index]
            bucket.load(flat=snapshot)
            works[bucket.index] = self._rounds.all_reduce(bucket, ReduceOp.AVG, parts=[(0, snapshot)])
        intentions = torch.zeros(self._group.size, dtype=torch.int64, device="cpu")
        intentions[self._group.rank] = self._intention
        self._round = _Round(works, intentions, self._rounds.all_reduce(intentions, label="ranks that stop"))

    def _correct(self, buckets: Sequence[Bucket]) -> None:
        """Adds to their weights what the round found, once; with the last of all buckets the round is over."""
        current = self._round
        current.end.wait()
        for bucket in buckets:
            if bucket.index in current.works:
                current.works[bucket.index].wait()
                bucket.flat.sub_(self._snapshots[bucket.index])
                bucket.add_to_weights()
                del current.works[bucket.index]
        if not current.works:
            self._round = None
            self._finish_round(current.intentions.tolist())

    def _finish_round(self, intentions: Sequence[int]) -> None:
        self._is_stopped = any(intentions)
        left = [str(rank) for rank, intention in enumerate(intentions) if intention == _LEAVES]
        if left and self._intention == _STAYS:
            logger.warning(
                "async: rank %s of the group '%s' ended the training of this model, so weights are no longer averaged; "
                "rank %d trains on by itself; if that end came too early, see the log of the one that ended",
                ", ".join(left),
                self.training.group.name,
                self._group.rank,
            )

    def _warn_if_stalled(self) -> None:
        """Warns of optimizers that do not step: no error reports it where all ranks wait for the same one."""
        current = self._round
        if current is None or current.seen_s is None:
            return
        current.seen_s = min(current.seen_s, time.monotonic())
        if time.monotonic() - current.seen_s > self._group.timeout.total_seconds() / 2:
            idle = {bucket.optimizer_index for bucket in self._buckets if bucket.index in current.works}
            logger.warning(
                "async: weights are not averaged, because rank %d has waited %.3g s for a step of optimizers%s; let "
                "every optimizer step now and then, or freeze its parameters before with_bagua",
                self._group.rank,
                time.monotonic() - current.seen_s,
                sorted(idle),
            )
            current.seen_s = None

    def _stop(self, intention: int) -> None:
        """Takes part in rounds until all ranks know that this one will not do so any more."""
        if self.training.group.size == 1 or self.stage().synchronises_gradients:
            self._is_stopped = True
        self._intention = intention  # from the next round on: that of one under way has been sent
        while not self._is_stopped:
            if self._round is None:
                self._begin_round()
            self._correct(self._buckets)

    @property
    def is_paused(self) -> bool:
        """Returns True between ``pause`` and ``resume``."""
        return self._is_paused

    def pause(self) -> None:
        """Stops averaging; collective, idempotent."""
        if not self._is_paused:
            self._stop(_PAUSES)
            self._group.barrier().wait()
            self._is_paused = True

    def resume(self) -> None:
        """Averages again; collective, idempotent."""
        if self._is_paused:
            self._group.barrier().wait()
            self._is_paused = self._is_stopped = False
            self._intention = _STAYS

    def detach(self) -> None:
        self._dropped.detach()
        self._group.close()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": list(self._num_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._round is not None:
            raise InvalidArgument("a round of averaging is under way; call model.bagua.pause() before loading")
        self._num_steps = loaded_steps(state, self.training)


def _leave(
    algorithm_ref: weakref.ref[AsyncAveraging],
    rounds_ref: weakref.ref[ProcessGroup],
    group: ProcessGroup,
    handled: BaseException | None,
) -> None:
    """The group of the rounds is about to close."""
    algorithm, rounds, failure = algorithm_ref(), rounds_ref(), _failure(handled)
    if failure is not None and rounds is not None:
        try:
            group.check()  # who made this rank fail is named, not this rank
        except BaguaError as error:
            rounds.poison(error)
            return
        what = traceback.format_exception_only(failure)[-1].strip()[:_MAX_TEXT]
        rounds.poison(Aborted(f"rank {rounds.rank} failed, and trains no more: {what}; see its log", rank=rounds.rank))
    elif algorithm is not None:
        try:
            algorithm._stop(_LEAVES)
        except BaguaError as error:
            logger.warning("async: the last averages of weights, to which all ranks belong, failed: %s", error)


def _failure(handled: BaseException | None) -> BaseException | None:
    """The exception that ends this rank's training: one under way here, or the one that ends the program.

    Not `handled`, which was under way when the training began: a second attempt may be made in an ``except``.
    """
    error = sys.exc_info()[1]
    # The interpreter keeps an uncaught one before it calls any hook or exit function (last_exc: since Python 3.12); an
    # interactive session went on after it.
    if error is None and not hasattr(sys, "ps1"):
        error = getattr(sys, "last_exc", getattr(sys, "last_value", None))
    is_end = isinstance(error, (StopIteration, StopAsyncIteration, GeneratorExit))
    is_end = is_end or (isinstance(error, SystemExit) and error.code in (None, 0))
    return None if is_end or error is handled else error
