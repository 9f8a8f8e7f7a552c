"""A rehearsal: one rank of many trains without the others, and what it does is written down and can be played.

Data path: none; what runs is the data path. The script has the entries of the rank's thread: its own processor time,
what the profile's device computes meanwhile, and the operations that it starts and waits for. What an operation posts,
waits for and computes is in the core (``csrc/communicator/rehearsal.cc``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import bagua
from bagua import _C, config
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument
from bagua.replay.profiles import Profile, SleepingModel
from bagua.replay.systems import optimizer_of
from bagua.simulator.network import Link, Stragglers

_COMPUTE, _START, _WAIT, _END_STEP, _BEGIN_DEVICE, _DEVICE = range(6)
_ALL_RANKS = 2**32 - 1
_TIMEOUT_S = 300.0
_WARM_UP_STEPS = 2  # after the first one buckets may be laid out anew


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a rehearsal.

    Attributes:
        what: the collective, such as "all_reduce".
        label: what it is for, such as "bucket 3".
        topology, step: whose neighbours exchange, and its step; "" for all ranks.
    """

    what: str
    label: str
    topology: str = ""
    step: int = 0


class _Script:
    """Entry by entry, what a rank's thread does; and the device of its model."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, float]] = []  # an action, with its ticket or its seconds
        self.operations: dict[int, Operation] = {}  # by ticket
        self._mark_ns = 0

    def begin_again(self) -> None:
        """Forgets what was written down."""
        self.entries, self.operations = [], {}
        self._mark_ns = time.thread_time_ns()

    def add(self, action: int, value: float = 0.0) -> None:
        """Adds an entry behind the processor time until now."""
        self.entries.append((_COMPUTE, (time.thread_time_ns() - self._mark_ns) / 1e9))
        self.entries.append((action, value))
        self._mark_ns = time.thread_time_ns()

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Does not count processor time inside."""
        spent_ns = time.thread_time_ns() - self._mark_ns
        yield
        self._mark_ns = time.thread_time_ns() - spent_ns

    def begin(self) -> None:
        self.add(_BEGIN_DEVICE)

    def work(self, seconds: float) -> None:
        self.add(_DEVICE, seconds)


class _RehearsedWork(Work):
    __slots__ = ("script",)
    script: _Script

    def wait(self, timeout: Any = None) -> None:
        self.script.add(_WAIT, self.ticket)
        with self.script.uncounted():
            super().wait(timeout)


class _Network:
    """Makes groups of which only rank 0 exists; see ``distributed.cores.Network``."""

    def __init__(self, ranks_per_host: int) -> None:
        self._ranks_per_host = ranks_per_host

    def open_core(self, name: str, ranks: list[int], rank: int) -> _C.Group:
        same_host = [self.same_node(peer, rank) for peer in ranks]
        return _C.rehearsal(name, ranks.index(rank), same_host, config.settings().thresholds)

    def report(self, cores: list[_C.Group]) -> None:
        """Does nothing: no other rank is there to be told."""

    def close_core(self, core: _C.Group) -> None:
        core.close()

    def share_memory(self, rank: int, peer: int) -> bool:
        return False

    def same_node(self, rank: int, peer: int) -> bool:
        return rank // self._ranks_per_host == peer // self._ranks_per_host


class RehearsalGroup(ProcessGroup):
    """A ProcessGroup that writes down what is started and waited for."""

    def __init__(self, hosts: int, ranks_per_host: int) -> None:
        self.script = _Script()
        self._topology = ("", 0)
        super().__init__(_Network(ranks_per_host), "rehearsal", range(hosts * ranks_per_host), 0, _TIMEOUT_S)

    @property
    def core(self) -> _C.Group:
        """The core of the collectives."""
        return self._core

    def subgroup(self, *_: Any) -> ProcessGroup:
        raise InvalidArgument("an algorithm with a group of its own, such as 'async_averaging', cannot be rehearsed")

    def all_reduce(self, *args: Any, hierarchical: bool = False, **options: Any) -> Work:
        return super().all_reduce(*args, **options, hierarchical=self._checked(hierarchical))

    def neighbor_average(self, tensor: Any, topology: str = "ring", step: int = 0, **options: Any) -> Work:
        self._checked(options.get("hierarchical", False))
        self._topology = (topology, step)
        return super().neighbor_average(tensor, topology, step, **options)

    def difference_ring_average(self, *args: Any, **options: Any) -> Work:
        self._topology = ("ring", 0)
        return super().difference_ring_average(*args, **options)

    def all_to_all(self, output: Any, input: Any, *splits: Any, **options: Any) -> Work:
        if splits and self._is_ring(splits[-1]):
            self._topology = ("ring", 0)
        return super().all_to_all(output, input, *splits, **options)

    def _is_ring(self, splits: list[int]) -> bool:
        peers = {rank for rank, split in enumerate(splits) if split and rank != self.rank}
        return peers == {1 % self.size, (self.size - 1) % self.size}

    def _checked(self, hierarchical: bool) -> bool:
        if hierarchical and len(self.nodes.members) < self.size:
            raise InvalidArgument("hierarchical=True cannot be rehearsed with several ranks per host; leave it out")
        return hierarchical

    def _submission(self, data: torch.Tensor, blocking: bool, *others: object) -> Any:
        return super()._submission(data, False, *others)  # on the worker, whose time counts by itself

    def _work(self, core_work: _C.Work, what: str, label: str = "", finish: Any = None, on: Any = None) -> Work:
        failed = self._cores.share_failure
        work = _RehearsedWork(core_work, _TIMEOUT_S, what, label, finish, failed, self.job_ranks)
        work.script = self.script
        topology, self._topology = self._topology, ("", 0)
        self.script.add(_START, work.ticket)
        self.script.operations[work.ticket] = Operation(what, label, *topology)
        return work


@dataclasses.dataclass(frozen=True)
class Simulated:
    """The times of a simulation.

    Attributes:
        step_s: mean seconds of a training step, of the slowest rank.
        waited_s: mean seconds of it in which a rank's thread waited for communication, mean over the ranks.
        link_bytes: bytes that a host's link carries out per step.
        spans: operations of rank 0, in the order of their starts: begin and end in seconds.
    """

    step_s: float
    waited_s: float
    link_bytes: float
    spans: list[tuple[Operation, float, float]]


class Rehearsed:
    """Some steps of a rank, to be played on networks. ``operations`` are theirs, in the order of their starts.

    Made by ``rehearse``.
    """

    def __init__(self, group: RehearsalGroup, num_steps: int, ranks_per_host: int) -> None:
        self.size, self.num_steps = group.size, num_steps
        self._core, self._ranks_per_host = group.core, ranks_per_host
        self._entries = group.script.entries
        self._tickets = list(group.script.operations)
        self.operations = list(group.script.operations.values())

    def play(
        self,
        link: Link,
        *,
        stragglers: Stragglers | None = None,
        repetitions: int = 1,
        slowdown: float = 1.0,
    ) -> Simulated:
        """Returns the times on a network.

        Args:
            link: of every host.
            stragglers: none by default.
            repetitions: how often the rehearsed steps are played, one after the other; stragglers differ.
            slowdown: how many times as long the hosts' processors take as this one did. The profile's times stay.

        Raises:
            InvalidArgument: a value is out of range.
        """
        if repetitions < 1:
            raise InvalidArgument(f"repetitions is {repetitions!r}, expected 1 or more")
        down = link.up if link.down is None else link.down
        costs = [
            _C.rehearsed_cost(
                self._core,
                ticket,
                self._ranks_per_host,
                link.up / 8,
                down / 8,
                link.latency,
                link.local / 8,
                link.per_message,
                slowdown,
            )
            for ticket in self._tickets
        ]
        topologies = {"": _ALL_RANKS, **{name: number for number, name in enumerate(_C.topologies())}}
        operations = [
            (seconds, topologies[operation.topology], operation.step, bytes_out)
            for (seconds, _, bytes_out), operation in zip(costs, self.operations, strict=True)
        ]
        index_of = {ticket: index for index, ticket in enumerate(self._tickets)}
        program: list[tuple[int, int, float]] = []
        for repetition in range(repetitions):
            for action, value in self._entries:
                if action in (_START, _WAIT):
                    program.append((action, index_of[int(value)] + repetition * len(operations), 0.0))
                else:
                    program.append((action, 0, value * (slowdown if action == _COMPUTE else 1.0)))
        late = stragglers or Stragglers()
        step_ends, waited, begins, ends = _C.play(
            program,
            operations * repetitions,
            self.size,
            late.sigma,
            late.seed,
            late.slow_rank,
            late.slow_factor,
            link.up / 8,
            link.burst,
        )
        num_steps = self.num_steps * repetitions
        spans = [
            (operation, begins[index * self.size], ends[index * self.size])
            for index, operation in enumerate(self.operations)
        ]
        link_bytes = sum(bytes_out for _, _, bytes_out in costs) / self.num_steps
        return Simulated(max(step_ends[-self.size :]) / num_steps, statistics.mean(waited), link_bytes, spans)


def available() -> list[str]:
    """Returns the names of the algorithms that can be rehearsed, those whose ranks step together."""
    return [name for name in bagua.algorithms.available() if bagua.algorithms.get(name).is_lockstep]


def rehearse(
    profile: Profile, algorithm: str, *, hosts: int, ranks_per_host: int = 1, steps: int = 0, **options: Any
) -> Rehearsed:
    """Runs some training steps of ``profile`` as rank 0, in memory of the model's size.

    Args:
        profile: see ``bagua bench record``.
        algorithm: its registered name.
        hosts, ranks_per_host: ranks of one host are consecutive.
        steps: to be played; by default up to where the algorithm repeats itself.
        options: of ``with_bagua``; without ``check_replicas``, a message that is sent seldom, unless they have it.

    Raises:
        InvalidArgument: the algorithm cannot be rehearsed ('async_averaging', `hierarchical` with several ranks per
            host), or a value is out of range.
    """
    for name, value, least in (("hosts", hosts, 2), ("ranks_per_host", ranks_per_host, 1), ("steps", steps, 0)):
        if type(value) is not int or value < least:
            raise InvalidArgument(f"{name} is {value!r}, expected an integer of at least {least}")
    group = RehearsalGroup(hosts, ranks_per_host)
    script = group.script
    try:
        model = SleepingModel(profile, script)
        optimizer = optimizer_of(algorithm, list(model.parameters()))
        options = {"check_replicas": False, **options}
        bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, **options)
        chosen = model.bagua.algorithm.options()
        num_steps = steps or max(chosen.get("sync_every", 1), chosen.get("interval", 1))

        def run(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
                script.add(_END_STEP)

        run(_WARM_UP_STEPS)
        script.begin_again()
        run(num_steps)
        rehearsed = Rehearsed(group, num_steps, ranks_per_host)
        model.bagua.remove()
    finally:
        group.close()
    return rehearsed
