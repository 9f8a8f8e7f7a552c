"""The offset of this rank's clock from rank 0's, so that the ranks' timelines can be laid side by side.

Beside the data path. The leader of each node asks rank 0 for the time in several rounds. Rank 0 reads its clock between
the request and the answer, so the shortest round bounds the offset best (Cristian, "Probabilistic clock
synchronization", 1989). Ranks of one node share the kernel's CLOCK_MONOTONIC, so they share their leader's offset,
and those of rank 0's node have none. Cost: per node a connection and ROUNDS round trips, one node after the other.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bagua.distributed.process_group import ProcessGroup

__all__ = ["ROUNDS", "ClockOffset", "estimate", "measure"]

ROUNDS = 32


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """The nanoseconds to add to a time of this rank to have it on rank 0's clock.

    Attributes:
        offset_ns: the estimate.
        uncertainty_ns: the largest possible error of the estimate at the time of the measurement. Clocks of different
            hosts drift apart, so it is larger for times long before.
        measured_ns: when it was measured, on rank 0's clock.
        measurement: the same on all ranks that measured together.
    """

    offset_ns: int
    uncertainty_ns: int
    measured_ns: int
    measurement: str = ""


def estimate(ask: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns, rounds: int = ROUNDS) -> ClockOffset:
    """The offset to the clock that ``ask()`` reads, in nanoseconds; half the shortest round trip is the uncertainty.

    Example:
        >>> ticks = iter([0, 90, 100, 110, 200, 260])                 # rounds that take 90, 10 and 60 ns
        >>> answers = iter([1070, 1106, 1215])
        >>> estimate(lambda: next(answers), lambda: next(ticks), 3)
        ClockOffset(offset_ns=1001, uncertainty_ns=5, measured_ns=1106, measurement='')
    """
    best = None
    for _ in range(rounds):
        asked_ns = clock()
        answer_ns = ask()
        heard_ns = clock()
        if best is None or heard_ns - asked_ns < best[1] - best[0]:
            best = (asked_ns, heard_ns, answer_ns)
    asked_ns, heard_ns, answer_ns = best
    return ClockOffset(answer_ns - (asked_ns + heard_ns) // 2, (heard_ns - asked_ns + 1) // 2, answer_ns)


def measure(group: ProcessGroup, clock: Callable[[], int] = time.monotonic_ns) -> ClockOffset:
    """This rank's offset to rank 0 of ``group``; collective.

    Args:
        clock: this rank's, in nanoseconds.

    Raises:
        BaguaError: a rank has failed, or does not take part within the group's timeout.
    """
    mine = ClockOffset(0, 0, clock(), secrets.token_hex(8) if group.rank == 0 else "")
    for leader in group.nodes.leaders[1:]:
        if group.rank == leader:
            mine = _ask_rank_0(group, leader, clock)
        elif group.rank == 0:
            _answer(group, leader, clock)
    everyone = [ClockOffset(*of_rank) for of_rank in group.all_gather_plain(dataclasses.astuple(mine))]
    of_node = everyone[group.nodes.node_of(group.rank)[0]]
    return dataclasses.replace(of_node, measurement=everyone[0].measurement)


def _ask_rank_0(group: ProcessGroup, leader: int, clock: Callable[[], int]) -> ClockOffset:
    pair = _pair(group, leader)
    message = torch.zeros(1, dtype=torch.int64, device="cpu")

    def ask() -> int:
        pair.broadcast(message, 1, blocking=True).wait()
        pair.broadcast(message, 0, blocking=True).wait()
        return int(message)

    try:
        return estimate(ask, clock)
    finally:
        pair.close()


def _answer(group: ProcessGroup, leader: int, clock: Callable[[], int]) -> None:
    pair = _pair(group, leader)
    message = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        for _ in range(ROUNDS):
            pair.broadcast(message, 1, blocking=True).wait()
            message[0] = clock()
            pair.broadcast(message, 0, blocking=True).wait()
    finally:
        pair.close()


def _pair(group: ProcessGroup, leader: int) -> ProcessGroup:
    """A group of its own, so that nothing else that the two send delays an answer or is mistaken for one."""
    return group.subgroup(f"clock-{leader}", [0, leader], group.timeout)
