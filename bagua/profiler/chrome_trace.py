"""Writes a rank's records as a file in the trace-event format, which Perfetto and chrome://tracing open.

Beside the data path: records -> **trace events** -> file. One process per rank, one track (a thread of the format) per
kind of work. Times are microseconds on rank 0's clock where the offset to it is known. Invariant: slices of one track
are nested or disjoint, as the format requires. RankTrace (rank_trace.py) reads the file.

Format: "Trace Event Format", Google, 2016 (the JSON object form; ``otherData`` is free for the program's own).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bagua.errors import InvalidArgument
from bagua.files import replace_file
from bagua.profiler.recorder import Compute, ExposedHook, Failure, Span, StepRecord

__all__ = ["FORMAT", "TRACKS", "document", "write"]

FORMAT = "bagua timeline 1"
STEPS, COMPUTE, WAITS, COORDINATION, READY, OPERATIONS, ENCODE, WIRE, DECODE = TRACKS = (
    "steps",
    "compute",
    "waits (exposed communication)",
    "coordination",
    "buckets ready",
    "operations",
    "encode",
    "wire",
    "decode and reduce",
)
_TRACK_OF_KIND = {
    "operation": OPERATIONS,
    "encode": ENCODE,
    "wire": WIRE,
    "decode": DECODE,
    "reduce": DECODE,
}
_Record = StepRecord | ExposedHook | Compute
_TRACKS_PER_GROUP = 100  # the thread ids of a group's tracks begin at a multiple of this


def document(
    records: tuple[Sequence[StepRecord], Sequence[ExposedHook], Sequence[Compute]],
    spans: Sequence[Span],
    coordination: Sequence[Span],
    kept_since_ns: dict[str, tuple[int, int]],
    failure: Failure | None,
    about: dict[str, Any],
) -> dict[str, Any]:
    """The whole file as plain data.

    Args:
        records: of the training thread: steps, exposed hooks and computation.
        kept_since_ns: as in ``Timeline``; ``otherData`` has ``operations_since_us`` of it, on rank 0's clock, None
            where no operation was dropped.
        about: goes to ``otherData``; its rank, host and, in ``clock``, offset_ns are used here.
    """
    offset_ns = about["clock"]["offset_ns"] or 0
    events = _Events(about["rank"], offset_ns)
    groups = list(dict.fromkeys([about["group"], *(span.group for span in spans)]))
    events.name_tracks(f"rank {about['rank']} on {about['host']}", groups)
    _add_records(events, *records)
    if failure is not None:
        _add_failure(events, failure)
    _add_spans(events, spans, groups, kept_since_ns)
    _add_coordination(events, coordination)
    since_ns = max((operations_ns for operations_ns, _ in kept_since_ns.values()), default=0)
    since_us = (since_ns + offset_ns) / 1e3 if since_ns else None
    ended = None if failure is None else dataclasses.asdict(failure)
    about = {"format": FORMAT, **about, "operations_since_us": since_us, "failure": ended}
    return {"traceEvents": events.events, "displayTimeUnit": "ms", "otherData": about}


def write(path: str | Path, content: dict[str, Any]) -> None:
    """Writes ``content``, one event per line; creates folders. A file that is there is replaced as a whole.

    Raises:
        InvalidArgument: the path cannot be written to.
    """
    path = Path(path)
    events = ",\n".join(json.dumps(event) for event in content["traceEvents"])
    rest = json.dumps({key: value for key, value in content.items() if key != "traceEvents"}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, f'{{"traceEvents": [\n{events}\n],\n{rest[1:]}\n'.encode())
    except OSError as error:
        raise InvalidArgument(f"the timeline cannot be written to {path}: {error}; give another path") from error


class _Events:
    """Collects the trace events of one rank, with times on rank 0's clock."""

    def __init__(self, rank: int, offset_ns: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._rank, self._offset_ns = rank, offset_ns

    def name_tracks(self, process: str, groups: Sequence[str]) -> None:
        self._meta("process_name", 0, name=process)
        self._meta("process_sort_index", 0, sort_index=self._rank)
        for number, group in enumerate(groups):
            for track in TRACKS if number == 0 else TRACKS[TRACKS.index(READY) :]:
                thread = self.thread(track, number)
                self._meta("thread_name", thread, name=track if number == 0 else f"{track}, {group}")
                self._meta("thread_sort_index", thread, sort_index=thread)

    @staticmethod
    def thread(track: str, number: int) -> int:
        return number * _TRACKS_PER_GROUP + TRACKS.index(track) + 1

    def _meta(self, name: str, thread: int, /, **args: Any) -> None:
        self.events.append({"ph": "M", "name": name, "pid": self._rank, "tid": thread, "args": args})

    def slice(self, track: str, name: str, begin_ns: int, end_ns: int, number: int = 0, /, **args: Any) -> None:
        """Adds a slice; ``number`` is the group's."""
        self._add(track, name, begin_ns, number, args, ph="X", dur=(end_ns - begin_ns) / 1e3)

    def instant(self, track: str, name: str, time_ns: int, number: int = 0, /, **args: Any) -> None:
        self._add(track, name, time_ns, number, args, ph="i", s="t")

    def _add(self, track: str, name: str, time_ns: int, number: int, args: dict[str, Any], **kind: Any) -> None:
        position = {"pid": self._rank, "tid": self.thread(track, number), "ts": (time_ns + self._offset_ns) / 1e3}
        self.events.append({"name": name, "cat": track, **kind, **position, "args": args})


def _add_records(
    events: _Events, steps: Sequence[StepRecord], hooks: Sequence[ExposedHook], compute: Sequence[Compute]
) -> None:
    """Steps, computation and waits, from what the training thread records: hooks, forwards, both ends of backward."""
    records: list[_Record] = sorted([*steps, *hooks, *compute], key=lambda record: (record.begin_ns, record.end_ns))
    for record, following in itertools.zip_longest(records, records[1:]):
        if isinstance(record, StepRecord):
            name = f"backward {record.index}"
            events.slice(COMPUTE, name, record.begin_ns, record.wait_ns)
            events.slice(WAITS, name, record.wait_ns, record.end_ns)
        elif isinstance(record, Compute):
            events.slice(COMPUTE, record.what, record.begin_ns, record.end_ns)
            if record.what == "forward" and _is_backward(following):
                events.slice(COMPUTE, "loss", record.end_ns, max(record.end_ns, following.begin_ns))
        else:
            if record.end_ns > record.begin_ns:
                events.slice(WAITS, record.hook, record.begin_ns, record.end_ns)
            if record.hook == "before_optimizer_step" and getattr(following, "hook", "") == "after_optimizer_step":
                events.slice(COMPUTE, "optimizer step", record.end_ns, max(record.end_ns, following.begin_ns))
    for step, begin_ns, end_ns, hooks_ns in _whole_steps(records):
        events.slice(
            STEPS,
            f"step {step.index}",
            begin_ns,
            end_ns,
            index=step.index,
            exposed_us=(step.end_ns - step.wait_ns + hooks_ns) / 1e3,
            outside_us=hooks_ns / 1e3,
            bytes_sent=step.bytes_sent,
            network_bytes_sent=step.network_bytes_sent,
            num_buckets=step.num_buckets,
        )


def _is_backward(record: _Record | None) -> bool:
    return isinstance(record, StepRecord) or (isinstance(record, Compute) and record.what == "local backward")


def _begins_anew(record: _Record) -> bool:
    """Returns True if this begins another step, given that the current one has had its backward."""
    return not isinstance(record, ExposedHook) or record.hook == "before_forward"


def _whole_steps(records: Sequence[_Record]) -> Iterator[tuple[StepRecord, int, int, int]]:
    """Each step with its begin, its end, and the nanoseconds in hooks between the two.

    A step extends from its first forward, which may be inside no_sync, to the end of the optimizer's steps after its
    backward. A StepRecord instead counts the hooks since the previous backward.
    """
    begin_ns, step, end_ns, hooks_ns = None, None, 0, 0
    for record in records:
        if step is not None and _begins_anew(record):
            yield step, begin_ns, end_ns, hooks_ns
            begin_ns, step, hooks_ns = None, None, 0
        if begin_ns is None:
            begin_ns = record.begin_ns
        if isinstance(record, StepRecord):
            step = record
        elif isinstance(record, ExposedHook):
            hooks_ns += record.end_ns - record.begin_ns
        end_ns = max(end_ns, record.end_ns)  # a reduction that backward waits for at once is inside of its step
    if step is not None:
        yield step, begin_ns, end_ns, hooks_ns


def _add_failure(events: _Events, failure: Failure) -> None:
    if failure.wait_ns > failure.begin_ns:
        events.slice(COMPUTE, f"{failure.where} {failure.step}", failure.begin_ns, failure.wait_ns)
    args = {"step": failure.step, "error": failure.error, "rank": failure.rank}
    events.slice(WAITS, f"{failure.where} failed", failure.wait_ns, failure.end_ns, **args)


def _add_spans(
    events: _Events, spans: Sequence[Span], groups: Sequence[str], kept_since_ns: dict[str, tuple[int, int]]
) -> None:
    by_operation: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        by_operation.setdefault((span.group, span.ticket), []).append(span)
    for (group, _), parts in by_operation.items():
        number = groups.index(group)
        for part in parts:
            if part.kind == "queued":
                waited_us = (part.end_ns - part.begin_ns) / 1e3
                events.instant(READY, part.label, part.begin_ns, number, queued_us=waited_us)
            else:
                args = _identity(part) if part.kind == "operation" else {"bytes": part.bytes}
                events.slice(_TRACK_OF_KIND[part.kind], part.label, part.begin_ns, part.end_ns, number, **args)
        operation = next((part for part in parts if part.kind == "operation"), None)
        if operation is not None and operation.begin_ns > kept_since_ns[group][1]:  # otherwise parts may be missing
            for begin_ns, end_ns in _gaps(operation, parts):
                events.slice(WIRE, operation.label, begin_ns, end_ns, number)


def _add_coordination(events: _Events, spans: Sequence[Span]) -> None:
    for span in spans:
        if span.kind == "operation":
            events.slice(COORDINATION, span.label, span.begin_ns, span.end_ns, **_identity(span))


def _identity(operation: Span) -> dict[str, Any]:
    """Returns the arguments that identify an operation on all ranks, what it sent, and what `bagua timeline` needs."""
    some = {"waits_for_some": True} if operation.waits_for_some else {}
    sent = {"bytes": operation.bytes, "bytes_sent": operation.bytes_sent, "codec": operation.codec}
    return {"group": operation.group, "ticket": operation.ticket, **sent, **some}


def _gaps(operation: Span, parts: Sequence[Span]) -> Iterator[tuple[int, int]]:
    """The time that an operation spends on moving bytes and waiting for peers: all but its arithmetic.

    At full precision the engine does not record the wire itself, and for an all_reduce over TCP no arithmetic either.
    """
    if any(part.kind == "wire" for part in parts):
        return
    at_ns = operation.begin_ns
    arithmetic = [part for part in parts if part.kind not in ("queued", "operation")]
    for part in sorted(arithmetic, key=lambda part: part.begin_ns):
        if part.begin_ns > at_ns:
            yield at_ns, part.begin_ns
        at_ns = max(at_ns, part.end_ns)
    if operation.end_ns > at_ns:
        yield at_ns, operation.end_ns
