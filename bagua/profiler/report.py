"""The report of `bagua timeline`: merges the traces of several ranks, and says in words what they show.

Beside the data path: files of ``model.bagua.save_timeline`` -> **one trace, one text**. Times in the files are on rank
0's clock already; this file checks that they come from one measurement.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.errors import InvalidArgument
from bagua.profiler import chrome_trace
from bagua.profiler.rank_trace import DRIFT, MERGED, OPERATION_TRACKS, RankTrace
from bagua.profiler.stragglers import Arrival, Straggler, caused_ns, persistent_straggler, stragglers

__all__ = ["load", "merge", "report"]

_SHOWN_STEPS = 3
_SHOWN_RANKS = 16


def load(paths: Sequence[str | Path]) -> list[RankTrace]:
    """The files of ranks that belong together, by rank.

    Raises:
        InvalidArgument: a file is not a timeline; two are of one rank, of two groups, or on clocks that were not
            compared.
    """
    ranks = sorted((RankTrace.load(path) for path in paths), key=lambda one: one.rank)
    for one, other in itertools.pairwise(ranks):
        if one.rank == other.rank:
            raise InvalidArgument(f"{one.path} and {other.path} are both of rank {one.rank}; name one file per rank")
        for name in ("group", "world_size"):
            if one.about[name] != other.about[name]:
                raise InvalidArgument(
                    f"{one.path} and {other.path} are of different groups: {name} is {one.about[name]!r} and "
                    f"{other.about[name]!r}; name the files of one call of model.bagua.save_timeline(folder)"
                )
        if one.clock != other.clock:
            raise InvalidArgument(
                f"{one.path} and {other.path} are on different clocks: they were not saved together; call "
                "model.bagua.save_timeline(folder) on all ranks and name the files of that call"
            )
    return ranks


def merge(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """One trace with a process per rank; operations have the rank that came last, and how long others waited for it."""
    found = {straggler.operation: straggler for straggler in stragglers(_arrivals(ranks))}
    events = []
    for one in ranks:
        for event in one.events:
            straggler = found.get(_operation_of(event))
            if straggler is not None:
                last = {"last_rank": straggler.rank, "waited_for_it_us": straggler.waited_ns / 1e3}
                event = {**event, "args": {**event["args"], **last}}
            events.append(event)
    about = {"format": MERGED, "ranks": [one.about for one in ranks]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _operation_of(event: dict[str, Any]) -> tuple[str, int] | None:
    """Returns the key of an operation on all ranks; None for other events."""
    if event.get("cat") not in OPERATION_TRACKS:
        return None
    return event["args"].get("group"), event["args"].get("ticket")


def _times_ns(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end of a slice; rounded, because the file has microseconds as floating-point numbers."""
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
        for track in OPERATION_TRACKS
        for event in one.slices(track)
    ]


def _among_some(arrivals: Sequence[Arrival]) -> set[Any]:
    """Operations in which a rank waits for its neighbours only; in a hierarchical one, a leader for other leaders."""
    return {arrival.operation for arrival in arrivals if arrival.waits_for_some}


def report(ranks: Sequence[RankTrace]) -> str:
    """The text: exposed communication and bytes by rank, the straggler, the slowest bucket."""
    about = ranks[0].about
    present = {one.rank for one in ranks}
    absent = (rank for rank in range(about["world_size"]) if rank not in present)
    missing = list(itertools.islice(absent, _SHOWN_RANKS + 1))
    lacks = f"; missing: {_ranks(missing)}" if missing else ""
    lines = [f"algorithm        {about['algorithm']}, {len(ranks)} of {about['world_size']} ranks{lacks}"]
    clocks = [f"rank {one.rank} {one.uncertainty_ns / 1e3:.0f} us" for one in ranks if one.uncertainty_ns]
    drift = f", and by {1e6 * DRIFT:.0f} us more per second before they were compared"
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
    rank = failure.get("rank")
    blamed = "" if rank is None else f", for which rank {rank} is to blame"
    where = f"step {failure['step']}, {failure['where']}"
    return [
        f"failed           rank {one.rank} in {where}, after it had waited {waited_s:.3f} s{blamed}:",
        f"                 {failure['error']}",
    ]


def _table_of_ranks(ranks: Sequence[RankTrace]) -> list[str]:
    """Totals, and means over all steps: with an algorithm that communicates in every eighth step only, a median would
    show the others. The length of a step is the median of those in the files, so that pauses do not count."""
    lines = [
        "rank  host                 steps  step p50 ms  exposed ms/step  exposed total s  "
        "sent MB  sent MB/step  network MB/step"
    ]
    for one in ranks:
        totals = one.about["totals"]
        begins = [step["ts"] for step in one.slices(chrome_trace.STEPS)]
        apart = [(b - a) / 1e3 for a, b in itertools.pairwise(begins)]
        num_steps = max(1, totals["steps"])
        exposed = f"{1e3 * totals['exposed_s'] / num_steps:15.3f}  {totals['exposed_s']:15.3f}"
        sent = f"{totals['bytes_sent'] / 1e6:7.2f}  {totals['bytes_sent'] / 1e6 / num_steps:12.3f}"
        over_network = f"{totals['network_bytes_sent'] / 1e6 / num_steps:15.3f}"
        rank = f"{one.rank:4d}  {one.about['host'][:20]:<20} {totals['steps']:5d}"
        lines.append(f"{rank}  {_median(apart):>11}  {exposed}  {sent}  {over_network}")
    return lines


def _covered_steps(ranks: Sequence[RankTrace]) -> list[str]:
    """Returns the steps of the operations, where the engines have dropped those of earlier steps."""
    if all(math.isinf(one.operations_since_us) for one in ranks):
        return []
    kept = [
        [step["args"]["index"] for step in one.slices(chrome_trace.STEPS) if step["ts"] > one.operations_since_us]
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
    found = stragglers(arrivals)
    if not arrivals:
        return ["straggler        unknown: the files hold no operations"]
    among_some = _among_some(arrivals)
    num_operations = len({arrival.operation for arrival in arrivals} - among_some)
    unknown = f"not known for {len(among_some)} operations, whose ranks wait for their neighbours only"
    if not num_operations:
        return [f"straggler        {unknown}"]
    subgroup = f"{ranks[0].about['group']}/"
    in_background = all(group.startswith(subgroup) for group, _ in {one.operation for one in arrivals})
    caused = caused_ns(found, [one.rank for one in ranks])
    times = [arrival.begin_ns for arrival in arrivals]
    rank = persistent_straggler(caused, max(times) - min(times))
    lines = [f"straggler        {'none stands out' if rank is None else f'rank {rank}: the others wait for it'}"]
    if in_background:
        lines.append("                 (operations in the background: no step waits for them)")
    if among_some:
        lines.append(f"                 ({unknown})")
    for one in ranks:
        own = [straggler.waited_ns for straggler in found if straggler.rank == one.rank]
        waited = f"{caused[one.rank] / 1e6:.2f} ms for it, at one {max(own, default=0) / 1e6:.2f} ms"
        came_last = f"rank {one.rank} came last at {len(own)} of {num_operations} operations"
        lines.append(f"                 {came_last}; the others waited {waited}")
    by_step = _by_step(ranks, found)
    for (index, rank), waited_ns in sorted(by_step.items(), key=lambda item: -item[1])[:_SHOWN_STEPS]:
        lines.append(f"                 step {index}: {waited_ns / 1e6:.2f} ms for rank {rank}")
    return lines


def _by_step(ranks: Sequence[RankTrace], found: Sequence[Straggler]) -> dict[tuple[int, int], int]:
    """Nanoseconds that others waited for a rank, by (step of that rank, rank)."""
    waited: dict[tuple[int, int], int] = {}
    steps = {
        one.rank: [(*_times_ns(step), step["args"]["index"]) for step in one.slices(chrome_trace.STEPS)]
        for one in ranks
    }
    for straggler in found:
        of_rank = steps[straggler.rank]
        index = bisect.bisect_right(of_rank, straggler.begin_ns, key=lambda step: step[0]) - 1
        if index >= 0 and straggler.begin_ns <= of_rank[index][1]:
            key = (of_rank[index][2], straggler.rank)
            waited[key] = waited.get(key, 0) + straggler.waited_ns
    return waited


def _slowest_bucket(ranks: Sequence[RankTrace]) -> list[str]:
    """Ranks by the median duration of its operations after the last rank has come: the bucket's own time.

    Where ranks wait for their neighbours only, after each rank itself has come.
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
        for event in one.slices(chrome_trace.OPERATIONS):
            name, operation, (begin_ns, end_ns) = event["name"], _operation_of(event), _times_ns(event)
            is_among_some = operation in among_some
            from_ns = begin_ns if is_among_some else last_ns[operation]
            durations.setdefault(name, []).append(max(0, end_ns - from_ns) / 1e6)
            bytes_of[name] = event["args"]["bytes"]
            since[name] = "with the wait for neighbours" if is_among_some else "from the arrival of its last rank"
    if not durations:
        return ["slowest bucket   unknown: the files hold no operations"]
    name = max(durations, key=lambda label: statistics.median(durations[label]))
    what = (ranks[0].about["totals"].get("buckets") or {}).get(name, "")
    return [
        f"slowest bucket   {name}{f' ({what})' if what else ''}, {bytes_of[name] / 1e6:.2f} MB: "
        f"{_median(durations[name])} ms at the median {since[name]}"
    ]
