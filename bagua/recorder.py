"""What is written down while training goes on: a record per synchronising step, and the labels of operations.

Beside the data path. ``step.py`` writes into rings of fixed size and adds up totals; the engine keeps its own ring of
spans. Clock: CLOCK_MONOTONIC in nanoseconds, the same on both sides. It is always on, so nothing here takes more than
a few microseconds per step: what can be computed from the records is computed when somebody asks.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import BaguaError

KEPT_STEPS = 4096
KEPT_LABELS = 16384
_OUTSIDE_PER_STEP = 3  # a forward's hook, and the two of an optimizer's step
_COMPUTE_PER_STEP = 2  # a forward, and a backward that is local; steps that accumulate have more, of fewer steps


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One synchronising backward of this rank.

    Attributes:
        index: how many came before it.
        begin_ns: autograd reached the model's output: backward's computation began.
        wait_ns: backward's computation had ended; from here on communication was exposed.
        end_ns: all gradients were synchronised and ``backward()`` returned.
        outside_ns: time that the optimizer's steps after the backward before, and the forwards before this one, spent
            in the algorithm, exchanging weights mostly, and on broadcasting buffers.
        bytes_sent: payload of the model's operations that have ended since the step before.
        network_bytes_sent: of them those that went over a network, not through shared memory.
        num_buckets: messages, one per bucket.
    """

    index: int
    begin_ns: int
    wait_ns: int
    end_ns: int
    outside_ns: int
    bytes_sent: int
    network_bytes_sent: int
    num_buckets: int

    @property
    def exposed_ns(self) -> int:
        """Time since the end of the backward before in which this rank did nothing but wait for communication."""
        return self.end_ns - self.wait_ns + self.outside_ns


@dataclass(frozen=True, slots=True)
class Outside:
    """Time in a hook outside backward, which counts as exposed communication.

    ``hook`` is before_forward, before_optimizer_step or after_optimizer_step.
    """

    hook: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation beside synchronising backwards: ``what`` is forward, or local backward, inside no_sync."""

    what: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended the training of this rank.

    Attributes:
        where: "backward", the hook, as ``Outside`` has it, or "computation" where bagua looked and found the failure.
        step: its index, as a StepRecord would have it.
        begin_ns: of the backward; of a hook, that of the wait.
        wait_ns: from here on the rank waited.
        end_ns: when it raised.
        error: kind and message.
        rank: who is to blame, as far as is known.
    """

    where: str
    step: int
    begin_ns: int
    wait_ns: int
    end_ns: int
    error: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of the engine's worker thread: ``kind`` is queued, operation, encode, wire, decode or reduce.

    Attributes:
        bytes: of the tensor for an operation, of the part or message for the others.
        group: name of the group whose engine it was.
        ticket: counts the operations of that engine; the same operation has the same one on all ranks.
        waits_for_some: of an operation: its rank waited for its neighbours only, as on a ring.
    """

    label: str
    kind: str
    begin_ns: int
    end_ns: int
    bytes: int
    group: str
    ticket: int
    waits_for_some: bool = False


class Operation(Protocol):
    """What the recorder needs of the core's Work: ``sent`` is (bytes, of them over a network), None until it ends."""

    @property
    def ticket(self) -> int: ...

    @property
    def sent(self) -> tuple[int, int] | None: ...


class Recorder:
    """Written by the step, read by ``model.bagua.timeline()``; memory is bounded.

    Any thread may read: each read is of one container, by one call that does not let other threads in between.
    """

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._outside: deque[tuple[str, int, int]] = deque(maxlen=_OUTSIDE_PER_STEP * KEPT_STEPS)
        self._compute: deque[tuple[str, int, int]] = deque(maxlen=_COMPUTE_PER_STEP * KEPT_STEPS)
        self._labels: dict[tuple[str, int], tuple[str, bool]] = {}  # and whether it is a bucket's; by group and ticket
        self._uncounted: deque[Operation] = deque(maxlen=KEPT_LABELS)  # what they have sent is not in a step yet
        self._failure: Failure | None = None
        self._num_steps = 0
        self._exposed_ns = 0
        self._bytes_sent = 0
        self._network_bytes_sent = 0
        self._outside_ns = 0

    def add_outside(self, hook: str, begin_ns: int, end_ns: int) -> None:
        """Counts time outside backward towards the step that follows."""
        self._outside.append((hook, begin_ns, end_ns))
        self._outside_ns += end_ns - begin_ns

    def add_compute(self, what: str, begin_ns: int, end_ns: int) -> None:
        """As ``Compute``."""
        self._compute.append((what, begin_ns, end_ns))

    def add_work(self, group: str, work: Operation, label: str, is_bucket: bool = True) -> None:
        """Names the spans of ``work`` of the engine of ``group``, and counts what it sends."""
        self._labels[group, work.ticket] = (label, is_bucket)
        if len(self._labels) > KEPT_LABELS:
            del self._labels[next(iter(self._labels))]
        self._uncounted.append(work)

    def add_step(self, begin_ns: int, wait_ns: int, end_ns: int, num_buckets: int) -> None:
        """Records a complete step."""
        sent, over_network = self._count_sent()
        times = (begin_ns, wait_ns, end_ns, self._outside_ns)
        record = StepRecord(self._num_steps, *times, sent, over_network, num_buckets)
        self._steps.append(record)
        self._num_steps += 1
        self._exposed_ns += record.exposed_ns
        self._bytes_sent += sent
        self._network_bytes_sent += over_network
        self._outside_ns = 0

    def _count_sent(self) -> tuple[int, int]:
        """What the operations that have ended have sent, in all and over a network; the others stay for later."""
        sent = over_network = 0
        for _ in range(len(self._uncounted)):
            work = self._uncounted.popleft()
            counts = work.sent
            if counts is None:
                self._uncounted.append(work)
            else:
                sent, over_network = sent + counts[0], over_network + counts[1]
        return sent, over_network

    @contextlib.contextmanager
    def hook(self, name: str) -> Iterator[None]:
        """Counts the time inside as ``add_outside``, or records that it failed."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        except BaguaError as error:
            self.add_failure(name, begin_ns, begin_ns, error)
            raise
        self.add_outside(name, begin_ns, time.monotonic_ns())

    def add_failure(self, where: str, begin_ns: int, wait_ns: int, error: BaguaError) -> None:
        """Records what this rank raises now; what fails after the first failure follows from it."""
        if self._failure is None:
            message = f"{type(error).__name__}: {error}"
            times = (begin_ns, wait_ns, time.monotonic_ns())
            self._failure = Failure(where, self._num_steps, *times, message, error.rank)

    def steps(self) -> tuple[StepRecord, ...]:
        """The last KEPT_STEPS steps, oldest first."""
        return tuple(self._steps)

    def outside(self) -> tuple[Outside, ...]:
        """The hooks outside backward of about as many steps, oldest first."""
        return tuple(Outside(*one) for one in tuple(self._outside))

    def compute(self) -> tuple[Compute, ...]:
        """The forwards and local backwards of about as many steps, oldest first."""
        return tuple(Compute(*one) for one in tuple(self._compute))

    def failure(self) -> Failure | None:
        """The first one, None while there is none."""
        return self._failure

    def spans(self, events: Iterable[tuple[str, Any]]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """``events``, the engines' by group, under their labels: those of buckets, and the others of this model.

        Those of other models and of users are left out.
        """
        labels = dict(self._labels)
        of_buckets: list[Span] = []
        others: list[Span] = []
        for group, event in events:
            named = labels.get((group, event.ticket))
            if named is not None:
                label, is_bucket = named
                place = (group, event.ticket, event.waits_for_some)
                span = Span(label, event.kind, event.begin_ns, event.end_ns, event.bytes, *place)
                (of_buckets if is_bucket else others).append(span)
        return tuple(of_buckets), tuple(others)

    def totals(self) -> dict[str, Any]:
        """Since the model was wrapped: steps, exposed_s (seconds), bytes_sent and network_bytes_sent."""
        return {
            "steps": self._num_steps,
            "exposed_s": self._exposed_ns / 1e9,
            "bytes_sent": self._bytes_sent,
            "network_bytes_sent": self._network_bytes_sent,
        }
