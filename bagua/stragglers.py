"""Who waited for whom: the rank that came last at each operation.

Beside the data path: arrivals of all ranks, on one clock -> **latecomers** -> report. A rank arrives at an operation
when its engine begins with it: the bucket is ready, and the operations before it are done. An operation cannot end
before its last rank has come, so what the first one waited until then is that rank's doing.
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
    """A rank begins with an operation.

    Attributes:
        operation: equal for the same operation on all ranks.
        begin_ns: on rank 0's clock.
        uncertainty_ns: of ``begin_ns``.
    """

    operation: Any
    rank: int
    begin_ns: int
    uncertainty_ns: int = 0


@dataclass(frozen=True, slots=True)
class Latecomer:
    """The rank that came last at an operation, and how much later than the first one."""

    operation: Any
    rank: int
    begin_ns: int
    late_ns: int


def latecomers(arrivals: Iterable[Arrival]) -> list[Latecomer]:
    """One for each operation of two ranks or more, in the order of time; without those that the clocks cannot tell.

    Example:
        >>> latecomers([Arrival(7, 0, 100), Arrival(7, 1, 350), Arrival(8, 0, 400)])
        [Latecomer(operation=7, rank=1, begin_ns=350, late_ns=250)]
        >>> latecomers([Arrival(7, 0, 100), Arrival(7, 1, 350, uncertainty_ns=300)])
        []
    """
    by_operation: dict[Any, list[Arrival]] = {}
    for arrival in arrivals:
        by_operation.setdefault(arrival.operation, []).append(arrival)
    found = []
    for operation, ranks in by_operation.items():
        first, last = (choose(ranks, key=lambda arrival: arrival.begin_ns) for choose in (min, max))
        late_ns = last.begin_ns - first.begin_ns
        if late_ns > first.uncertainty_ns + last.uncertainty_ns:
            found.append(Latecomer(operation, last.rank, last.begin_ns, late_ns))
    return sorted(found, key=lambda latecomer: latecomer.begin_ns)


def caused_ns(found: Iterable[Latecomer], ranks: Iterable[int]) -> dict[int, int]:
    """By rank, how long the first one waited for it, over all operations."""
    caused = dict.fromkeys(ranks, 0)
    for latecomer in found:
        caused[latecomer.rank] += latecomer.late_ns
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
