"""What happened when: one record per synchronising step, one span per operation of the engine.

Beside the data path: ``step.py`` writes a record per step into a ring of fixed size and adds up totals;
the engine keeps its own ring of spans. Clock: CLOCK_MONOTONIC in nanoseconds, the same on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KEPT_STEPS = 4096
KEPT_LABELS = 16384


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One synchronising backward of this rank.

    Attributes:
        index: how many came before it.
        begin_ns: its first gradient became ready.
        wait_ns: backward's computation had ended; from here on communication was exposed.
        end_ns: all gradients were synchronised and ``backward()`` returned.
        outside_ns: time that forwards and optimizer steps since the step before spent in the algorithm, exchanging
            weights mostly, and on broadcasting buffers.
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
        """Time in which this rank did nothing but wait for communication."""
        return self.end_ns - self.wait_ns + self.outside_ns


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of the engine's worker thread: ``kind`` is queued, operation, encode, wire, decode or reduce."""

    label: str
    kind: str
    begin_ns: int
    end_ns: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A snapshot: the last steps, the engine's last spans, and totals since the model was wrapped.

    Example:
        >>> model.bagua.timeline().summary()                                      # doctest: +SKIP
        {'steps': 110, 'exposed_s': 0.21, 'bytes_sent': 1184640, 'buckets': {'bucket 0': 'all_reduce, minmax_uint8'}}
    """

    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    totals: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Totals since the model was wrapped: steps, exposed_s (seconds), bytes_sent, and buckets by label."""
        return dict(self.totals)


class Recorder:
    """Written by the step, read by ``model.bagua.timeline()``; memory is bounded."""

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._labels: dict[tuple[str, int], str] = {}  # by group and ticket
        self._num_steps = 0
        self._exposed_ns = 0
        self._bytes_sent = 0
        self._outside_ns = 0

    def add_outside(self, nanoseconds: int) -> None:
        """Counts time outside backward towards the step that follows."""
        self._outside_ns += nanoseconds

    def add_work(self, group: str, ticket: int, label: str) -> None:
        """Names the spans of ``ticket`` of the engine of ``group``."""
        self._labels[group, ticket] = label
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

    def snapshot(self, events: Iterable[tuple[str, Any]], buckets: Iterable[Any]) -> Timeline:
        """What is known now; ``events`` are the engines', by group, of which only those of this model are named."""
        spans = tuple(
            Span(self._labels[group, event.ticket], event.kind, event.begin_ns, event.end_ns, event.bytes)
            for group, event in events
            if (group, event.ticket) in self._labels
        )
        totals = {
            "steps": self._num_steps,
            "exposed_s": self._exposed_ns / 1e9,
            "bytes_sent": self._bytes_sent,
            "buckets": {bucket.label: str(bucket.declaration) for bucket in buckets},
        }
        return Timeline(tuple(self._steps), spans, totals)
