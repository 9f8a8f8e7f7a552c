"""Records training as it runs: one record per synchronising step, and the labels of operations.

Beside the data path. The step writes into rings of fixed size and adds up totals; the engine keeps its own ring of
spans. Clock: CLOCK_MONOTONIC in nanoseconds, the same on both sides. Recording is always on, so nothing here takes more
than a few microseconds per step: what can be derived from the records is computed when it is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import struct
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from bagua.distributed.job_ranks import JobRanks
from bagua.errors import BaguaError

KEPT_STEPS = 4096
KEPT_LABELS = 16384
_HOOKS_PER_STEP = 3  # a forward's hook, and the two of an optimizer's step
_COMPUTE_PER_STEP = 2  # a forward, and a backward that is local; steps that accumulate have more, of fewer steps


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One synchronising backward of this rank.

    Attributes:
        index: how many came before it.
        begin_ns: autograd reached the model's output: backward's computation began.
        wait_ns: backward's computation had ended; from here on communication was exposed.
        end_ns: all gradients were synchronised and ``backward()`` returned.
        hooks_ns: exposed communication in the hooks since the previous backward: in optimizer steps and forwards, where
            weights are exchanged and buffers broadcast.
        bytes_sent: payload of the model's operations that have ended since the previous step.
        network_bytes_sent: the part of it that went over a network, not through shared memory.
        num_buckets: messages, one per bucket.
    """

    index: int
    begin_ns: int
    wait_ns: int
    end_ns: int
    hooks_ns: int
    bytes_sent: int
    network_bytes_sent: int
    num_buckets: int

    @property
    def exposed_ns(self) -> int:
        """Time since the end of the previous backward in which this rank did nothing but wait for communication."""
        return self.end_ns - self.wait_ns + self.hooks_ns


@dataclass(frozen=True, slots=True)
class ExposedHook:
    """Exposed communication in a hook of the forward or of the optimizer.

    ``hook`` is before_forward, before_optimizer_step or after_optimizer_step. Under ``bagua.fsdp.compress`` it is the
    label of a reduction that backward has waited for at once.
    """

    hook: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Computation other than a synchronising backward: ``what`` is forward, or local backward (inside no_sync)."""

    what: str
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended the training of this rank.

    Attributes:
        where: "backward", the name of a hook as in ``ExposedHook``, or "computation" if it was found between the two.
        step: the index that the StepRecord would have had.
        begin_ns: of the backward; equal to wait_ns for a hook.
        wait_ns: from here on the rank waited.
        end_ns: when it raised.
        error: kind and message.
        rank: the rank to blame, if known.
    """

    where: str
    step: int
    begin_ns: int
    wait_ns: int
    end_ns: int
    error: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of the engine's worker thread: ``kind`` is queued, operation, encode, wire, decode or reduce.

    Of tensors on a device, an operation's interval is the device's, measured by events: from when its input is ready
    and what was before it on the group's stream is done, to its end. The worker has enqueued it before: ``queued`` ends
    there. ``wire`` is while the worker waits for the transport; encode, decode and reduce, which run on the device
    within the operation, have no spans.

    Attributes:
        bytes: of the tensor for an operation, of the chunk or message for the others.
        bytes_sent: of an operation: the payload that its rank has sent.
        codec: of a bucket's operation: the codec of what travels, "" for full precision.
        group: name of the group whose engine it was.
        ticket: counts the operations of that engine; the same operation has the same one on all ranks.
        waits_for_some: for an operation: its rank waited for its neighbours only, as on a ring.
    """

    label: str
    kind: str
    begin_ns: int
    end_ns: int
    bytes: int
    group: str
    ticket: int
    waits_for_some: bool = False
    bytes_sent: int = 0
    codec: str = ""


class Operation(Protocol):
    """The part of the core's Work that is used: ``sent`` is (bytes, bytes over a network), None until it ends."""

    @property
    def ticket(self) -> int: ...

    @property
    def sent(self) -> tuple[int, int] | None: ...


class _Ring:
    """The last `capacity` records, of `num_fields` integers each. Its memory is allocated once and never grows."""

    def __init__(self, capacity: int, num_fields: int) -> None:
        self._record = struct.Struct(f"={1 + num_fields}q")  # the first one is the record's number, from 1
        self._capacity, self._memory = capacity, bytearray(capacity * self._record.size)
        self._count = 0

    def add(self, *values: int) -> None:
        """Append a record; overwrites the oldest one when the ring is full."""
        offset = self._count % self._capacity * self._record.size
        self._count += 1
        self._record.pack_into(self._memory, offset, self._count, *values)

    def newest_first(self) -> Iterator[tuple[int, ...]]:
        """A snapshot, newest first."""
        count, memory = self._count, bytes(self._memory)
        numbers = range(count, max(count - self._capacity, 0), -1)
        offsets = ((number - 1) % self._capacity * self._record.size for number in numbers)
        records = map(self._record.unpack_from, itertools.repeat(memory), offsets)
        # Records with another number were overwritten, or not written yet, when the memory was copied.
        return (record[1:] for number, record in zip(numbers, records, strict=True) if record[0] == number)

    def records(self) -> list[tuple[int, ...]]:
        """Oldest first."""
        return list(self.newest_first())[::-1]


class _Names(dict[str, int]):
    """Numbers the names of hooks, groups and labels, of which there are few."""

    def __missing__(self, name: str) -> int:
        return self.setdefault(name, len(self))

    def by_number(self) -> list[str]:
        """The names, in the order of their numbers."""
        return list(self)


class Checked(Protocol):
    """The part of a ProcessGroup that is used."""

    def check(self) -> None: ...


class _Hook:
    """The context manager of Recorder.hook. A class, because a generator would take longer, several times per step."""

    __slots__ = ("_begin_ns", "_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._recorder.add_exposed_hook(self._name, self._begin_ns, time.monotonic_ns())
        elif isinstance(error, BaguaError):
            self._recorder.add_failure(self._name, self._begin_ns, self._begin_ns, error)


class Recorder:
    """Written by the step, read by ``model.bagua.timeline()``; memory is constant.

    Any thread may read: each read copies one container in a single atomic step.
    """

    def __init__(self) -> None:
        self._names = _Names()
        self._steps = _Ring(KEPT_STEPS, len(dataclasses.fields(StepRecord)))
        self._exposed_hooks = _Ring(_HOOKS_PER_STEP * KEPT_STEPS, 3)  # name of the hook, begin, end
        self._compute = _Ring(_COMPUTE_PER_STEP * KEPT_STEPS, 3)
        self._labels = _Ring(KEPT_LABELS, 5)  # names of group and label, ticket, whether it is a bucket's, codec
        self._uncounted: deque[Operation] = deque(maxlen=KEPT_LABELS)  # their bytes are not in a step's record yet
        self.job_ranks: JobRanks | None = None  # of the group whose ranks the files are named after; None: all
        self._failure: Failure | None = None
        self._num_steps = 0
        self._exposed_ns = 0
        self._bytes_sent = 0
        self._network_bytes_sent = 0
        self._hooks_ns = 0

    def add_exposed_hook(self, hook: str, begin_ns: int, end_ns: int) -> None:
        """Adds the time in a hook to the next step's record."""
        self._exposed_hooks.add(self._names[hook], begin_ns, end_ns)
        self._hooks_ns += end_ns - begin_ns

    def add_compute(self, what: str, begin_ns: int, end_ns: int) -> None:
        """Records a ``Compute``."""
        self._compute.add(self._names[what], begin_ns, end_ns)

    def add_work(self, group: str, work: Operation, label: str, is_bucket: bool = True, codec: str = "") -> None:
        """Names the spans of ``work`` of the engine of ``group``, and counts what it sends."""
        self._labels.add(self._names[group], self._names[label], work.ticket, is_bucket, self._names[codec])
        self._uncounted.append(work)

    def add_step(self, begin_ns: int, wait_ns: int, end_ns: int, num_buckets: int) -> None:
        """Records a complete step."""
        sent, over_network = self._count_sent()
        hooks_ns = self._hooks_ns
        self._steps.add(self._num_steps, begin_ns, wait_ns, end_ns, hooks_ns, sent, over_network, num_buckets)
        self._num_steps += 1
        self._exposed_ns += end_ns - wait_ns + hooks_ns
        self._bytes_sent += sent
        self._network_bytes_sent += over_network
        self._hooks_ns = 0

    def _count_sent(self) -> tuple[int, int]:
        """Bytes that ended operations have sent, in all and over a network; the others are counted later."""
        sent = over_network = 0
        for _ in range(len(self._uncounted)):
            work = self._uncounted.popleft()
            counts = work.sent
            if counts is None:
                self._uncounted.append(work)
            else:
                sent, over_network = sent + counts[0], over_network + counts[1]
        return sent, over_network

    def hook(self, name: str) -> _Hook:
        """A context manager around a hook: records the time inside, as add_exposed_hook, or that the hook failed."""
        return _Hook(self, name)

    def check(self, group: Checked) -> None:
        """Raises the group's failure, if it has failed meanwhile, after recording it."""
        try:
            group.check()
        except BaguaError as error:
            now_ns = time.monotonic_ns()
            self.add_failure("computation", now_ns, now_ns, error)
            raise

    def add_failure(self, where: str, begin_ns: int, wait_ns: int, error: BaguaError) -> None:
        """Records the error that this rank raises now. Only the first is kept: later ones are its consequences."""
        if self._failure is None:
            message = f"{type(error).__name__}: {error}"
            times = (begin_ns, wait_ns, time.monotonic_ns())
            own = error if self.job_ranks is None else self.job_ranks.own(error)
            self._failure = Failure(where, self._num_steps, *times, message, own.rank)

    def steps(self, last: int = KEPT_STEPS) -> tuple[StepRecord, ...]:
        """The last steps, oldest first."""
        records = list(itertools.islice(self._steps.newest_first(), last))
        return tuple(StepRecord(*record) for record in reversed(records))

    def exposed_hooks(self) -> tuple[ExposedHook, ...]:
        """The exposed communication in hooks, of the same steps about, oldest first."""
        records, names = self._exposed_hooks.records(), self._names.by_number()
        return tuple(ExposedHook(names[hook], begin_ns, end_ns) for hook, begin_ns, end_ns in records)

    def compute(self) -> tuple[Compute, ...]:
        """The forwards and local backwards of the same steps about, oldest first."""
        records, names = self._compute.records(), self._names.by_number()
        return tuple(Compute(names[what], begin_ns, end_ns) for what, begin_ns, end_ns in records)

    def failure(self) -> Failure | None:
        """The first one, None while there is none."""
        return self._failure

    def spans(self, events: Iterable[tuple[str, Any]]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Returns this model's spans, of buckets and others, from the engines' ``events`` with their groups' names.

        Operations of other models and of the user's own calls are not in it.
        """
        events = tuple(events)
        labels = self._labels_of({(group, event.ticket) for group, event in events})
        of_buckets: list[Span] = []
        others: list[Span] = []
        for group, event in events:
            named = labels.get((group, event.ticket))
            if named is not None:
                label, is_bucket, codec = named
                operation = (group, event.ticket, event.waits_for_some, event.bytes_sent, codec)
                span = Span(label, event.kind, event.begin_ns, event.end_ns, event.bytes, *operation)
                (of_buckets if is_bucket else others).append(span)
        return tuple(of_buckets), tuple(others)

    def _labels_of(self, operations: set[tuple[str, int]]) -> dict[tuple[str, int], tuple[str, bool, str]]:
        """Returns the label of a group's ticket, whether it is a bucket's, and its codec. Searches from the newest."""
        found: dict[tuple[str, int], tuple[str, bool, str]] = {}
        records, names = self._labels.newest_first(), self._names.by_number()
        for group, label, ticket, of_bucket, codec in records:
            if len(found) == len(operations):
                break
            if (names[group], ticket) in operations:
                found[names[group], ticket] = (names[label], of_bucket == 1, names[codec])
        return found

    def totals(self) -> dict[str, Any]:
        """Since the model was wrapped: steps, exposed_s (seconds), bytes_sent and network_bytes_sent."""
        return {
            "steps": self._num_steps,
            "exposed_s": self._exposed_ns / 1e9,
            "bytes_sent": self._bytes_sent,
            "network_bytes_sent": self._network_bytes_sent,
        }
