"""`bagua timeline`: lays the traces of several ranks side by side, and says in words what they show.

Beside the data path: files of ``model.bagua.save_timeline`` -> **one trace, one text**. Times in the files are on rank
0's clock already; here it is checked that they come from one measurement.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import trace
from .errors import InvalidArgument
from .stragglers import Arrival, Latecomer, caused_ns, latecomers, straggler

__all__ = ["RankTrace", "main", "merge", "report"]

_MERGED = "bagua merged timeline 1"
_ABOUT = {
    **dict.fromkeys(("rank", "world_size"), int),
    **dict.fromkeys(("group", "host", "boot_id", "algorithm"), str),
    **dict.fromkeys(("clock", "totals"), dict),
}
_TOTALS = ("steps", "exposed_s", "bytes_sent", "network_bytes_sent")
_TIMES = {"M": (), "i": ("ts",), "X": ("ts", "dur")}  # what an event has, by its `ph`
_OPERATION = {"group", "ticket", "bytes"}
_LANES_OF_OPERATIONS = (trace.OPERATIONS, trace.COORDINATION)
_ARGS = {trace.STEPS: {"index", "exposed_us", "bytes_sent"}, **dict.fromkeys(_LANES_OF_OPERATIONS, _OPERATION)}
_SHOWN_STEPS = 3
_SHOWN_RANKS = 16
# Seconds per second by which the clocks of two hosts differ at most: what crystals do.
_DRIFT = 50e-6


@dataclass(frozen=True)
class RankTrace:
    """The file of one rank.

    Attributes:
        path: where it was read from.
        about: its ``otherData``.
        events: in the trace-event format.
    """

    path: Path
    about: dict[str, Any]
    events: list[dict[str, Any]]

    @staticmethod
    def load(path: str | Path) -> RankTrace:
        """Reads what ``Timeline.save`` or ``model.bagua.save_timeline`` wrote.

        Raises:
            InvalidArgument: it is none, with what is wrong.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path} cannot be read as a timeline: {error}") from error
        about = content.get("otherData") if isinstance(content, dict) else None
        found = about.get("format") if isinstance(about, dict) else None
        if found == _MERGED:
            raise InvalidArgument(f"{path} is merged already; name the files of the ranks, such as rank0.json")
        if found != trace.FORMAT:
            raise InvalidArgument(
                f"{path} is no timeline of a rank: its otherData.format is {found!r}, expected {trace.FORMAT!r}; "
                "model.bagua.save_timeline(folder) writes one per rank"
            )
        wrong = [name for name, kind in _ABOUT.items() if type(about.get(name)) is not kind]
        if wrong:
            raise InvalidArgument(f"{path}: otherData.{wrong[0]} is {about.get(wrong[0])!r}; save the timeline anew")
        numbers = {f"totals.{name}": about["totals"].get(name) for name in _TOTALS}
        clock = about["clock"]  # null where none was measured
        numbers["clock.uncertainty_ns"] = clock.get("uncertainty_ns") or 0
        numbers["clock.measured_ns"] = clock.get("measured_ns") if numbers["clock.uncertainty_ns"] else 0
        numbers["operations_since_us"] = about.get("operations_since_us") or 0  # null where none was dropped
        for name, number in numbers.items():
            if not _is_number(number):
                raise InvalidArgument(f"{path}: otherData.{name} is {number!r}; save the timeline anew")
        failure = about.get("failure")
        if failure is not None and not _is_failure(failure):
            raise InvalidArgument(f"{path}: otherData.failure is {failure!r}; save the timeline anew")
        events = content.get("traceEvents")
        broken = next((event for event in events if not _is_event(event)), None) if isinstance(events, list) else events
        if broken is not None or not isinstance(events, list):
            raise InvalidArgument(f"{path}: {str(broken)[:80]} is no trace event; save the timeline anew")
        return RankTrace(Path(path), about, events)

    @property
    def rank(self) -> int:
        """In the group that trained."""
        return self.about["rank"]

    @property
    def clock(self) -> str:
        """Equal for files that are on one clock: of one measurement, or of one host where none was taken."""
        return self.about["clock"].get("measurement") or self.about["boot_id"]

    @property
    def uncertainty_ns(self) -> int:
        """How far its times may be from rank 0's clock, when the clocks were compared."""
        return self.about["clock"].get("uncertainty_ns") or 0

    def uncertainty_at(self, time_ns: int) -> int:
        """The same at another time, by how far clocks may have drifted apart until then."""
        if not self.uncertainty_ns:
            return 0  # on rank 0's host
        age_ns = abs(time_ns - self.about["clock"]["measured_ns"])
        return self.uncertainty_ns + round(_DRIFT * age_ns)

    @property
    def operations_since_us(self) -> float:
        """It holds every operation that began later."""
        since_us = self.about.get("operations_since_us")
        return -math.inf if since_us is None else since_us

    def slices(self, lane: str) -> list[dict[str, Any]]:
        """The slices of one of ``trace.LANES``, all groups', in the order of time."""
        found = [event for event in self.events if event.get("cat") == lane and event["ph"] == "X"]
        return sorted(found, key=lambda event: event["ts"])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_failure(failure: Any) -> bool:
    if not isinstance(failure, dict) or not {"where", "step", "error", "rank"} <= set(failure):
        return False
    return all(_is_number(failure.get(name)) for name in ("wait_ns", "end_ns"))


def _is_event(event: Any) -> bool:
    if not isinstance(event, dict) or not {"ph", "name", "pid", "tid", "args"} <= set(event):
        return False
    times = _TIMES.get(event["ph"])
    return (
        times is not None
        and all(_is_number(event.get(name)) for name in times)
        and isinstance(event["args"], dict)
        and _ARGS.get(event.get("cat"), set()) <= set(event["args"])
    )


def load(paths: Sequence[str | Path]) -> list[RankTrace]:
    """The files of ranks that belong together, by rank.

    Raises:
        InvalidArgument: a file is no timeline, two are of one rank, or their clocks cannot be compared.
    """
    ranks = sorted((RankTrace.load(path) for path in paths), key=lambda one: one.rank)
    for one, other in itertools.pairwise(ranks):
        if one.rank == other.rank:
            raise InvalidArgument(f"{one.path} and {other.path} are both of rank {one.rank}; name one file per rank")
        if one.clock != other.clock:
            raise InvalidArgument(
                f"{one.path} and {other.path} are not on one clock: they were not saved together; call "
                "model.bagua.save_timeline(folder) on all ranks and name the files of that call"
            )
    return ranks


def merge(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """One trace with a process per rank; operations say who came last, and how long another one waited."""
    late = {latecomer.operation: latecomer for latecomer in latecomers(_arrivals(ranks))}
    events = []
    for one in ranks:
        for event in one.events:
            latecomer = late.get(_operation_of(event))
            if latecomer is not None:
                told = {"last_rank": latecomer.rank, "waited_for_it_us": latecomer.waited_ns / 1e3}
                event = {**event, "args": {**event["args"], **told}}
            events.append(event)
    about = {"format": _MERGED, "ranks": [one.about for one in ranks]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _operation_of(event: dict[str, Any]) -> tuple[str, int] | None:
    """What identifies an operation on all ranks; None for other events."""
    if event.get("cat") not in _LANES_OF_OPERATIONS:
        return None
    return event["args"].get("group"), event["args"].get("ticket")


def _times_ns(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end of a slice; rounded, because the file has microseconds as doubles."""
    begin_ns = round(event["ts"] * 1e3)
    return begin_ns, begin_ns + round(event["dur"] * 1e3)


def _arrivals(ranks: Sequence[RankTrace]) -> list[Arrival]:
    return [
        Arrival(
            _operation_of(event),
            one.rank,
            *_times_ns(event),
            one.uncertainty_at(_times_ns(event)[0]),
            event["args"].get("waits_for_some", False),
            (one.about["boot_id"], one.about["clock"].get("offset_ns")),
        )
        for one in ranks
        for lane in _LANES_OF_OPERATIONS
        for event in one.slices(lane)
    ]


def _among_some(arrivals: Sequence[Arrival]) -> set[Any]:
    """Operations in which a rank waits for its neighbours only; under a hierarchical one the nodes' leaders do."""
    return {arrival.operation for arrival in arrivals if arrival.waits_for_some}


def report(ranks: Sequence[RankTrace]) -> str:
    """The text: exposed communication and bytes by rank, the straggler, the slowest bucket."""
    about = ranks[0].about
    missing = sorted({*range(about["world_size"])} - {one.rank for one in ranks})
    lacks = f"; missing: {_ranks(missing)}" if missing else ""
    lines = [f"algorithm        {about['algorithm']}, {len(ranks)} of {about['world_size']} ranks{lacks}"]
    clocks = [f"rank {one.rank} {one.uncertainty_ns / 1e3:.0f} us" for one in ranks if one.uncertainty_ns]
    drift = f", and by {1e6 * _DRIFT:.0f} us more per second before they were compared"
    lines.append(f"clocks           {'uncertain by ' + ', '.join(clocks) + drift if clocks else 'one for all ranks'}")
    lines += [line for one in ranks if one.about.get("failure") is not None for line in _failure_lines(one)]
    lines += ["", *_table_of_ranks(ranks), "", *_covered_steps(ranks)]
    lines += [*_straggler_lines(ranks), *_slowest_bucket(ranks)]
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (" ..." if len(ranks) > _SHOWN_RANKS else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _failure_lines(one: RankTrace) -> list[str]:
    failure = one.about["failure"]
    waited_s = (failure["end_ns"] - failure["wait_ns"]) / 1e9
    blamed = "" if failure["rank"] is None else f", for which rank {failure['rank']} is to blame"
    where = f"step {failure['step']}, {failure['where']}"
    return [
        f"failed           rank {one.rank} in {where}, after it had waited {waited_s:.3f} s{blamed}:",
        f"                 {failure['error']}",
    ]


def _table_of_ranks(ranks: Sequence[RankTrace]) -> list[str]:
    """Totals and means over all steps: the median of an algorithm that exchanges every eighth step would be that of
    the others. A step's length is the median of those in the files, so that pauses between steps do not count."""
    lines = [
        "rank  host                 steps  step p50 ms  exposed ms/step  exposed total s  "
        "sent MB  sent MB/step  network MB/step"
    ]
    for one in ranks:
        totals = one.about["totals"]
        begins = [step["ts"] for step in one.slices(trace.STEPS)]
        apart = [(b - a) / 1e3 for a, b in itertools.pairwise(begins)]
        num_steps = max(1, totals["steps"])
        exposed = f"{1e3 * totals['exposed_s'] / num_steps:15.3f}  {totals['exposed_s']:15.3f}"
        sent = f"{totals['bytes_sent'] / 1e6:7.2f}  {totals['bytes_sent'] / 1e6 / num_steps:12.3f}"
        over_network = f"{totals['network_bytes_sent'] / 1e6 / num_steps:15.3f}"
        place = f"{one.rank:4d}  {one.about['host'][:20]:<20} {totals['steps']:5d}"
        lines.append(f"{place}  {_median(apart):>11}  {exposed}  {sent}  {over_network}")
    return lines


def _covered_steps(ranks: Sequence[RankTrace]) -> list[str]:
    """Which steps the operations are of, where the engines have dropped those of the first ones."""
    if all(math.isinf(one.operations_since_us) for one in ranks):
        return []
    kept = [
        [step["args"]["index"] for step in one.slices(trace.STEPS) if step["ts"] > one.operations_since_us]
        for one in ranks
    ]
    if not all(kept):
        return ["note             operations cover less than a step: the engines keep the last ones"]
    first, last = max(indices[0] for indices in kept), max(indices[-1] for indices in kept)
    if first == 0:
        return []
    return [f"note             operations cover steps {first} to {last}: the engines keep the last ones"]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else "-"


def _straggler_lines(ranks: Sequence[RankTrace]) -> list[str]:
    if len(ranks) < max(2, ranks[0].about["world_size"]):
        return ["straggler        unknown: name the files of all ranks"]
    arrivals = _arrivals(ranks)
    found = latecomers(arrivals)
    if not arrivals:
        return ["straggler        unknown: the files hold no operations"]
    among_some = _among_some(arrivals)
    num_operations = len({arrival.operation for arrival in arrivals} - among_some)
    untold = f"not told for {len(among_some)} operations, whose ranks wait for their neighbours only"
    if not num_operations:
        return [f"straggler        {untold}"]
    in_background = all(group != ranks[0].about["group"] for (group, _) in {one.operation for one in arrivals})
    caused = caused_ns(found, [one.rank for one in ranks])
    times = [arrival.begin_ns for arrival in arrivals]
    rank = straggler(caused, max(times) - min(times))
    lines = [f"straggler        {'none stands out' if rank is None else f'rank {rank}: the others wait for it'}"]
    if in_background:
        lines.append("                 (operations in the background: no step waits for them)")
    if among_some:
        lines.append(f"                 ({untold})")
    for one in ranks:
        own = [latecomer.waited_ns for latecomer in found if latecomer.rank == one.rank]
        waited = f"{caused[one.rank] / 1e6:.2f} ms for it, at one {max(own, default=0) / 1e6:.2f} ms"
        came_last = f"rank {one.rank} came last at {len(own)} of {num_operations} operations"
        lines.append(f"                 {came_last}; the others waited {waited}")
    by_step = _by_step(ranks, found)
    for (index, late), late_ns in sorted(by_step.items(), key=lambda item: -item[1])[:_SHOWN_STEPS]:
        lines.append(f"                 step {index}: {late_ns / 1e6:.2f} ms for rank {late}")
    return lines


def _by_step(ranks: Sequence[RankTrace], found: Sequence[Latecomer]) -> dict[tuple[int, int], int]:
    """Nanoseconds by step, of the late rank, and that rank."""
    waited: dict[tuple[int, int], int] = {}
    steps = {one.rank: [(*_times_ns(step), step["args"]["index"]) for step in one.slices(trace.STEPS)] for one in ranks}
    for latecomer in found:
        of_rank = steps[latecomer.rank]
        place = bisect.bisect_right(of_rank, latecomer.begin_ns, key=lambda step: step[0]) - 1
        if place >= 0 and latecomer.begin_ns <= of_rank[place][1]:
            key = (of_rank[place][2], latecomer.rank)
            waited[key] = waited.get(key, 0) + latecomer.waited_ns
    return waited


def _slowest_bucket(ranks: Sequence[RankTrace]) -> list[str]:
    """By the median duration of its operations, since the last rank came: what is left is its own doing.

    Where ranks wait for their neighbours only, since each rank itself came.
    """
    if len(ranks) < ranks[0].about["world_size"]:
        return ["slowest bucket   unknown: name the files of all ranks, for which an operation may have waited"]
    arrivals, last_ns = _arrivals(ranks), {}
    among_some = _among_some(arrivals)
    for arrival in arrivals:
        last_ns[arrival.operation] = max(last_ns.get(arrival.operation, arrival.begin_ns), arrival.begin_ns)
    durations: dict[str, list[float]] = {}
    bytes_of: dict[str, int] = {}
    since: dict[str, str] = {}
    for one in ranks:
        for event in one.slices(trace.OPERATIONS):
            name, operation, (begin_ns, end_ns) = event["name"], _operation_of(event), _times_ns(event)
            is_among_some = operation in among_some
            from_ns = begin_ns if is_among_some else last_ns[operation]
            durations.setdefault(name, []).append(max(0, end_ns - from_ns) / 1e6)
            bytes_of[name] = event["args"]["bytes"]
            since[name] = "with the wait for neighbours" if is_among_some else "from the arrival of its last rank"
    if not durations:
        return ["slowest bucket   unknown: the files hold no operations"]
    name = max(durations, key=lambda label: statistics.median(durations[label]))
    what = ranks[0].about["totals"].get("buckets", {}).get(name, "")
    return [
        f"slowest bucket   {name}{f' ({what})' if what else ''}, {bytes_of[name] / 1e6:.2f} MB: "
        f"{_median(durations[name])} ms at the median {since[name]}"
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; 0 when it has done its work, 1 when it says why not."""
    parser = argparse.ArgumentParser(prog="bagua timeline", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="one per rank, of one model.bagua.save_timeline(folder)")
    parser.add_argument("--out", type=Path, help="the merged trace, for ui.perfetto.dev or chrome://tracing")
    args = parser.parse_args(argv)
    try:
        if args.out is not None and args.out.resolve() in {path.resolve() for path in args.files}:
            raise InvalidArgument(f"--out is {args.out}, which is a rank's file and would be lost; name another one")
        ranks = load(args.files)
        print(report(ranks))
        if args.out is not None:
            trace.write(args.out, merge(ranks))
            print(f"\nwritten: {args.out}; open it at https://ui.perfetto.dev or in chrome://tracing")
    except InvalidArgument as error:
        print(f"bagua timeline: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
