"""Who waited for whom: the rank that came last at each operation.

Beside the data path: arrivals of all ranks, on one clock -> **latecomers** -> report. A rank arrives at an operation
when its engine begins with it: the bucket is ready, and the operations before it are done. What the others spend in the
operation until the last rank has come is that rank's doing. Not all need to wait: the source of a broadcast sends, and
is done. Where ranks wait for their neighbours only, the last one need not be the one that they waited for: such
operations are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Arrival", "Latecomer", "caused_ns", "latecomers", "straggler"]

# A rank stands out when the others waited for it this much longer than for anyone else, and this share of their time.
_TIMES_THE_NEXT = 2.0
_SHARE_OF_TIME = 0.01


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank takes part in an operation.

    Attributes:
        operation: equal for the same operation on all ranks.
        begin_ns, end_ns: on rank 0's clock.
        uncertainty_ns: of both, beside the times of other clocks.
        waits_for_some: the rank waits for its neighbours only, as on a ring.
        clock: equal for ranks that read one clock; None where that is not known.
    """

    operation: Any
    rank: int
    begin_ns: int
    end_ns: int
    uncertainty_ns: int = 0
    waits_for_some: bool = False
    clock: Any = None


@dataclass(frozen=True, slots=True)
class Latecomer:
    """The rank that came last at an operation, when it came, and how long at most another one waited for it."""

    operation: Any
    rank: int
    begin_ns: int
    waited_ns: int


def latecomers(arrivals: Iterable[Arrival]) -> list[Latecomer]:
    """One for each operation of two ranks or more, in the order of time.

    Without those that the clocks cannot tell, and those in which a rank waits for some of the others only.

    Example:
        >>> latecomers([Arrival(7, 0, 100, 390), Arrival(7, 1, 350, 400), Arrival(8, 0, 400, 450)])
        [Latecomer(operation=7, rank=1, begin_ns=350, waited_ns=250)]
        >>> latecomers([Arrival(7, 0, 100, 390), Arrival(7, 1, 350, 400, uncertainty_ns=300)])
        []
        >>> latecomers([Arrival("broadcast", 0, 100, 110), Arrival("broadcast", 1, 350, 360)])
        [Latecomer(operation='broadcast', rank=1, begin_ns=350, waited_ns=10)]
        >>> latecomers([Arrival("ring", rank, 100 * rank, 900, waits_for_some=True) for rank in range(4)])
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
            found.append(Latecomer(operation, last.rank, last.begin_ns, waited_ns))
    return sorted(found, key=lambda latecomer: latecomer.begin_ns)


def _uncertainty_ns(one: Arrival, other: Arrival) -> int:
    is_one_clock = one.clock is not None and one.clock == other.clock
    return 0 if is_one_clock else one.uncertainty_ns + other.uncertainty_ns


def caused_ns(found: Iterable[Latecomer], ranks: Iterable[int]) -> dict[int, int]:
    """By rank, how long another one waited for it, over all operations."""
    caused = dict.fromkeys(ranks, 0)
    for latecomer in found:
        caused[latecomer.rank] += latecomer.waited_ns
    return caused


def straggler(caused: Mapping[int, int], elapsed_ns: int) -> int | None:
    """The rank that the others wait for; None if none stands out.

    Args:
        caused: by rank, as ``caused_ns``.
        elapsed_ns: the time of training in which it was.

    Example:
        >>> straggler({0: 3_000, 1: 90_000}, elapsed_ns=1_000_000), straggler({0: 80_000, 1: 90_000}, 1_000_000)
        (1, None)
    """
    by_wait = sorted(caused, key=lambda rank: caused[rank], reverse=True)
    if not by_wait or caused[by_wait[0]] < _SHARE_OF_TIME * elapsed_ns or caused[by_wait[0]] == 0:
        return None
    next_ns = caused[by_wait[1]] if len(by_wait) > 1 else 0
    return by_wait[0] if caused[by_wait[0]] >= _TIMES_THE_NEXT * next_ns else None
