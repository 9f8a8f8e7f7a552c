"""init_process_group, groups and communicators of the original project: thin wrappers of bagua.ProcessGroup.

A group has up to three communicators, which collectives take as an argument. On a rank that is not a member the
communicator is ``CommMember.NON_COMM_MEMBER``, with which every collective returns at once and does nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua.distributed import world
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument
from bagua.torch_version import is_torch_at_least

__all__ = [
    "BaguaCommunicator",
    "BaguaProcessGroup",
    "CommMember",
    "comm",
    "communicating_group",
    "from_torch_group",
    "get_default_group",
    "init_process_group",
    "is_initialized",
    "new_group",
    "to_bagua_process_group",
]

# The original's timeout, which is not an argument.
_TIMEOUT = timedelta(minutes=30)
_TORCH_BACKEND = "bagua" if is_torch_at_least(2, 9) else "gloo"

# The number of subgroups of each kind that a group has made, for their names. All members make each, so it is equal.
_num_parts: weakref.WeakKeyDictionary[ProcessGroup, Counter[str]] = weakref.WeakKeyDictionary()


class comm:
    """A namespace for the default group's communicator."""

    WORLD = object()


class CommMember:
    """A namespace for the default group's communicator, and for that of a group without this rank."""

    WORLD = comm.WORLD
    NON_COMM_MEMBER = object()


@dataclasses.dataclass(frozen=True)
class BaguaCommunicator:
    """The ranks that a collective works on.

    Attributes:
        group: the bagua.ProcessGroup.
    """

    group: ProcessGroup

    def rank(self) -> int:
        """Returns the rank of this process in the communicator."""
        return self.group.rank

    def nranks(self) -> int:
        """Returns the number of ranks."""
        return self.group.size


class BaguaProcessGroup:
    """A group of ranks, made by new_group, from_torch_group or init_process_group.

    Attributes:
        group: the bagua.ProcessGroup, for bagua's own functions.
        stream: None; operations on devices run on streams of bagua.
    """

    stream = None

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    @property
    def ranks(self) -> list[int]:
        """The global ranks of the members, ascending."""
        return self.group.ranks

    @property
    def group_name(self) -> str:
        """The name of the group, the same on all ranks."""
        return self.group.name

    @property
    def intra_ranks(self) -> list[int]:
        """The global ranks of the members on this node, ascending; empty on a rank that is not a member."""
        return [self.group.ranks[rank] for rank in self._members_of_this_node()]

    @property
    def inter_ranks(self) -> list[int]:
        """The global rank of each node's leader, the member with the lowest rank."""
        return [self.group.ranks[rank] for rank in self.group.nodes.leaders]

    def _members_of_this_node(self) -> Sequence[int]:
        return () if self.group.rank < 0 else self.group.nodes.node_of(self.group.rank)

    def get_global_communicator(self) -> BaguaCommunicator | object:
        """Returns the communicator of all members."""
        return BaguaCommunicator(self.group) if self.group.rank >= 0 else CommMember.NON_COMM_MEMBER

    def get_intra_node_communicator(self) -> BaguaCommunicator | object:
        """Returns the communicator of the members on this node. They all call this before any uses it."""
        return self._intra_node

    def get_inter_node_communicator(self) -> BaguaCommunicator | object:
        """Returns the communicator of the nodes' leaders, the members with the lowest ranks."""
        return self._inter_node

    @functools.cached_property
    def _intra_node(self) -> BaguaCommunicator | object:
        return self._part("intra-node", self._members_of_this_node())

    @functools.cached_property
    def _inter_node(self) -> BaguaCommunicator | object:
        return self._part("inter-node", [] if self.group.rank < 0 else self.group.nodes.leaders)

    def _part(self, name: str, ranks: Sequence[int]) -> BaguaCommunicator | object:
        if self.group.rank not in ranks:
            return CommMember.NON_COMM_MEMBER
        num_parts = _num_parts.setdefault(self.group, Counter())
        num_parts[name] += 1
        return BaguaCommunicator(self.group.subgroup(f"{name}-{num_parts[name]}", ranks, self.group.timeout))


_default: BaguaProcessGroup | None = None


def init_process_group(store: dist.Store | None = None) -> None:
    """Connects to the other ranks; also initialises torch.distributed if it is not, so that its functions work.

    Args:
        store: the store of the rendezvous; by default the one that the launcher's environment describes. Rank and world
            size come from the environment in either case.

    Raises:
        InvalidArgument, TransportError, DeadlineExceeded: as bagua.init_process_group.
    """
    world.init_process_group(store=store, timeout=_TIMEOUT)
    if not dist.is_initialized():
        rendezvous = {}
        if store is not None:
            prefixed = dist.PrefixStore("bagua.torch_api", store)
            rendezvous = {"store": prefixed, "rank": world.get_rank(), "world_size": world.get_world_size()}
        dist.init_process_group(_TORCH_BACKEND, timeout=_TIMEOUT, **rendezvous)


def is_initialized() -> bool:
    """Returns True after init_process_group has been called."""
    return world.is_initialized()


def get_default_group() -> BaguaProcessGroup:
    """Returns the group of all ranks.

    Raises:
        InvalidArgument: init_process_group has not been called.
    """
    global _default
    group = world.get_default_group()
    if _default is None or _default.group is not group:
        _default = BaguaProcessGroup(group)
    return _default


def new_group(ranks: list[int] | None = None, stream: object | None = None) -> BaguaProcessGroup:
    """Makes a group of some ranks. Every rank calls it, in the same order, members or not.

    Args:
        ranks: global ranks; all by default.
        stream: None; operations on devices run on streams of bagua.

    Raises:
        InvalidArgument: ranks that do not exist, or a stream.
    """
    _refuse_stream(stream)
    return BaguaProcessGroup(world.new_group(ranks))


def from_torch_group(group: dist.ProcessGroup, stream: object | None = None) -> BaguaProcessGroup:
    """Makes a group of the same ranks as a torch.distributed group. Its members call it.

    Raises:
        InvalidArgument: this process is not a member, torch's ranks are not bagua's, or a stream.
    """
    _refuse_stream(stream)
    return BaguaProcessGroup(world.from_torch_group(group))


def _refuse_stream(stream: object | None) -> None:
    if stream is not None:
        raise InvalidArgument(
            f"stream is {stream!r}, but operations run on a stream of bagua, after the work that the current stream "
            "has when they are called; leave it out"
        )


def communicating_group(comm: object) -> ProcessGroup | None:
    """Returns the group of a collective's argument ``comm``; None if this rank takes no part.

    Raises:
        InvalidArgument: it is not a communicator, or bagua is not initialised.
    """
    if comm is None or comm is CommMember.WORLD:
        return world.get_default_group()
    if comm is CommMember.NON_COMM_MEMBER:
        return None
    if isinstance(comm, BaguaCommunicator):
        return comm.group
    raise InvalidArgument(
        f"comm is a {type(comm).__name__}, expected a communicator; give group.get_global_communicator(), or nothing "
        "for all ranks"
    )


def to_bagua_process_group(
    process_group: BaguaProcessGroup | ProcessGroup | dist.ProcessGroup | None = None,
) -> BaguaProcessGroup:
    """Returns the group of an argument ``process_group``; None means all ranks.

    Raises:
        InvalidArgument: it is not a group, or not one that this process is in.
    """
    if process_group is None:
        return get_default_group()
    if isinstance(process_group, BaguaProcessGroup):
        return process_group
    if isinstance(process_group, ProcessGroup):
        return BaguaProcessGroup(process_group)
    if isinstance(process_group, dist.ProcessGroup):
        return from_torch_group(process_group)
    raise InvalidArgument(f"process_group is a {type(process_group).__name__}; pass a group made by new_group")
