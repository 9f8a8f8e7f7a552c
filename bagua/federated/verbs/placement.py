"""Placements: how many clients there are, which of them this rank holds, the group that sums over all of them.

`program` puts a placement in force while a function runs; the verbs find it there. Operators of a program carry the
key of their placement, so that derivatives, which run later and elsewhere, find it by `placement_of`. What ranks must
have in common is agreed when the first reduction of a placement runs, never at a later one.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bagua.distributed import consensus, world
from bagua.distributed.devices import StreamKey, current_stream
from bagua.distributed.process_group import ProcessGroup, operations_checked
from bagua.errors import BaguaError, InvalidArgument

Function = TypeVar("Function", bound=Callable[..., Any])


class Placement:
    """n clients, of which this rank holds `num_local`, in the order of the ranks.

    Attributes:
        name: such as "clients".
        size: clients of all ranks.
        num_local: clients of this rank; may be 0.
        program: the name of the function that is a program over them.
        key: what operators carry.
        is_agreed: whether the ranks are known to have the same program, and sizes that add up.
        agreed: the reductions of which that is known too, and the subject that their collectives say.
        reductions: one object for equal ones of all splits of the clients.
        numbers: how many clients each rank holds, once that is known; see reduction.clients_by_rank.
        lock: guards the four before, and the reductions' memory.
    """

    def __init__(
        self, name: str, size: int, num_local: int, program: str, group: ProcessGroup | None, key: str, memory: _Memory
    ):
        self.name = name
        self.size = size
        self.num_local = num_local
        self.program = program
        self.key = key
        self.is_agreed = group is None
        self.agreed: dict[tuple, int] = {}
        self.reductions: dict[tuple, tuple] = {}
        self.numbers: list[int] | None = [num_local] if group is None else None
        self.lock = memory.lock
        self.is_distributed = group is not None
        self._group = None if group is None else weakref.ref(group)
        self._memory = memory.buffers

    def __repr__(self) -> str:
        return f"Placement({self.name!r}, {self.size}, {self.num_local} here)"

    @property
    def group(self) -> ProcessGroup | None:
        """The ranks that hold the clients; None: this process holds them all."""
        if self._group is None:
            return None
        group = self._group()
        if group is None:
            raise InvalidArgument(
                f"the group over which the program {self.program!r} ran was destroyed; run the program again "
                "in the new one"
            )
        return group

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Marks what is raised inside as raised on all ranks of the group."""
        try:
            yield
        except Exception as error:
            error.raised_over = self.key
            raise

    def memory(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of that many elements for the reduction that runs, on the CPU shared with the ranks of this host."""
        key = dtype, current_stream(device)
        known = self._memory.get(key)
        if known is None or known.numel() < numel:
            known = self._memory[key] = self.group.empty(numel, dtype, device)
        return known[:numel]


class _Memory:
    """The placements of a group, and the memory in which they reduce one after another; it ends with the group."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        # On a device the operations of one stream follow one another, and those of two need not.
        self.buffers: dict[tuple[torch.dtype, StreamKey | None], torch.Tensor] = {}
        self.by_identity: dict[tuple, Placement] = {}
        self.reductions: dict[tuple, dict] = {}  # of a program, however its clients are split


_lock = threading.Lock()  # guards what follows
_by_key: dict[str, Placement] = {}
_memories: weakref.WeakKeyDictionary[ProcessGroup, _Memory] = weakref.WeakKeyDictionary()
_of_this_process = _Memory()
_ended: deque[_Memory] = deque()  # of groups that are no more; the last ones, of which derivatives may be left
_numbers = itertools.count()

MAX_ENDED = 1000


def _end(memory: _Memory) -> None:
    memory.buffers.clear()
    _ended.append(memory)  # the rest under the lock, which may be held here


def _intern(
    name: str,
    size: int,
    num_local: int,
    program: str,
    group: ProcessGroup | None,
    by_rank: tuple[int, ...] | None = None,
) -> Placement:
    """One object for equal placements: compiled code and graphs hold its key.

    With the numbers of all ranks, where they are given: one that keeps its number agrees anew with those that do not.
    """
    identity = (name, size, num_local, program, by_rank)
    with _lock:
        while len(_ended) > MAX_ENDED:
            for placement in _ended.popleft().by_identity.values():
                del _by_key[placement.key]
        memory = _of_this_process if group is None else _memories.get(group)
        if memory is None:
            memory = _memories[group] = _Memory()
            weakref.finalize(group, _end, memory).atexit = False
        known = memory.by_identity.get(identity)
        if known is None:
            known = Placement(name, size, num_local, program, group, f"{name}:{size}#{next(_numbers)}", memory)
            known.reductions = memory.reductions.setdefault((name, size, program), known.reductions)
            memory.by_identity[identity] = _by_key[known.key] = known
        return known


def local_placement(name: str, size: int) -> Placement:
    """All clients in this process."""
    return _intern(name, size, size, "bagua", None)


def placement_of(key: str) -> Placement:
    """The placement that an operator names, beside its values."""
    placement = _by_key.get(key)
    if placement is None:
        raise InvalidArgument(
            f"no placement {key!r} in this process: its group was destroyed long ago, or another process has made the "
            "operators; run the program again"
        )
    return placement


# ---- what is in force


class Frame(NamedTuple):
    """A program that runs, or one of whose client functions runs."""

    placement: Placement
    is_mapping: bool = False


_frames: contextvars.ContextVar[tuple[Frame, ...]] = contextvars.ContextVar("bagua_placements", default=())


class _Mirror(threading.local):
    """The same where torch.compile traces, which follows no context variable."""

    def __init__(self) -> None:  # in every thread; Dynamo guards on attributes of the object, not of its class
        self.frames: tuple[Frame, ...] = ()


_mirror = _Mirror()


def frames() -> tuple[Frame, ...]:
    """The programs that run, from the outermost program in."""
    return _mirror.frames if torch.compiler.is_compiling() else _frames.get()


# The state of federated.trace while it runs; nothing communicates then.
trace_in_force: contextvars.ContextVar[Any] = contextvars.ContextVar("bagua_trace", default=None)


def run_in(frame: Frame, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The function's result, while `frame` is the innermost one."""
    before = _mirror.frames
    if torch.compiler.is_compiling():
        _mirror.frames = (*before, frame)
        try:
            return function(*args, **kwargs)
        finally:
            _mirror.frames = before
    within = (*_frames.get(), frame)
    token = _frames.set(within)
    _mirror.frames = within
    try:
        # While a client function runs, collectives with other clients' ranks are refused.
        checked = operations_checked(_check_operation) if frame.is_mapping else nullcontext()
        # In another thread a device's backward would see no frame.
        with torch.autograd.set_multithreading_enabled(False), checked:
            return function(*args, **kwargs)
    finally:
        _mirror.frames = before
        _frames.reset(token)


def run_within(within: tuple[Frame, ...], function: Callable, *args: Any) -> Any:
    """The function's result, where these frames are in force instead of those that are."""
    before, token = _mirror.frames, _frames.set(within)
    _mirror.frames = within
    try:
        return function(*args)
    finally:
        _mirror.frames = before
        _frames.reset(token)


def current(name: str | None, verb: str) -> Placement:
    """The placement that a verb means.

    Raises:
        InvalidArgument: no program runs, none with that name, or the verb stands in the client function.
    """
    running = frames()
    if not running:
        raise InvalidArgument(f"{verb} outside of a program: decorate the function with federated.program(clients=n)")
    found = [frame for frame in running if name is None or frame.placement.name == name][-1:]
    if not found:
        names = ", ".join(repr(frame.placement.name) for frame in running)
        raise InvalidArgument(f"{verb}: no program over {name!r} runs, only over {names}")
    placement = found[0].placement
    if any(frame.is_mapping and frame.placement is placement for frame in running):
        raise InvalidArgument(
            f"{verb} inside a client function, which sees one client of {placement.name!r} only: call {verb} before or "
            "after map_fn"
        )
    return placement


# ---- groups inside of client functions


def mapping() -> tuple[str, ...]:
    """The keys of the placements of which a client function runs, from the outermost in."""
    return tuple([frame.placement.key for frame in frames() if frame.is_mapping])


def check_group(group: ProcessGroup, keys: Iterable[str]) -> None:
    """Raises InvalidArgument where a client function of one of these would communicate with other clients' ranks."""
    for clients in [placement_of(key) for key in keys]:
        if clients.is_distributed and len(set(group.ranks) & set(clients.group.ranks)) > 1:
            raise InvalidArgument(
                f"a client function, which sees one client of {clients.name!r} only, communicates in the group "
                f"{group.name!r} of ranks {group.ranks}, which hold other clients, too: return the value, and call "
                "federated.reduce_sum after map_fn. The ranks that share a client communicate inside, by "
                "federated.copy_to_group and reduce_from_group"
            )


def _check_operation(group: ProcessGroup) -> None:
    keys = [frame.placement.key for frame in _frames.get() if frame.is_mapping]
    if keys:
        check_group(group, keys)


@torch.compiler.assume_constant_result
def shards(group: ProcessGroup, within: tuple[str, ...]) -> Placement:
    """The ranks of the group as a placement with one client on each.

    Args:
        within: the keys of the placements of which a client function runs; the ranks must hold the same clients.
    """
    if not isinstance(group, ProcessGroup):
        raise InvalidArgument(
            f"expected a group of bagua.new_group or bagua.from_torch_group, but got a {type(group).__name__}"
        )
    ranks = _members_of(group)
    check_group(group, within)
    held = [placement_of(key) for key in within]
    title = ", in ".join(f"{one.program} of {one.num_local} {one.name} on this rank" for one in reversed(held))
    return _intern("shards", group.size, 1 if ranks else group.size, title or "no program", ranks)


# ---- programs


@overload
def program(
    function: Function,
    *,
    group: world.GroupLike = None,
    num_local: int | Sequence[int] | None = None,
    **sizes: int,
) -> Function: ...
@overload
def program(
    function: None = None,
    *,
    group: world.GroupLike = None,
    num_local: int | Sequence[int] | None = None,
    **sizes: int,
) -> Callable[[Function], Function]: ...
def program(
    function: Function | None = None,
    *,
    group: world.GroupLike = None,
    num_local: int | Sequence[int] | None = None,
    **sizes: int,
) -> Any:
    """A decorator: the function is a program over clients, written in the verbs of this package.

    Server values are equal on all ranks of the group; a placed value is what this rank's clients have, ``[num_local,
    ...]``, in the order of the ranks. All ranks call the program alike. Its derivatives by torch.func and autograd are
    programs of the same verbs.

    Args:
        group: the ranks that hold the clients; by default the default group, or this process alone where
            init_process_group was not called, and inside of another program's client function.
        num_local: how many clients this rank holds, or a number for each rank; 0 is allowed. By default they are spread
            evenly, the first ranks one more. Where the numbers change from call to call, give those of all ranks.
        sizes: the placement's name and its number of clients, such as ``clients=100``.

    Example:
        >>> from bagua import federated
        >>> @federated.program(clients=3)
        ... def mean_square(x, y):
        ...     return federated.reduce_mean(federated.map_fn(lambda x, y: (x - y) ** 2, (federated.broadcast(x), y)))
        >>> mean_square(torch.tensor(1.0), torch.tensor([1.0, 2.0, 4.0]))
        tensor(3.3333)
        >>> torch.func.grad(mean_square)(torch.tensor(1.0), torch.tensor([1.0, 2.0, 4.0]))
        tensor(-2.6667)

    Raises:
        InvalidArgument: not one name with a size of at least 1, or numbers that do not add up to it.
    """
    if len(sizes) != 1:
        raise InvalidArgument(f"a program has one placement, such as clients=100, but got {sizes or 'none'}")
    ((name, size),) = sizes.items()
    _check_size(name, size)
    if function is None:
        return functools.partial(program, group=group, num_local=num_local, **sizes)
    title = f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"

    @torch.compiler.assume_constant_result
    def nested(within: tuple[str, ...]) -> Placement:
        ranks = _ranks_of(group, within)
        trace = None if torch.compiler.is_compiling() else trace_in_force.get()
        by_rank = None if num_local is None or isinstance(num_local, int) else tuple(num_local)
        placement = _intern(
            name, size, _local_of(size, num_local, ranks, name), title, ranks if trace is None else None, by_rank
        )
        if trace is not None:
            trace.add_program(placement, functools.partial(program, group=group, num_local=num_local))
        return placement

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        running = frames()
        if any(frame.placement.name == name for frame in running):
            raise InvalidArgument(f"a program over {name!r} inside another over {name!r}: give one another name")
        frame = Frame(nested(mapping()))
        if torch.compiler.is_compiling():
            return run_in(frame, function, args, kwargs)
        try:
            return run_in(frame, function, args, kwargs)
        except Exception as error:
            _tell(frame.placement, error)
            raise

    return run


def _check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidArgument(f"{name}={size!r}: expected how many there are, an integer of at least 1")


def _tell(placement: Placement, error: Exception) -> None:
    """Tells the other ranks, which wait for this one in a reduction, or soon will, what it raises in the program.

    They learn it instead of the agreement on the next reduction. Where they have agreed on that one before, they learn
    that this rank calls something else.
    """
    is_of_a_failed_group = isinstance(error, BaguaError) and not isinstance(error, InvalidArgument)
    is_known = is_of_a_failed_group or getattr(error, "raised_over", None) == placement.key
    if is_known or not placement.is_distributed:
        return

    def fail() -> NoReturn:
        raise error

    try:
        with temporarily_clear_interpreter_stack():  # torch.func's transforms have nothing to do with it
            consensus.agree(placement.group, fail, "")
    except Exception as failure:  # this one, or that the others do something else or have exited
        if failure is not error and error.__cause__ is None:
            error.__cause__ = failure


def _ranks_of(group: world.GroupLike, within: tuple[str, ...]) -> ProcessGroup | None:
    if group is None and (within or not world.is_initialized()):
        return None
    group = world.resolve(group)
    check_group(group, within)
    return _members_of(group)


def _members_of(group: ProcessGroup) -> ProcessGroup | None:
    """The group; None where this rank is all of it."""
    if group.rank < 0:
        raise InvalidArgument(f"this rank is not in the group {group.name!r} of ranks {group.ranks}")
    return group if group.size > 1 else None


def _local_of(size: int, num_local: int | Sequence[int] | None, group: ProcessGroup | None, name: str) -> int:
    """Returns how many clients this rank holds."""
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
    if num_local is None:
        return size // num_ranks + (rank < size % num_ranks)
    if isinstance(num_local, int):
        if not 0 <= num_local <= size:
            raise InvalidArgument(f"num_local={num_local}, expected 0 to {size}, which is {name}")
        if group is None and num_local != size:
            raise InvalidArgument(f"num_local={num_local}, but this process alone holds all {size} {name}")
        return num_local
    numbers = list(num_local)
    if len(numbers) != num_ranks or sum(numbers) != size or min(numbers) < 0:
        raise InvalidArgument(
            f"num_local={numbers}, expected a number for each of {num_ranks} ranks, {size} ({name}) in all"
        )
    return numbers[rank]


def local_slice(size: int, *, group: world.GroupLike = None, num_local: Sequence[int] | None = None) -> slice:
    """Returns which of `size` clients this rank holds in a program with the same arguments.

    Args:
        size: clients of all ranks.
        group: as of ``program``.
        num_local: a number for each rank; by default they are spread evenly, as by ``program``.

    Raises:
        InvalidArgument: as program.

    Example:
        >>> local_slice(5)
        slice(0, 5, None)
    """
    _check_size("size", size)
    if isinstance(num_local, int):
        raise InvalidArgument(f"num_local={num_local}, expected a number for each rank: where others' clients begin")
    ranks = _ranks_of(group, ())
    rank, num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    if num_local is None:
        begin = rank * (size // num_ranks) + min(rank, size % num_ranks)
    else:
        begin = sum(list(num_local)[:rank])
    return slice(begin, begin + _local_of(size, num_local, ranks, "clients"))
