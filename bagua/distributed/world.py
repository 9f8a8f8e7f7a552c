"""The process-wide state: the default group, the groups made from it, and this process's ranks.

init_process_group connects to the other ranks and makes the default group; destroy_process_group closes everything.
Functions that take `group=None` use the default group.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import TypeAlias

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from bagua import config
from bagua.distributed.bootstrap import REPORT_TIMEOUT, bootstrap, describe_thresholds, format_ranks, report_mistake
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.work import to_seconds
from bagua.errors import BaguaError, InvalidArgument
from bagua.net import rendezvous
from bagua.net.links import Endpoint
from bagua.net.torch_transport import TorchTransport

__all__ = [
    "GroupLike",
    "destroy_process_group",
    "from_torch_group",
    "get_default_group",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_beside_torch",
    "init_process_group",
    "is_initialized",
    "new_group",
    "resolve",
]

# The argument ``group`` of public functions; see ``resolve``.
GroupLike: TypeAlias = ProcessGroup | dist.ProcessGroup | DeviceMesh | None

# How long rank 0 keeps the store open after it has given up, for the others to read why.
_FAULT_SECONDS = 1.0


class _World:
    """The state that init_process_group has set up."""

    def __init__(self, endpoint: Endpoint, group: ProcessGroup, launch: config.LaunchEnvironment, store: dist.Store):
        self.endpoint = endpoint
        self.group = group
        self.launch = launch
        self.store = store  # kept: rank 0's is the server
        self.num_new_groups = 0  # equal on all ranks, since all call new_group alike
        # The key is the torch group itself: torch uses a name again when it is initialised again.
        self.converted: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()
        self.num_converted: Counter[tuple[int, ...]] = Counter()  # by their ranks
        # Processes of multiprocessing end without atexit, or when the exception that ends them is forgotten.
        self.at_end = Finalize(None, destroy_process_group, exitpriority=0)


_world: _World | None = None
# How often this process has called init_process_group: part of the keys in the store, so that it can be called again.
_num_inits = 0
# A forked child's copy of its parent's world. Kept: destructors would wait for threads that the child does not have.
_inherited: list[_World] = []


def init_process_group(
    backend: str = "auto",
    *,
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | float = timedelta(minutes=5),
    auth_token: str | None = None,
) -> None:
    """Connect to the other ranks and make the default group. Collective; all ranks pass the same arguments.

    Args:
        backend: "native" (shared memory on a host, TCP between hosts; tensors of a device are staged through pinned
            memory); "nccl": the same, but collectives on tensors of a device run over NCCL, or are an error; "torch":
            the default group of torch.distributed moves the bytes (gloo, MPI, ...), or a gloo group made for it if
            there is none; destroy bagua's groups before torch's. "auto" is what BAGUA_BACKEND says, or native, with
            NCCL where every rank has a GPU of its own and torch an NCCL that fits.
        store: a torch.distributed store for the rendezvous; by default the one that torchrun's environment describes.
        rank, world_size: by default RANK and WORLD_SIZE from the environment.
        timeout: deadline of the rendezvous and of every operation of the group; a number is seconds.
        auth_token: secret of the job (`bagua token` makes one), that every rank proves to know; by default what
            BAGUA_AUTH_TOKEN or the file BAGUA_AUTH_TOKEN_FILE says. Without one, a random one that lies in the store.

    Raises:
        InvalidArgument: a variable is missing, or the ranks disagree (world size, version, token, ...); on every rank
            (RemoteError on a rank that had not read the disputed record yet). With "torch": the default group has
            other ranks, or does not move CPU tensors.
        TransportError: MASTER_PORT is in use, or rank 0 cannot be reached, or another program has written to the store.
        DeadlineExceeded: a rank did not come within the timeout; it is named.

    Example:
        >>> import bagua, torch
        >>> bagua.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> bagua.get_world_size()
        1
        >>> bagua.destroy_process_group()
    """
    global _world, _num_inits
    if _world is not None:
        raise InvalidArgument("init_process_group was called before; call destroy_process_group first")
    _num_inits += 1  # before anything can fail, so that ranks that try again count alike
    timeout = timedelta(seconds=to_seconds(timeout))
    launch = config.launch_environment(rank, world_size, needs_master=store is None)
    is_served_by_rank_0 = store is None and not launch.use_agent_store
    init = f"bagua/init{_num_inits}"
    mistake = None
    try:
        settings = _settings(backend, auth_token)
        torch_transport = TorchTransport(launch, timeout) if settings.backend == "torch" else None
    except BaguaError as error:
        mistake = error
    try:
        opening = timeout if mistake is None else min(timeout, REPORT_TIMEOUT)
        if is_served_by_rank_0 and launch.rank != 0 and _num_inits > 1:
            store = rendezvous.reopen_store(launch, init, opening)
        elif store is None:
            store = rendezvous.open_store(launch, opening)
    except BaguaError:
        if mistake is not None:
            raise mistake from None
        raise
    store_of_init = dist.PrefixStore(init, store)
    try:
        if mistake is not None:
            report_mistake(store_of_init, launch, launch.rank, launch.world_size, mistake)
            raise mistake
        endpoint, group = bootstrap(
            store_of_init,
            launch,
            "world",
            launch.rank,
            launch.world_size,
            timeout,
            settings,
            torch_transport,
            torch_transport.description if torch_transport else settings.backend,
        )
    except BaseException:
        if is_served_by_rank_0 and launch.rank == 0:
            time.sleep(_FAULT_SECONDS)
        raise
    _world = _World(endpoint, group, launch, store)


def init_beside_torch() -> None:
    """Initialises bagua with the ranks of torch.distributed, through its store, if it is not initialised; collective.

    Raises:
        InvalidArgument: torch.distributed is not initialised either.
        BaguaError: an error of ``init_process_group``.
    """
    if _world is not None:
        return
    if not dist.is_initialized():
        raise InvalidArgument(
            "neither torch.distributed nor bagua is initialised; call torch.distributed.init_process_group() first"
        )
    # A launcher that restarts the ranks may keep the store.
    store = dist.PrefixStore(f"bagua/beside{config.restart_count()}", distributed_c10d._get_default_store())
    init_process_group(store=store, rank=dist.get_rank(), world_size=dist.get_world_size())


def _settings(backend: str, auth_token: str | None) -> config.Settings:
    """The environment's settings, with init_process_group's arguments. Raises InvalidArgument for a mistake in them."""
    if backend not in config.BACKENDS:
        raise InvalidArgument(f"backend {backend!r} is unknown; the backends are {', '.join(config.BACKENDS)}")
    settings = config.settings()
    describe_thresholds(settings.thresholds)
    if auth_token is not None:
        settings = dataclasses.replace(settings, auth_token=config.checked_token(auth_token, "auth_token"))
    return dataclasses.replace(settings, backend=settings.backend if backend == "auto" else backend)


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Close a group, or all groups and connections; pending operations fail with Aborted. Idempotent.

    Args:
        group: one of new_group or from_torch_group, which is closed on this rank; None, or the default group, for all.

    Raises:
        InvalidArgument: `group` is no group of bagua's.
    """
    global _world
    if group is not None and not isinstance(group, ProcessGroup):
        raise InvalidArgument(f"destroy_process_group got {group!r}, expected None or a group made by bagua.new_group")
    if group is not None and (_world is None or group is not _world.group):
        group.close()
        return
    world, _world = _world, None
    if world is None:
        return
    world.at_end.cancel()
    world.group.close()
    world.endpoint.close()


# A rank announces its shutdown, so that its peers can tell a normal exit from a crash.
atexit.register(destroy_process_group)


def _forget_in_child() -> None:
    global _world
    if _world is not None:
        _inherited.append(_world)
        _world = None


# A forked child (a DataLoader worker) is not a rank.
os.register_at_fork(after_in_child=_forget_in_child)


def is_initialized() -> bool:
    """Returns True between init_process_group and destroy_process_group."""
    return _world is not None


def _require_world() -> _World:
    if _world is None:
        raise InvalidArgument("bagua is not initialised; call bagua.init_process_group() first")
    return _world


def get_default_group() -> ProcessGroup:
    """The group of all ranks.

    Raises:
        InvalidArgument: init_process_group has not been called.
    """
    return _require_world().group


def resolve(group: GroupLike) -> ProcessGroup:
    """The group of bagua for what the argument ``group`` of the public functions may be.

    Args:
        group: a group of bagua; None: the default group; one of torch.distributed, or a DeviceMesh with one dimension:
            that of the same ranks, as ``from_torch_group`` makes it.

    Raises:
        InvalidArgument: it is anything else.
    """
    if group is None:
        return get_default_group()
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InvalidArgument(
                f"group is a DeviceMesh with the dimensions {group.mesh_dim_names or group.ndim}, expected one: pass "
                "that of the ranks which are meant, such as mesh['dp_replicate']"
            )
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"group is of type {type(group).__name__}, expected a group of bagua.new_group(ranks) or "
            "torch.distributed.new_group(ranks), or a DeviceMesh with one dimension"
        )
    return from_torch_group(group)


def new_group(ranks: Sequence[int] | None = None, *, timeout: timedelta | float | None = None) -> ProcessGroup:
    """A group of some ranks. Every rank of the world calls it, in the same order, members or not.

    Args:
        ranks: global ranks, in any order (they are sorted, as torch does); None for all.
        timeout: deadline of its operations; by default the world's.

    Returns:
        The group. On ranks that are not members its `rank` is -1 and its operations raise InvalidArgument.
    """
    world = _require_world()
    ranks = list(range(world.group.size)) if ranks is None else sorted(int(rank) for rank in ranks)
    if not ranks or len(set(ranks)) != len(ranks) or ranks[0] < 0 or ranks[-1] >= world.group.size:
        raise InvalidArgument(
            f"ranks {ranks} must be one or more different numbers in 0..{world.group.size - 1}, each once"
        )
    world.num_new_groups += 1
    # The count is equal on all ranks because all call it in the same order; the ranks make a mistake visible.
    name = f"group{world.num_new_groups}:{format_ranks(ranks)}"
    timeout = world.group.timeout if timeout is None else timeout
    return world.group.adopt(ProcessGroup(world.endpoint, name, ranks, world.group.rank, timeout))


@contextlib.contextmanager
def tcp_streams(num: int) -> Iterator[None]:
    """Groups that are made and first used inside have ``num`` TCP connections per peer; on all ranks."""
    endpoint = _require_world().endpoint
    before = endpoint.settings
    endpoint.settings = dataclasses.replace(before, tcp_streams=num)
    try:
        yield
    finally:
        endpoint.settings = before


def from_torch_group(group: dist.ProcessGroup, *, timeout: timedelta | float | None = None) -> ProcessGroup:
    """The group of the same ranks as a torch.distributed group's. Its members call it, and may call it again.

    Several groups of the same ranks are converted in the same order on all of them.

    Args:
        group: of a torch.distributed in which every process has the rank that it has here.
        timeout: deadline of its operations; by default the world's.

    Returns:
        The group; the same one on every call. Its bytes travel over bagua's connections, not torch's.

    Raises:
        InvalidArgument: this process is not a member, or torch's ranks are not bagua's.
    """
    world = _require_world()
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(
            f"from_torch_group got {group!r}; on ranks that are not members there is no group to convert"
        )
    if (dist.get_rank(), dist.get_world_size()) != (world.group.rank, world.group.size):
        raise InvalidArgument(
            f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, bagua rank "
            f"{world.group.rank} of {world.group.size}; initialise both with the same ranks"
        )
    known = world.converted.get(group)
    if known is not None:
        return known
    ranks = dist.get_process_group_ranks(group)
    # Not by torch's name, which members may number differently (new_group with use_local_synchronization).
    world.num_converted[tuple(ranks)] += 1
    name = f"torch{world.num_converted[tuple(ranks)]}:{format_ranks(ranks)}"
    timeout = world.group.timeout if timeout is None else timeout
    converted = world.group.adopt(ProcessGroup(world.endpoint, name, ranks, world.group.rank, timeout))
    world.converted[group] = converted
    return converted


def get_rank(group: GroupLike = None) -> int:
    """This process's rank in the group; -1 when it is not a member."""
    return resolve(group).rank


def get_world_size(group: GroupLike = None) -> int:
    """Number of ranks in the group."""
    return resolve(group).size


def get_local_rank() -> int:
    """Position of this rank among the ranks of its node (LOCAL_RANK)."""
    world = _require_world()
    if world.launch.local_rank is not None:
        return world.launch.local_rank
    return _ranks_of_node(world).index(world.group.rank)


def get_local_world_size() -> int:
    """Number of ranks on this node."""
    return len(_ranks_of_node(_require_world()))


def get_node_rank() -> int:
    """Position of this node among the nodes (GROUP_RANK, or NODE_RANK where the launcher sets no GROUP_RANK)."""
    return _require_world().launch.node_rank


def _ranks_of_node(world: _World) -> list[int]:
    mine = world.endpoint.records[world.group.rank].host
    return [record.rank for record in world.endpoint.records if record.host == mine]
