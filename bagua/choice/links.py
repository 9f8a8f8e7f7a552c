"""Measures what is between ranks while they train: the link of a host, as ``bagua.simulator.Link`` has it, and pairs.

Beside the data path; operations of the group itself, between two steps. All of it is collective.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bagua.distributed.devices import wait_for_current_stream
from bagua.distributed.process_group import ProcessGroup

if TYPE_CHECKING:
    from bagua.simulator import Link

_SMALL_BYTES, _NUM_SMALL = 8, 20
_LEAST_BYTES, _FIRST_BYTES, _MOST_BYTES = 4 << 10, 32 << 10, 64 << 20
_NUM_LARGE = 5
_REST_S = 0.1  # in which a link saves up what it may carry at once
_SAVES_UP = 0.2  # it does if more than this part of a message goes at once after it
_SPIN_S, _NUM_SPINS = 0.004, 3
_PINGS, _PROBE_BYTES, _BULK_S, _BULKS = 200, 256 << 10, 0.1, 5


@dataclasses.dataclass(frozen=True)
class Network:
    """The network of a group, as all of its ranks use it at once.

    Attributes:
        hosts, ranks_per_host: ranks of one host, if all are there, count as hosts of their own.
        link: of each of the hosts.
        slowdown: how many times as long the processors take while all ranks compute, because they share cores.
    """

    hosts: int
    ranks_per_host: int
    link: Link
    slowdown: float


def measure_network(group: ProcessGroup, device: torch.device, limit_s: float) -> Network:
    """Sends messages around a ring of hosts, of all ranks at once; collective.

    Args:
        group: of two ranks or more.
        device: where the tensors are.
        limit_s: about how many seconds it may take; the least is some tens of milliseconds.
    """
    from bagua.simulator import Link

    nodes = group.nodes.members
    is_even = len(nodes) > 1 and len({len(node) for node in nodes}) == 1
    hosts = len(nodes) if is_even else group.size
    ranks_per_host = len(nodes[0]) if is_even else 1
    rings = list(zip(*nodes, strict=True)) if is_even else [tuple(range(group.size))]
    around = _Ring(group, next(ring for ring in rings if group.rank in ring), device)
    latency = statistics.median(around.seconds(_SMALL_BYTES) for _ in range(_NUM_SMALL))
    latency = min(group.all_gather_plain(latency))
    rate, burst = _rate(around, latency, limit_s)
    local = {}
    if ranks_per_host > 1:
        inside = _Ring(group, next(node for node in nodes if group.rank in node), device)
        local = {"local": 8 * ranks_per_host * _rate(inside, 0.0, limit_s / 4)[0]}
    link = Link(up=8 * rate * ranks_per_host, latency=latency, burst=burst * ranks_per_host, **local)
    return Network(hosts, ranks_per_host, link, max(group.all_gather_plain(_slowdown(group))))


class _Ring:
    """Ranks of which each sends to the next one, all at the same time."""

    def __init__(self, group: ProcessGroup, ranks: Sequence[int], device: torch.device) -> None:
        place = ranks.index(group.rank)
        self.group = group
        self._next, self._previous = ranks[(place + 1) % len(ranks)], ranks[place - 1]
        self._device = device
        self._memory = torch.zeros(2 * _FIRST_BYTES, dtype=torch.uint8, device=device)

    def seconds(self, num_bytes: int) -> float:
        """Returns how long a message to the next rank and one from the previous took."""
        if self._memory.numel() < 2 * num_bytes:
            self._memory = torch.zeros(2 * num_bytes, dtype=torch.uint8, device=self._device)
        splits = [[0] * self.group.size, [0] * self.group.size]
        splits[0][self._previous] = splits[1][self._next] = num_bytes
        begin = time.perf_counter()
        self.group.all_to_all(self._memory[:num_bytes], self._memory[num_bytes : 2 * num_bytes], *splits).wait()
        if self._device.type != "cpu":
            wait_for_current_stream(self._device)
        return time.perf_counter() - begin

    def agreed_seconds(self, num_bytes: int) -> float:
        """Returns the same on the slowest rank; all begin together."""
        self.group.barrier(blocking=True).wait()
        return max(self.group.all_gather_plain(self.seconds(num_bytes)))


def _rate(ring: _Ring, latency: float, limit_s: float) -> tuple[float, float]:
    """Returns the bytes per second that each rank sends and receives, and the bytes that a rest saves up for it."""
    part_s = limit_s / 16
    num_bytes = _FIRST_BYTES
    ring.agreed_seconds(num_bytes)  # it may open connections
    # The bytes that a link has saved up go at once, so the first message that takes time is little longer than that.
    while (took_s := ring.agreed_seconds(num_bytes)) < part_s and num_bytes < _MOST_BYTES:
        num_bytes *= 2
    num_bytes = min(_MOST_BYTES, max(_LEAST_BYTES, int(num_bytes * part_s / took_s)))
    busy_s = statistics.median(ring.agreed_seconds(num_bytes) for _ in range(_NUM_LARGE))
    rate = num_bytes / (busy_s - min(latency, busy_s / 2))
    rest_s = min(_REST_S, 2 * part_s)
    num_bytes = min(_MOST_BYTES, int(2 * rest_s * rate))
    time.sleep(rest_s)
    at_once = num_bytes - rate * (ring.agreed_seconds(num_bytes) - latency)
    return rate, at_once if at_once > _SAVES_UP * num_bytes else 0.0


def _slowdown(group: ProcessGroup) -> float:
    """Returns the time that this thread's work takes while all ranks work, over its processor time."""
    ratios = []
    for _ in range(_NUM_SPINS):
        group.barrier(blocking=True).wait()
        begin, worked = time.perf_counter(), time.thread_time()
        while time.thread_time() - worked < _SPIN_S:
            pass
        ratios.append((time.perf_counter() - begin) / (time.thread_time() - worked))
    return max(1.0, statistics.median(ratios))


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two ranks: seconds one way of 8 bytes, median and 99 of 100; bytes per second of messages that take a tenth of a
    second, median and least of five.
    """

    latency_p50_s: float
    latency_p99_s: float
    rate_p50: float
    rate_least: float


def measure_pair(group: ProcessGroup, peer: int, is_first: bool) -> Pair:
    """Sends messages to and fro between this rank and ``peer``, which calls it too; one of them is the first."""

    def round_trip(tensor: torch.Tensor) -> float:
        begin = time.perf_counter()
        for sends in (is_first, not is_first):
            (group.send(tensor, peer) if sends else group.recv(tensor, peer)).wait()
        return time.perf_counter() - begin

    small, probe = (torch.zeros(size, dtype=torch.uint8, device="cpu") for size in (_SMALL_BYTES, _PROBE_BYTES))
    round_trip(small), round_trip(probe)  # connect and touch the memory
    ways = sorted(round_trip(small) / 2 for _ in range(_PINGS))
    probed = 2 * _PROBE_BYTES / round_trip(probe)
    num_bytes = torch.tensor([min(_MOST_BYTES, max(_PROBE_BYTES, int(_BULK_S * probed)))], device="cpu")
    (group.send(num_bytes, peer) if is_first else group.recv(num_bytes, peer)).wait()
    large = torch.zeros(int(num_bytes), dtype=torch.uint8, device="cpu")
    round_trip(large)
    rates = sorted(2 * large.numel() / round_trip(large) for _ in range(_BULKS))
    return Pair(ways[len(ways) // 2], ways[len(ways) * 99 // 100], rates[len(rates) // 2], rates[0])
