"""``algorithm="auto"``: records a training while it runs, predicts what would be faster, and tries it.

Beside the data path: ``reducer.py`` calls ``before_forward`` and ``after_backward`` once per synchronising step. What
follows from one step to the next is in ``_choose``, a generator that is resumed before each. Invariant: what it decides
by is exchanged first, so all ranks decide alike, at the same step.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import math
import statistics
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from bagua.buckets import as_real
from bagua.choice.candidates import BASE, BUCKET_BYTES, Candidate, candidates
from bagua.choice.links import measure_network
from bagua.choice.prediction import Row, check_room, is_near_compute, of_plain, predict, room, to_plain
from bagua.choice.recording import DeviceClock, Recorded, Recording
from bagua.data_parallel.handle import BaguaHandle
from bagua.data_parallel.reducer import Reducer
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ReduceOp
from bagua.distributed.tensors import local_tensor
from bagua.errors import InvalidArgument

T = TypeVar("T")
# A generator that is resumed before each step, with the marks between which the step before it was.
Course: TypeAlias = Generator[None, tuple[Any, Any], T]
logger = logging.getLogger("bagua")

_WARM_UP_STEPS, _STEPS = 4, 20
_LEAST_GAIN = 0.05
_MOST_TRIALS = 3
_ALIKE = 1.02  # predictions within it: the one that stands first in the table is tried first
_COST_STEPS = 5  # 1% of the first 500
_LINKS_S = 0.5
_WATCHED_STEPS, _MOST_OFF = 200, 0.2
_PATIENCE = 4  # times as many steps are watched each time that the same was chosen again
_REMEDY = "let all ranks train the same model"


@dataclasses.dataclass(frozen=True)
class Choice:
    """The choice of ``algorithm="auto"``: ``model.bagua.choice``. Printed, it is the table that the log has.

    Attributes:
        algorithm, options: as ``with_bagua`` takes them, ``bucket_bytes`` among the options.
        risk: the class that was chosen from.
        step_s: seconds of a step under it, measured.
        cost_s: seconds in which the training stood still for it.
        why: a sentence.
        rows: the candidates, the base first.
    """

    algorithm: str
    options: dict[str, Any]
    risk: str
    step_s: float
    cost_s: float
    why: str
    rows: tuple[Row, ...] = ()

    @property
    def candidate(self) -> Candidate:
        """Returns the candidate."""
        return Candidate(self.algorithm, self.options)

    def __str__(self) -> str:
        lines = [
            f"{self.candidate} of {self.risk}, {1e3 * self.step_s:.1f} ms per step: {self.why}; to choose took "
            f"{self.cost_s:.2f} s"
        ]
        for row in self.rows:
            times = (("predicted", row.predicted_s), ("measured", row.measured_s))
            said = [f"{what} {1e3 * seconds:.1f} ms" for what, seconds in times if seconds is not None]
            lines.append(f"  {row.candidate}: {', '.join([*said, *filter(None, [row.note])])}")
        return "\n".join(lines)


class Chooser:
    """Chooses for one model; made by ``with_bagua``.

    Args:
        handle: of the model, which trains under the base.
        wrap: ``with_bagua`` with what the program has passed, but for model, optimizers, algorithm and its options.
        risk: the class.
        bucket_bytes: None: chosen, too.
    """

    def __init__(
        self, handle: BaguaHandle, wrap: Callable[..., Any], risk: str, bucket_bytes: int | None = None
    ) -> None:
        self.choice: Choice | None = None
        self._handle, self._wrap = weakref.ref(handle), wrap
        self._risk, self._bucket_bytes = risk, bucket_bytes
        self._base = self._now = candidates("R0", bucket_bytes)[0]
        self.ranks_are_equal = False  # and stay so, when it wraps the model anew now
        self._clock = DeviceClock(handle.reducer.storage.memory.device)
        self._recording: Recording | None = None
        self._is_between_steps, self._begin = True, self._clock.mark()
        self._resumed_s = self._cost_s = 0.0
        self._is_asked = False
        self._course = self._choose()
        next(self._course)

    @property
    def handle(self) -> BaguaHandle:
        """The model's."""
        handle = self._handle()
        if handle is None:
            raise InvalidArgument("the wrapped model was deleted")
        return handle

    # --- called by the reducer and the handle

    def before_forward(self) -> Reducer:
        """A synchronising forward begins; returns the reducer that it is of."""
        handle = self.handle
        if self._is_between_steps and handle.group.size > 1:
            self._is_between_steps = False
            mark, self._resumed_s = self._clock.mark(), time.perf_counter()
            if self._recording is not None:
                self._recording.begin_step(mark)
            self._course.send((self._begin, mark))
            self._begin = self._clock.mark()
            self._cost_s += time.perf_counter() - self._resumed_s
        return handle.reducer

    def after_backward(self) -> None:
        """A synchronising backward has ended."""
        self._is_between_steps = True
        if self._recording is not None:
            self._recording.end_backward()

    def choose_again(self) -> None:
        """Begins anew with the next step; on all ranks."""
        self._is_asked = True

    def stop(self) -> None:
        """Removes its hooks."""
        if self._recording is not None:
            self._recording.remove()
            self._recording = None

    def state(self) -> dict[str, Any]:
        """Returns what it has chosen and what it runs now, as plain data."""
        chosen = None if self.choice is None else dataclasses.asdict(self.choice)
        return {"algorithm": self._now.algorithm, "options": dict(self._now.options), "chosen": chosen}

    def adopt(self, state: Mapping[str, Any]) -> None:
        """Trains on with what ``state`` returned; collective.

        Raises:
            InvalidArgument: on all ranks: it cannot be run with this model.
        """
        now = Candidate(state["algorithm"], dict(state["options"]))
        if not any(now.is_variant_of(one) for one in candidates(self._risk)):
            raise InvalidArgument(f"the state is of {now}, which is not of risk {self._risk!r}; pass the risk it had")
        with self._keeping_weights(now):
            reason = self._switch(now, meets=False)
        if reason:
            raise InvalidArgument(f"the state is of {now}, as algorithm='auto' chose, which is refused here: {reason}")
        self.stop()
        self._course.close()
        chosen = state["chosen"]
        self.choice = None
        if chosen is not None:
            self.choice = Choice(**{**chosen, "rows": tuple(Row(**row) for row in chosen["rows"])})
        self._course = self._choose()
        next(self._course)

    # --- from step to step

    def _choose(self) -> Course[None]:
        last, num_steps = None, _WATCHED_STEPS
        while True:
            if self.choice is None:
                self.choice = yield from self._chosen()
                if self.handle.group.rank == 0:
                    logger.info("bagua trains with %s", self.choice)
                # To choose the same again has cost steps under the base for nothing.
                num_steps = _PATIENCE * num_steps if self.choice.candidate == last else _WATCHED_STEPS
            last = self.choice.candidate
            yield from self._watch(self.choice, num_steps)
            self.choice = None

    def _chosen(self) -> Course[Choice]:
        yield
        self._cost_s, self._is_asked = 0.0, False
        self._switch(self._base)
        yield from self._steps(_WARM_UP_STEPS)
        recorded = yield from self._recorded()
        group = self.handle.group
        everyone = group.all_gather_plain([recorded.step_s, recorded.compute_s])
        base_s = max(step_s for step_s, _ in everyone)
        slowest = max(range(group.size), key=lambda rank: everyone[rank][1])
        waits = max(0.0, 1 - everyone[slowest][1] / base_s)
        if waits < _LEAST_GAIN:
            why = f"{100 * waits:.0f}% of a step waits for communication, so there is nothing to gain"
            return self._made(self._base, base_s, why, {"": Row(str(self._base), measured_s=base_s)})
        found = self._predicted(recorded, slowest, base_s)
        rows = {row.candidate: row for _, row in found}
        rows[str(self._base)] = base = dataclasses.replace(rows[str(self._base)], measured_s=base_s)
        off = 0.0 if base.predicted_s is None else abs(base.predicted_s / base_s - 1)
        best, best_s = yield from self._tried(found, rows, base_s, off)
        gain = 100 * _LEAST_GAIN
        if best != self._base:
            why = f"{base_s / best_s:.2f} times as fast as {self._base}"
        elif any(row.measured_s for row in rows.values() if row is not base):
            why = f"nothing that was tried is {gain:.0f}% faster"
        else:
            why = f"nothing is predicted to gain {gain:.0f}%, and the {100 * off:.0f}% by which this one's is off"
        if reason := self._switch(best):
            raise InvalidArgument(f"{best} is refused after it has run: {reason}")
        return self._made(best, best_s, why, rows)

    def _made(self, chosen: Candidate, step_s: float, why: str, rows: Mapping[str, Row]) -> Choice:
        cost_s = max(self.handle.group.all_gather_plain(self._cost_s + time.perf_counter() - self._resumed_s))
        return Choice(chosen.algorithm, dict(chosen.options), self._risk, step_s, cost_s, why, tuple(rows.values()))

    def _tried(
        self, found: list[tuple[Candidate, Row]], rows: dict[str, Row], base_s: float, off: float
    ) -> Course[tuple[Candidate, float]]:
        """Tries what is predicted to gain, in training, the fastest first; returns the best, and what it took."""
        group = self.handle.group
        best, best_s = self._base, base_s

        def worth(candidate: Candidate, step_s: float) -> float:
            return step_s * candidate.steps_needed(group.size)

        def pays(candidate: Candidate, step_s: float) -> bool:
            return worth(candidate, step_s) < (1 - _LEAST_GAIN) * worth(best, best_s)

        enough_s = (1 - _LEAST_GAIN) * (rows[str(self._base)].predicted_s or 0.0)
        predicted = [(one, row.predicted_s) for one, row in found if row.predicted_s is not None]
        left = [(one, step_s) for one, step_s in predicted if worth(one, step_s) < enough_s]
        num_trials = 0
        while left and num_trials < _MOST_TRIALS:
            fastest = min(worth(*pair) for pair in left)
            candidate, step_s = left.pop(next(i for i, pair in enumerate(left) if worth(*pair) <= _ALIKE * fastest))
            if not pays(candidate, step_s * (1 + off)):
                break
            took_s = yield from self._trial(candidate, rows)
            num_trials += took_s is not None
            if took_s is not None and pays(candidate, took_s):
                best, best_s = candidate, took_s
            else:  # nor will it with buckets of another size
                left = [pair for pair in left if not pair[0].is_variant_of(candidate)]
        nodes = group.nodes.members
        if 1 < len(nodes) < group.size and "hierarchical" in best.known_options:  # cannot be rehearsed
            hierarchical = best.with_option("hierarchical", True)
            took_s = yield from self._trial(hierarchical, rows)
            if took_s is not None and pays(hierarchical, took_s):
                best, best_s = hierarchical, took_s
        return best, best_s

    def _trial(self, candidate: Candidate, rows: dict[str, Row]) -> Course[float | None]:
        """Returns the seconds of a step under a candidate; None: it is refused."""
        row = rows.get(str(candidate), Row(str(candidate)))
        if reason := self._switch(candidate):
            rows[row.candidate] = dataclasses.replace(row, note=f"refused: {reason}")
            return None
        yield from self._steps(max(_WARM_UP_STEPS, candidate.period))
        took_s = _typical((yield from self._steps(_rounded(_STEPS, candidate.period))), candidate.period)
        took_s = max(self.handle.group.all_gather_plain(took_s))
        rows[row.candidate] = dataclasses.replace(row, measured_s=took_s)
        return took_s

    def _watch(self, choice: Choice, num_steps: int) -> Course[None]:
        """Goes on until so many steps take another time than when it was chosen, or the program asks for another."""
        period = choice.candidate.period
        yield from self._steps(max(_WARM_UP_STEPS, period), until_asked=True)
        while not self._is_asked:
            took_s = yield from self._steps(_rounded(num_steps, period), until_asked=True)
            if self._is_asked:
                break
            now_s = max(self.handle.group.all_gather_plain(_typical(took_s, period)))
            if abs(now_s / choice.step_s - 1) > _MOST_OFF:
                if self.handle.group.rank == 0:
                    logger.info("steps take %.1f ms, and took %.1f", 1e3 * now_s, 1e3 * choice.step_s)
                break
        self._is_asked = False

    def _steps(self, num: int, until_asked: bool = False) -> Course[list[float]]:
        """Lets so many steps go by, or fewer if it is asked to choose again; returns their seconds."""
        marks = []
        while len(marks) < num and not (until_asked and self._is_asked):
            marks.append((yield))
        self._clock.wait()
        return [self._clock.between(*pair) for pair in marks]

    def _recorded(self) -> Course[Recorded]:
        self._recording = Recording(self.handle.reducer.storage.members, self._clock)
        self._recording.begin_step(self._clock.mark())
        yield from self._steps(_STEPS)
        recorded = self._recording.end()
        self.stop()
        return recorded

    # --- at once

    def _predicted(self, recorded: Recorded, slowest: int, base_s: float) -> list[tuple[Candidate, Row]]:
        """Returns the candidates and their rows, the base first; collective.

        Buckets of other sizes are predicted for the base, and for the fastest of the others.
        """
        group, storage = self.handle.group, self.handle.reducer.storage
        limit_s = _COST_STEPS * base_s
        until_s = time.perf_counter() + limit_s
        network = measure_network(group, storage.memory.device, min(_LINKS_S, limit_s / 4))
        num_bytes = sum(member.num_bytes for member in storage.members)
        try:
            agree(group, lambda: (check_room(num_bytes), {}), _REMEDY)
        except InvalidArgument as error:
            return [(self._base, Row(str(self._base), note=str(error)))]
        layers = to_plain(recorded.profile(storage.members)) if group.rank == slowest else None
        profile = of_plain(group.broadcast_plain(layers, slowest))
        free = min(group.all_gather_plain(room(storage.memory.device, len(group.nodes.node_of(group.rank)))))
        everything = candidates(self._risk, self._bucket_bytes)
        fitting = [one for one in everything if one.memory * num_bytes <= free] + self._with_other_buckets(self._base)
        found = list(zip(fitting, predict(group, network, profile, fitting, until_s), strict=True))
        others = [(row.predicted_s, one) for one, row in found if row.predicted_s is not None and one.algorithm != BASE]
        fastest_s, fastest = min(
            others, key=lambda pair: pair[0] * pair[1].steps_needed(group.size), default=(0.0, None)
        )
        has_time = all(group.all_gather_plain(time.perf_counter() < until_s))
        if fastest is not None and has_time and not is_near_compute(fastest_s, profile):
            variants = self._with_other_buckets(fastest)
            found += zip(variants, predict(group, network, profile, variants, until_s), strict=True)
        for one in everything:
            if one not in fitting:
                needed = round(one.memory * num_bytes)
                found.append((one, Row(str(one), note=f"needs {needed >> 20} MiB, and {free >> 20} are free")))
        return found

    def _with_other_buckets(self, candidate: Candidate) -> list[Candidate]:
        sizes = BUCKET_BYTES if self._bucket_bytes is None else ()
        return [candidate.with_option("bucket_bytes", size) for size in sizes]

    def _switch(self, candidate: Candidate, meets: bool = True) -> str:
        """Trains on under a candidate, from the mean of weights that were exchanged; collective.

        Returns why it is refused; "" if it is not.
        """
        if candidate == self._now:
            return ""
        handle = self.handle
        if self._now.exchanges_weights and meets:
            self._meet()
        self.ranks_are_equal = meets and not self._now.exchanges_weights
        try:
            self._wrap(
                handle.module,
                handle.reducer.training.optimizers,
                algorithm=candidate.algorithm,
                **candidate.options,
            )
        except InvalidArgument as error:
            return str(error)
        finally:
            self.ranks_are_equal = False
        handle.reducer.choosing = self
        self._now = candidate
        return ""

    @contextlib.contextmanager
    def _keeping_weights(self, candidate: Candidate) -> Iterator[None]:
        """Leaves a rank its own weights and optimizer states, which are loaded by now, where they are exchanged."""
        handle = self.handle
        if candidate == self._now or not (self._now.exchanges_weights or candidate.exchanges_weights):
            yield
            return
        tensors = [one.detach() for one in (*handle.module.parameters(), *handle.module.buffers())]
        optimizers = handle.reducer.training.optimizers
        before = copy.deepcopy((tensors, [optimizer.state_dict() for optimizer in optimizers]))
        yield
        for tensor, value in zip(tensors, before[0], strict=True):
            tensor.copy_(value)
        for optimizer, state in zip(optimizers, before[1], strict=True):
            optimizer.load_state_dict(state)

    @torch.no_grad()
    def _meet(self) -> None:
        """Gives all ranks the mean of their weights: the next wrap would take those of rank 0."""
        handle = self.handle
        handle.synchronize()
        tensors = [as_real(local_tensor(member.parameter.detach())) for member in handle.reducer.storage.members]
        for work in [handle.group.all_reduce(tensor, ReduceOp.AVG) for tensor in tensors]:
            work.wait()


def _rounded(num: int, period: int) -> int:
    """Returns ``num`` steps, or more: whole periods, three at least."""
    return period * max(3, math.ceil(num / period))


def _typical(took_s: list[float], period: int) -> float:
    """Returns the seconds of a step: the median over the periods for each of their steps, and the mean of these."""
    return statistics.mean(statistics.median(took_s[place::period]) for place in range(period))
