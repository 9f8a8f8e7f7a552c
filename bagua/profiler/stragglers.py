"""Stragglers: the rank that came last at each operation, and how long others waited for it.

Beside the data path: arrivals of all ranks, on one clock -> **stragglers** -> report. A rank arrives at an operation
when its engine begins it: the bucket is ready, and the operations before it are done. The time that others spend in the
operation before the last rank arrives is due to that rank. Not every rank waits: the source of a broadcast sends, and
is done. Where ranks wait for their neighbours only, the last to arrive need not be the one that they waited for, so
such operations have no straggler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Arrival", "Straggler", "caused_ns", "persistent_straggler", "stragglers"]

# A rank stands out if the others waited for it so many times longer than for any other, and for this share of the time.
_TIMES_THE_NEXT = 2.0
_SHARE_OF_TIME = 0.01


@dataclass(frozen=True, slots=True)
class Arrival:
    """One rank's part in one operation.

    Attributes:
        operation: equal for the same operation on all ranks.
        begin_ns, end_ns: on rank 0's clock.
        uncertainty_ns: of both, when compared with times of other clocks.
        waits_for_some: the rank waits for its neighbours only, as on a ring.
        clock: equal for ranks that read the same clock; None where that is not known.
    """

    operation: Any
    rank: int
    begin_ns: int
    end_ns: int
    uncertainty_ns: int = 0
    waits_for_some: bool = False
    clock: Any = None


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that came last at an operation, when it came, and the longest that another rank waited for it."""

    operation: Any
    rank: int
    begin_ns: int
    waited_ns: int


def stragglers(arrivals: Iterable[Arrival]) -> list[Straggler]:
    """One for each operation of two ranks or more, in order of time.

    Operations have none where the clocks are too uncertain to tell, or where a rank waits for its neighbours only.

    Example:
        >>> stragglers([Arrival(7, 0, 100, 390), Arrival(7, 1, 350, 400), Arrival(8, 0, 400, 450)])
        [Straggler(operation=7, rank=1, begin_ns=350, waited_ns=250)]
        >>> stragglers([Arrival(7, 0, 100, 390), Arrival(7, 1, 350, 400, uncertainty_ns=300)])
        []
        >>> stragglers([Arrival("broadcast", 0, 100, 110), Arrival("broadcast", 1, 350, 360)])
        [Straggler(operation='broadcast', rank=1, begin_ns=350, waited_ns=10)]
        >>> stragglers([Arrival("ring", rank, 100 * rank, 900, waits_for_some=True) for rank in range(4)])
        []
    """
    by_operation: dict[Any, list[Arrival]] = {}
    for arrival in arrivals:
        by_operation.setdefault(arrival.operation, []).append(arrival)
    found = []
    for operation, ranks in by_operation.items():
        if any(arrival.waits_for_some for arrival in ranks):
            continue
        last = max(ranks, key=lambda arrival: arrival.begin_ns)
        first = min(ranks, key=lambda arrival: arrival.begin_ns)
        if last.begin_ns - first.begin_ns > _uncertainty_ns(first, last):
            waited_ns = max(min(last.begin_ns, one.end_ns) - one.begin_ns for one in ranks)
            found.append(Straggler(operation, last.rank, last.begin_ns, waited_ns))
    return sorted(found, key=lambda straggler: straggler.begin_ns)


def _uncertainty_ns(one: Arrival, other: Arrival) -> int:
    is_one_clock = one.clock is not None and one.clock == other.clock
    return 0 if is_one_clock else one.uncertainty_ns + other.uncertainty_ns


def caused_ns(found: Iterable[Straggler], ranks: Iterable[int]) -> dict[int, int]:
    """Returns the time that others waited for each rank, over all operations."""
    caused = dict.fromkeys(ranks, 0)
    for straggler in found:
        caused[straggler.rank] += straggler.waited_ns
    return caused


def persistent_straggler(caused: Mapping[int, int], elapsed_ns: int) -> int | None:
    """The rank that the others wait for most of the time; None if none stands out.

    Args:
        caused: by rank, as ``caused_ns``.
        elapsed_ns: the time of training that it covers.

    Example:
        >>> persistent_straggler({0: 3_000, 1: 90_000}, elapsed_ns=1_000_000)
        1
        >>> persistent_straggler({0: 80_000, 1: 90_000}, elapsed_ns=1_000_000)
    """
    by_wait = sorted(caused, key=lambda rank: caused[rank], reverse=True)
    if not by_wait or caused[by_wait[0]] < _SHARE_OF_TIME * elapsed_ns or caused[by_wait[0]] == 0:
        return None
    next_ns = caused[by_wait[1]] if len(by_wait) > 1 else 0
    return by_wait[0] if caused[by_wait[0]] >= _TIMES_THE_NEXT * next_ns else None
