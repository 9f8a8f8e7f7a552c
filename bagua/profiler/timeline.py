"""Timeline: a snapshot of one rank's records, for ``model.bagua.timeline()``, which can be saved as a trace.

Beside the data path. ``bagua timeline`` (report.py) merges the files of several ranks.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.distributed.consensus import agree
from bagua.distributed.job_ranks import reworded
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import BaguaError
from bagua.profiler import chrome_trace, clock_sync
from bagua.profiler.clock_sync import ClockOffset
from bagua.profiler.recorder import Compute, ExposedHook, Failure, Recorder, Span, StepRecord

__all__ = ["Compute", "Failure", "ExposedHook", "Recorder", "Span", "StepRecord", "Timeline", "save_all", "snapshot"]


@dataclass(frozen=True, slots=True)
class Timeline:
    """A snapshot: the last steps, the engine's last spans, and totals since the model was wrapped.

    Attributes:
        steps: the last 4096, oldest first.
        spans: those of this model, of the last 4096 operations that each group's engine keeps and their last 65536
            parts.
        totals: what ``summary`` returns.
        exposed_hooks: exposed communication in the hooks of forwards and optimizer steps.
        compute: forwards, and backwards inside no_sync.
        coordination: spans of the ranks' small messages beside the buckets: "ready order", "buffers", "used
            parameters", "replicas".
        place: where it was recorded: rank, world_size, group, algorithm, host, boot_id and pid.
        kept_since_ns: by group, for operations and for parts: ``spans`` has all operations that began later, and all
            parts of such; 0 where none was dropped.
        failure: what ended the training of this rank; None if nothing did.

    Example:
        >>> model.bagua.timeline().summary()
        {'steps': ..., 'exposed_s': ..., 'bytes_sent': ..., 'network_bytes_sent': ...,
         'buckets': {'bucket 0': 'not sent yet'}}
        >>> model.bagua.timeline().save("rank0.json")  # for ui.perfetto.dev
    """

    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    totals: dict[str, Any]
    exposed_hooks: tuple[ExposedHook, ...]
    compute: tuple[Compute, ...]
    coordination: tuple[Span, ...]
    place: dict[str, Any]
    kept_since_ns: dict[str, tuple[int, int]]
    failure: Failure | None = None

    @property
    def outside(self) -> tuple[ExposedHook, ...]:
        """The same as ``exposed_hooks``."""
        return self.exposed_hooks

    def summary(self) -> dict[str, Any]:
        """Totals from when the model was wrapped to the end of its last backward.

        They are: steps, exposed_s (seconds), bytes_sent and network_bytes_sent (the part that went over a network, not
        through shared memory) of this model's operations, and buckets by label.
        """
        return dict(self.totals)

    def save(self, path: str | Path, clock: ClockOffset | None = None) -> None:
        """Writes this rank's trace, a JSON file that Perfetto and chrome://tracing open; creates folders.

        Without ``clock`` times stay on this host's clock, and `bagua timeline` can merge files of one host only.
        ``model.bagua.save_timeline(folder)`` measures it and saves all ranks.

        Args:
            path: of the file.
            clock: this rank's offset to rank 0's clock, as ``bagua.profiler.clock_sync.measure`` finds it.

        Raises:
            InvalidArgument: the file cannot be written.
        """
        offset = dict.fromkeys(("offset_ns", "uncertainty_ns", "measured_ns", "measurement"))
        if clock is not None:
            offset = dataclasses.asdict(clock)
        about = {**self.place, "clock": offset, "totals": self.totals}
        records = (self.steps, self.exposed_hooks, self.compute)
        chrome_trace.write(
            path, chrome_trace.document(records, self.spans, self.coordination, self.kept_since_ns, self.failure, about)
        )


def snapshot(
    recorder: Recorder,
    group: ProcessGroup,
    groups: Sequence[ProcessGroup],
    algorithm: str,
    buckets: Mapping[str, str],
    parts: bool,
) -> Timeline:
    """The timeline up to now.

    Args:
        group: the ranks that train together.
        groups: those whose engines have run the operations.
        buckets: what was sent last, by label.
        parts: False: operations as a whole only.
    """
    events = [(one.name, event) for one in groups for event in one.events(parts=parts)]
    kept_since_ns = {one.name: one.kept_since_ns() for one in groups}  # later: what is lost until then
    spans, coordination = recorder.spans(events)
    place = {"rank": group.rank, "world_size": group.size, "group": group.name, "algorithm": algorithm}
    place |= {"host": socket.gethostname(), "boot_id": _boot_id(), "pid": os.getpid()}
    return Timeline(
        recorder.steps(),
        spans,
        {**recorder.totals(), "buckets": dict(buckets)},
        recorder.exposed_hooks(),
        recorder.compute(),
        coordination,
        place,
        kept_since_ns,
        recorder.failure(),
    )


def save_all(group: ProcessGroup, folder: str | Path, timeline: Callable[[], Timeline], alone: str) -> Path:
    """Writes the timeline of each rank of ``group`` to ``folder``/rank<rank>.json, on rank 0's clock; collective.

    Args:
        timeline: returns that of this rank.
        alone: the call that writes this rank's after a failure, for the message.

    Raises:
        InvalidArgument: on every rank, where one cannot write its file.
        BaguaError: the group has failed, or was destroyed.
    """
    try:
        group.check()
        clock = clock_sync.measure(group)
    except BaguaError as error:
        raise reworded(error, after=f"; {alone} writes what this rank knows, without the others") from error
    path = Path(folder) / f"rank{group.rank}.json"

    def write() -> tuple[None, dict[str, Any]]:
        timeline().save(path, clock)
        return None, {}

    agree(group, write, "name a folder that every rank can write to")
    return path


def _boot_id() -> str:
    """Equal where CLOCK_MONOTONIC is the same."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
