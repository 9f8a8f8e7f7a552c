"""What is written down while training goes on: a record per synchronising step, and the labels of operations.

Beside the data path. ``step.py`` writes into rings of fixed size and adds up totals; the engine keeps its own ring of
spans. Clock: CLOCK_MONOTONIC in nanoseconds, the same on both sides. It is always on, so nothing here takes more than
a few microseconds per step: what can be computed from the records is computed when somebody asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KEPT_STEPS = 4096
KEPT_LABELS = 16384
_OUTSIDE_PER_STEP = 3  # a forward's hook, and the two of an optimizer's step


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
        bytes_sent: bytes that this rank's group has sent since the step before.
        num_buckets: messages, one per bucket.
    """

    index: int
    begin_ns: int
    wait_ns: int
    end_ns: int
    outside_ns: int
    bytes_sent: int
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


class Recorder:
    """Written by the step, read by ``model.bagua.timeline()``; memory is bounded.

    Any thread may read: each read is of one container, by one call that does not let other threads in between.
    """

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._outside: deque[tuple[str, int, int]] = deque(maxlen=_OUTSIDE_PER_STEP * KEPT_STEPS)
        self._labels: dict[tuple[str, int], tuple[str, bool]] = {}  # and whether it is a bucket's; by group and ticket
        self._num_steps = 0
        self._exposed_ns = 0
        self._bytes_sent = 0
        self._outside_ns = 0

    def add_outside(self, hook: str, begin_ns: int, end_ns: int) -> None:
        """Counts time outside backward towards the step that follows."""
        self._outside.append((hook, begin_ns, end_ns))
        self._outside_ns += end_ns - begin_ns

    def add_work(self, group: str, ticket: int, label: str, is_bucket: bool = True) -> None:
        """Names the spans of ``ticket`` of the engine of ``group``."""
        self._labels[group, ticket] = (label, is_bucket)
        if len(self._labels) > KEPT_LABELS:
            del self._labels[next(iter(self._labels))]

    def add_step(self, begin_ns: int, wait_ns: int, end_ns: int, bytes_sent: int, num_buckets: int) -> None:
        """Records a complete step."""
        record = StepRecord(self._num_steps, begin_ns, wait_ns, end_ns, self._outside_ns, bytes_sent, num_buckets)
        self._steps.append(record)
        self._num_steps += 1
        self._exposed_ns += record.exposed_ns
        self._bytes_sent += bytes_sent
        self._outside_ns = 0

    def steps(self) -> tuple[StepRecord, ...]:
        """The last KEPT_STEPS steps, oldest first."""
        return tuple(self._steps)

    def outside(self) -> tuple[Outside, ...]:
        """The hooks outside backward of about as many steps, oldest first."""
        return tuple(Outside(*one) for one in tuple(self._outside))

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
        """Since the model was wrapped: steps, exposed_s (seconds) and bytes_sent."""
        return {"steps": self._num_steps, "exposed_s": self._exposed_ns / 1e9, "bytes_sent": self._bytes_sent}
