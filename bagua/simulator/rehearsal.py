"""A rehearsal: one rank of many trains without the others, and what it does is written down and can be played.

Data path: none; what runs is the data path. The script has the entries of the rank's thread: its own processor time,
what the profile's device computes meanwhile, and the operations that it starts and waits for. What an operation posts,
waits for and computes is in the core (``csrc/communicator/rehearsal.cc``).
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import bagua
from bagua import _C, config
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument
from bagua.files import replace_file
from bagua.replay.profiles import Profile, SleepingModel
from bagua.replay.systems import optimizer_of
from bagua.simulator import chakra
from bagua.simulator.network import Link, Stragglers

_COMPUTE, _START, _WAIT, _END_STEP, _BEGIN_DEVICE, _DEVICE = range(6)
_ALL_RANKS = 2**32 - 1
_TIMEOUT_S = 300.0
_SMALL_BYTES = 1 << 20  # above every threshold of a small all_reduce
_WARM_UP_STEPS = 2  # after the first one buckets may be laid out anew
# Collectives in which every rank does the same, so that one can stand for all.
_SYMMETRIC = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "neighbor_average", "difference_ring_average")
_WARM_UPS = ("warmup_steps", "post_local_after")  # options of algorithms
# Options with which an algorithm soon does what it does for most of a long training.
_LATER = {"zero_one_adam": {"interval_doubling": 1}}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a rehearsal.

    Attributes:
        what: the collective, such as "all_reduce".
        label: what it is for, such as "bucket 3".
        topology, step: whose neighbours exchange, and its step; "" for all ranks.
        num_bytes: of a rank's tensor, in its codec if it has one; of neighbours of a message to one of them.
    """

    what: str
    label: str
    topology: str = ""
    step: int = 0
    num_bytes: int = 0


class _Script:
    """Entry by entry, what a rank's thread does; and the device of its model."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, float]] = []  # an action, with its ticket or its seconds
        self.operations: dict[int, Operation] = {}  # by ticket
        self.is_kept = False
        self._mark_ns = 0

    def begin_again(self) -> None:
        """Forgets what was written down; from here on it is kept, to be played."""
        self.entries, self.operations, self.is_kept = [], {}, True
        self._mark_ns = time.thread_time_ns()

    def add(self, action: int, value: float = 0.0) -> None:
        """Adds an entry behind the processor time until now."""
        self.entries.append((_COMPUTE, (time.thread_time_ns() - self._mark_ns) / 1e9))
        self.entries.append((action, value))
        self._mark_ns = time.thread_time_ns()

    def begin(self) -> None:
        self.add(_BEGIN_DEVICE)

    def work(self, seconds: float) -> None:
        self.add(_DEVICE, seconds)


class _RehearsedWork(Work):
    __slots__ = ("script",)
    script: _Script

    def wait(self, timeout: Any = None) -> None:
        self.script.add(_WAIT, self.ticket)
        super().wait(timeout)  # whose processor time counts, and not what it waits


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

    is_rehearsal = True

    def __init__(self, hosts: int, ranks_per_host: int) -> None:
        self.script = _Script()
        self._topology = ("", 0)
        network, ranks = _Network(ranks_per_host), range(hosts * ranks_per_host)
        super().__init__(network, "rehearsal", ranks, 0, _TIMEOUT_S)
        # With small tensors, and ranks that are no power of two, rank 0 has the least to do and rank 1 the most.
        self._busiest = ProcessGroup(network, "busiest", ranks, 1, _TIMEOUT_S) if self.size & (self.size - 1) else None
        self._instead: dict[int, int] = {}  # tickets there, by ticket

    def priced_at(self, ticket: int) -> tuple[_C.Group, int]:
        """Returns the core whose operation has the time of this one, and its ticket there."""
        if ticket in self._instead and self._busiest is not None:
            return self._busiest._core, self._instead[ticket]
        return self._core, ticket

    def close(self) -> None:
        super().close()
        if self._busiest is not None:
            self._busiest.close()

    def subgroup(self, *_: Any) -> ProcessGroup:
        raise InvalidArgument("an algorithm with a group of its own, such as 'async_averaging', cannot be rehearsed")

    def all_reduce(self, tensor: Any, *args: Any, hierarchical: bool = False, **options: Any) -> Work:
        work = super().all_reduce(tensor, *args, **options, hierarchical=self._checked(hierarchical))
        if self._busiest is not None and options.get("codec") is None and tensor.nbytes <= _SMALL_BYTES:
            twin = self._busiest.all_reduce(torch.zeros_like(tensor))
            twin.wait()
            self._instead[work.ticket] = twin.ticket
        return work

    def neighbor_average(self, tensor: Any, topology: str = "ring", step: int = 0, **options: Any) -> Work:
        self._checked(options.get("hierarchical", False))
        if self.script.is_kept and topology in ("shift_one", "matching") and self.size % 2:
            raise InvalidArgument(
                f"topology {topology!r} leaves one of {self.size} ranks out in each step, and the one that rehearses "
                "stands for all; take an even number of ranks"
            )
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
        if self.script.is_kept and what not in _SYMMETRIC:
            raise InvalidArgument(
                f"the training calls {what}, in which ranks do different things, and one rehearses for all; leave out "
                "the option or the algorithm that calls it"
            )
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


def _peers(operation: Operation, size: int, rank: int) -> tuple[list[int], list[int]]:
    """Returns the neighbours that a rank sends to in a step of a topology, and those that it receives from."""
    return _C.topology_peers(_C.topologies().index(operation.topology), size, rank, operation.step)


class Rehearsed:
    """Some steps of a rank, to be played on networks. ``operations`` are theirs, in the order of their starts.

    Made by ``rehearse``.
    """

    def __init__(self, group: RehearsalGroup, num_steps: int, ranks_per_host: int) -> None:
        """Takes the second half of the group's script, 2 ``num_steps`` steps, which may wait for what began in the
        first half."""
        script = group.script
        self.size, self.num_steps, self._ranks_per_host = group.size, num_steps, ranks_per_host
        ends = [place for place, (action, _) in enumerate(script.entries) if action == _END_STEP]
        self._entries = script.entries[ends[num_steps - 1] + 1 : ends[-1] + 1]
        tickets = list(script.operations)
        started = {int(value) for action, value in self._entries if action == _START}
        mine = [ticket for ticket in tickets if ticket in started]
        self._place_of = (
            {ticket: place - tickets.index(mine[0]) for place, ticket in enumerate(tickets)} if mine else {}
        )
        sizes = {event.ticket: (event.bytes, event.bytes_sent) for event in group.events(parts=False)}
        self.operations = [self._sized(script.operations[ticket], *sizes[ticket]) for ticket in mine]
        self._priced_at = [group.priced_at(ticket) for ticket in mine]

    def _sized(self, operation: Operation, num_bytes: int, bytes_sent: int) -> Operation:
        if operation.topology:
            targets, _ = _peers(operation, self.size, 0)
            num_bytes = bytes_sent // max(1, len(targets))
        elif operation.what == "all_reduce":  # every element leaves twice, but for the part that a rank reduces itself
            num_bytes = min(num_bytes, round(bytes_sent * self.size / (2 * (self.size - 1))))
        return dataclasses.replace(operation, num_bytes=num_bytes)

    def save_chakra(self, prefix: str | Path) -> list[Path]:
        """Writes the steps as Chakra execution traces, ``<prefix>.<rank>.et`` for each rank, for other simulators.

        Collectives are whole: a simulator that reads them has algorithms of its own. Returns the paths.
        """
        paths = [Path(f"{prefix}.{rank}.et") for rank in range(self.size)]
        for rank, path in enumerate(paths):
            replace_file(path, chakra.encoded(self._nodes(rank), rank))
        return paths

    def _nodes(self, rank: int) -> list[chakra.Node]:
        nodes: list[chakra.Node] = []
        thread: list[int] = []  # what the thread's next node comes after
        worker: list[int] = []
        place_of: dict[int, int] = {}  # of an operation's node, by ticket
        for action, value in self._entries:
            if action in (_COMPUTE, _DEVICE) and value > 0:
                nodes.append(chakra.Node("compute", thread, seconds=value))
                thread = [len(nodes) - 1]
            elif action == _START:
                operation = self.operations[len(place_of)]
                targets, sources = _peers(operation, self.size, rank) if operation.topology else ([], [])
                what = "" if operation.topology else operation.what
                name = operation.label or operation.what
                after = sorted({*thread, *worker})
                nodes.append(
                    chakra.Node(name, after, None, what, operation.num_bytes, targets=targets, sources=sources)
                )
                place_of[int(value)] = len(nodes) - 1
                worker = [len(nodes) - 1]
            elif action == _WAIT and int(value) in place_of:
                thread = [*thread, place_of[int(value)]]
        return nodes

    def play(
        self,
        link: Link,
        *,
        stragglers: Stragglers | None = None,
        repetitions: int = 1,
        slowdown: float = 1.0,
    ) -> Simulated:
        """Returns the times on a network, once the same steps have been played before.

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
        rates = [rate / 8 for rate in (link.up, link.up if link.down is None else link.down)]
        network = (self._ranks_per_host, *rates, link.latency, link.local / 8, link.per_message, slowdown)
        costs = [_C.rehearsed_cost(core, ticket, *network) for core, ticket in self._priced_at]
        topologies = {name: number for number, name in enumerate(_C.topologies()) if name != "all"}
        operations = [
            (seconds, topologies.get(operation.topology, _ALL_RANKS), operation.step, link_bytes, busy)
            for (seconds, busy, link_bytes), operation in zip(costs, self.operations, strict=True)
        ]
        program = [entry for lap in range(repetitions + 1) for entry in self._lap(lap, slowdown)]
        late = stragglers or Stragglers()
        step_ends, waited, begins, ends = _C.play(
            program,
            operations * (repetitions + 1),
            self.size,
            late.sigma,
            late.seed,
            late.slow_rank,
            late.slow_factor,
            link.up / 8,
            link.burst,
        )
        num_before, num_steps = self.num_steps * self.size, self.num_steps * repetitions
        before = step_ends[num_before - self.size : num_before]
        first = slice(len(operations), 2 * len(operations))
        return Simulated(
            step_s=(max(step_ends[-self.size :]) - max(before)) / num_steps,
            waited_s=statistics.mean(waited[num_before:]),
            link_bytes=sum(link_bytes for _, _, link_bytes in costs) / self.num_steps,
            spans=[
                (operation, begin - before[0], end - before[0])
                for operation, begin, end in zip(self.operations, begins[first], ends[first], strict=True)
            ],
        )

    def _lap(self, lap: int, slowdown: float) -> list[tuple[int, int, float]]:
        """The program of one repetition. A wait for what began before the first one is left out."""
        entries = []
        for action, value in self._entries:
            if action not in (_START, _WAIT):
                entries.append((action, 0, value * (slowdown if action == _COMPUTE else 1.0)))
                continue
            place = self._place_of.get(int(value), -len(self.operations) - 1) + lap * len(self.operations)
            if place >= 0:
                entries.append((action, place, 0.0))
        return entries


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
            host, a warm-up, pairs of an odd number of ranks), or a value is out of range.
    """
    for name, value, least in (("hosts", hosts, 2), ("ranks_per_host", ranks_per_host, 1), ("steps", steps, 0)):
        if type(value) is not int or value < least:
            raise InvalidArgument(f"{name} is {value!r}, expected an integer of at least {least}")
    options = {"check_replicas": False, **_LATER.get(algorithm, {}), **options}
    for name in _WARM_UPS:
        if options.get(name):
            raise InvalidArgument(
                f"{name} is {options[name]!r}, but what follows the warm-up is rehearsed; leave it out"
            )
    group = RehearsalGroup(hosts, ranks_per_host)
    script, num_threads = group.script, torch.get_num_threads()
    torch.set_num_threads(1)  # as a rank's; and the time of one is counted
    try:
        model = SleepingModel(profile, script)
        optimizer = optimizer_of(algorithm, list(model.parameters()))
        bagua.with_bagua(model, optimizer, algorithm=algorithm, group=group, **options)
        chosen = model.bagua.algorithm.options()
        num_steps = steps or max(chosen.get(name, 1) for name in ("sync_every", "interval", "max_interval"))

        def run(count: int) -> None:
            for _ in range(count):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
                script.add(_END_STEP)

        run(_WARM_UP_STEPS + num_steps)
        script.begin_again()
        run(2 * num_steps)
        script.is_kept = False
        group.barrier().wait()  # the worker has carried out what overlaps, too
        rehearsed = Rehearsed(group, num_steps, ranks_per_host)
        model.bagua.remove()
    finally:
        torch.set_num_threads(num_threads)
        group.close()
    return rehearsed
