"""The process-wide state (default group) and the MPI-style collectives as functions; names follow torch.distributed.

Tensors are torch tensors or NumPy arrays, of any shape and strides. Ranks in arguments (src, dst) are global ranks, as
in torch.distributed. Collectives work in place unless an output is named. With `async_op=True` they return a Work at once, otherwise they return None when this rank's part is done.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from . import _C, config, rendezvous
from .connections import Endpoint
from .errors import BaguaError, InvalidArgument
from .group import ProcessGroup, ReduceOp, Work
from .interfaces import choose_address
from .torch_transport import TorchTransport
from .work import to_seconds

__all__ = [
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "destroy_process_group",
    "empty",
    "from_torch_group",
    "gather",
    "get_default_group",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "neighbor_average",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]

logger = logging.getLogger("bagua")

# How long rank 0, when it gives up, leaves the store open for the others to read why.
_FAULT_SECONDS = 1.0


class _World:
    """What init_process_group set up."""

    def __init__(self, endpoint: Endpoint, group: ProcessGroup, launch: config.LaunchEnvironment, store: dist.Store):
        self.endpoint = endpoint
        self.group = group
        self.launch = launch
        self.store = store  # kept: rank 0's is the server
        self.groups = [group]
        self.num_new_groups = 0  # equal on all ranks, since all call new_group alike


_world: _World | None = None
# How often this process has called init_process_group: part of the keys in the store, so that it can be called again.
_num_inits = 0
# What a forked child has of its parent's. Kept: the destructors would wait for threads that it does not have.
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
    """Meet the other ranks and make the default group. Collective; all ranks pass the same arguments.

    Args:
        backend: "native" (shared memory on a host, TCP between hosts); "torch": the default group of torch.distributed
            moves the bytes (gloo, MPI, ...), or a gloo group made for it if there is none; destroy bagua's groups
            before torch's. "auto" is what BAGUA_BACKEND says, or native.
        store: a torch.distributed store to meet in; by default the one that torchrun's environment describes.
        rank, world_size: by default RANK and WORLD_SIZE from the environment.
        timeout: deadline of the rendezvous and of every operation of the group; a number is seconds.
        auth_token: secret that connections must prove; by default a random one that only this job's store knows.

    Raises:
        InvalidArgument: a variable is missing, or the ranks disagree (world size, version, token, ...); on every rank
            (RemoteError on a rank that had not come to the disputed record yet). With "torch": the default group has
            other ranks, or does not move CPU tensors.
        TransportError: MASTER_PORT is in use, or rank 0 cannot be reached.
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
    if backend not in config.BACKENDS:
        raise InvalidArgument(f"backend {backend!r} is unknown; the backends are {', '.join(config.BACKENDS)}")
    timeout = timedelta(seconds=to_seconds(timeout))
    settings = config.settings()
    thresholds = _describe_thresholds(settings.thresholds)
    backend = settings.backend if backend == "auto" else backend
    launch = config.launch_environment(rank, world_size, needs_master=store is None)
    through_torch = TorchTransport(launch, timeout) if backend == "torch" else None
    is_server = store is None and launch.rank == 0 and not launch.use_agent_store
    store = rendezvous.open_store(launch, timeout) if store is None else store
    scoped = dist.PrefixStore(f"bagua/init{_num_inits}", store)
    # Without a second process of this job there is nobody else to listen to; torchrun tells how many share the host.
    address = choose_address(settings.interface, launch.single_host, launch.master_addr)
    endpoint = Endpoint(settings, address, through_torch)
    try:
        mine = rendezvous.RankRecord(
            rank=launch.rank,
            world_size=launch.world_size,
            version=_C.__version__,
            protocol=rendezvous.PROTOCOL,
            backend=through_torch.description if through_torch else backend,
            thresholds=thresholds,
            host=rendezvous.host_identity(launch.node_rank),
            node_rank=launch.node_rank,
            address=address.address,
            port=endpoint.port,
            unix_name=endpoint.unix_name,
            pid=os.getpid(),
            token_proof="",
        )
        records, secret = rendezvous.exchange_records(scoped, mine, auth_token or settings.auth_token, timeout)
        if through_torch:
            through_torch.start(scoped, address.address)
        endpoint.start(records, secret)
        group = ProcessGroup(endpoint, "world", range(launch.world_size), launch.rank, timeout)
    except BaseException as error:
        endpoint.close()
        if is_server and isinstance(error, BaguaError):
            time.sleep(_FAULT_SECONDS)
        raise
    _world = _World(endpoint, group, launch, store)
    logger.info(
        "rank %d of %d listens on %s:%d (%s)",
        launch.rank,
        launch.world_size,
        address.address,
        endpoint.port,
        address.interface,
    )


def _describe_thresholds(changes: dict[str, int]) -> str:
    """How the selector's thresholds differ from the defaults, as the ranks compare it."""
    known = _C.default_thresholds()
    for name in changes:
        if name not in known:
            raise InvalidArgument(f"BAGUA_THRESHOLDS names {name!r}; the thresholds are {', '.join(sorted(known))}")
    return ",".join(f"{name}={value}" for name, value in sorted(changes.items())) or "the defaults"


def destroy_process_group() -> None:
    """Close all groups and connections; pending operations fail with Aborted. Idempotent."""
    global _world
    world, _world = _world, None
    if world is None:
        return
    for group in reversed(world.groups):
        group.close()
    world.endpoint.close()


# A rank that ends says goodbye, so that its peers can tell an end from a crash.
atexit.register(destroy_process_group)


def _leave_in_child() -> None:
    global _world
    if _world is not None:
        _inherited.append(_world)
        _world = None


# A forked child (a DataLoader worker) is no rank.
os.register_at_fork(after_in_child=_leave_in_child)


def is_initialized() -> bool:
    """Whether init_process_group has been called (and destroy_process_group has not)."""
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


def _resolve(group: ProcessGroup | None) -> ProcessGroup:
    return get_default_group() if group is None else group


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
    members = ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]}({len(ranks)})"
    name = f"group{world.num_new_groups}:{members}"
    group = ProcessGroup(
        world.endpoint, name, ranks, world.group.rank, world.group.timeout if timeout is None else timeout
    )
    world.groups.append(group)
    return group


def from_torch_group(group: dist.ProcessGroup, *, timeout: timedelta | float | None = None) -> ProcessGroup:
    """The group of the same ranks as a torch.distributed group's. Its members call it, and may call it again.

    Args:
        group: of a torch.distributed in which every process has the rank that it has here.
        timeout: deadline of its operations; by default the world's.

    Returns:
        The group; the same one whenever it is asked for again. Its bytes go bagua's way, not torch's.

    Raises:
        InvalidArgument: this process is not a member, or torch's ranks are not bagua's.
    """
    world = _require_world()
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidArgument(f"from_torch_group got {group!r}; on ranks that are not members there is no group to convert")
    if (dist.get_rank(), dist.get_world_size()) != (world.group.rank, world.group.size):
        raise InvalidArgument(
            f"torch.distributed calls this process rank {dist.get_rank()} of {dist.get_world_size()}, bagua rank "
            f"{world.group.rank} of {world.group.size}; initialise both with the same ranks"
        )
    ranks = dist.get_process_group_ranks(group)
    # torch names its groups alike on all members.
    name = f"torch:{group.group_name}:{len(ranks)} from {min(ranks)}"
    for known in world.groups:
        if known.name == name:
            return known
    converted = ProcessGroup(
        world.endpoint, name, ranks, world.group.rank, world.group.timeout if timeout is None else timeout
    )
    world.groups.append(converted)
    return converted


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in the group; -1 when it is not a member."""
    return _resolve(group).rank


def get_world_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in the group."""
    return _resolve(group).size


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
    """Position of this node among the nodes (GROUP_RANK)."""
    return _require_world().launch.node_rank


def _ranks_of_node(world: _World) -> list[int]:
    mine = world.endpoint.records[world.group.rank].host
    return [record.rank for record in world.endpoint.records if record.host == mine]


def empty(*size: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> torch.Tensor:
    """A CPU tensor in memory that the group's ranks on this host share: collectives on it are copy-free.

    Args:
        size: the shape, as numbers or as one sequence.

    Returns:
        A contiguous tensor of that shape. It is zeroed (the kernel hands the memory out so), despite its name.
    """
    shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
    numel = 1
    for extent in shape:
        numel *= int(extent)
    return _resolve(group).empty(numel, dtype).view(shape)


def _finish(work: Work, async_op: bool) -> Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _group_rank(group: ProcessGroup, rank: int, name: str) -> int:
    if rank not in group.ranks:
        group.check()
        raise InvalidArgument(f"{name} {rank} is not a rank of the group '{group.name}' (ranks {group.ranks})")
    return group.ranks.index(rank)


def all_reduce(
    tensor, op=ReduceOp.SUM, group=None, async_op=False, *, codec: str | None = None, hierarchical: bool = False
) -> Work | None:
    """tensor <- op over ranks of tensor.

    Args:
        tensor: same shape and type on all ranks.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        codec: name of a codec ("fp16", "bf16", "minmax_uint8") for the two-shot compressed all-reduce: what travels is
            encoded, sums are in f32, and all ranks end bit-identical. SUM and AVG of f32, f16 and bf16.
        hierarchical: reduce inside each node at full precision, then among one rank per node (with the codec, if
            any), then broadcast inside each node. Right for nodes with different numbers of ranks. Pays where the
            network is slower than the node.

    Raises:
        InvalidArgument: type, op or codec do not fit, or the ranks called different operations.
        DeadlineExceeded, TransportError, RemoteError: a rank is late, dead, or failed first; the message names it.
    """
    work = _resolve(group).all_reduce(tensor, op, codec=codec, hierarchical=hierarchical, blocking=not async_op)
    return _finish(work, async_op)


def neighbor_average(
    tensor, topology: str = "ring", step: int = 0, codec: str | None = None, group=None, async_op: bool = False
) -> Work | None:
    """tensor <- weighted average of this rank's and its neighbours' tensors: decentralised communication.

    All topologies keep the mean over ranks (they are doubly stochastic).

    Args:
        tensor: floating point, same shape and type on all ranks.
        topology: "ring" (left, self, right: 1/3 each), "shift_one" (pairs that change with each step), "exponential"
            (takes from the rank 2^(step mod ceil(log2 n)) places before; exact mean after log2 n steps for n a power of
            two) or "all" (the mean over all ranks).
        step: the same on all ranks: how many averagings came before. Only shift_one and exponential depend on it.
        codec: name of a codec for what travels; the own values stay as they are. f32, f16 and bf16.

    Raises:
        InvalidArgument: topology, step, type or codec do not fit, or the ranks called different operations.
        DeadlineExceeded, TransportError, RemoteError: a rank is late, dead, or failed first; the message names it.

    Source: the primitives D_FP_S and D_LP_S of arXiv 2107.01499.
    """
    work = _resolve(group).neighbor_average(tensor, topology, step, codec=codec, blocking=not async_op)
    return _finish(work, async_op)


def reduce(tensor, dst: int, op=ReduceOp.SUM, group=None, async_op=False) -> Work | None:
    """tensor of rank `dst` <- op over ranks of tensor. The other ranks' tensors may be used as scratch."""
    group = _resolve(group)
    return _finish(group.reduce(tensor, _group_rank(group, dst, "dst"), op, blocking=not async_op), async_op)


def broadcast(tensor, src: int, group=None, async_op=False, *, codec: str | None = None) -> Work | None:
    """tensor <- tensor of rank `src`; with a codec the decoded values, on rank `src` too: all ranks end bit-identical."""
    group = _resolve(group)
    src = _group_rank(group, src, "src")
    return _finish(group.broadcast(tensor, src, codec=codec, blocking=not async_op), async_op)


def barrier(group=None, async_op=False) -> Work | None:
    """Ends when every rank of the group has called it."""
    return _finish(_resolve(group).barrier(blocking=not async_op), async_op)


def all_gather(output, input, group=None, async_op=False, *, codec: str | None = None) -> Work | None:
    """output <- the inputs of all ranks, one after the other by rank. output has `size` times input's elements.

    With a codec the decoded values, the own ones too: all ranks end bit-identical.
    """
    return _finish(_resolve(group).all_gather(output, input, codec=codec, blocking=not async_op), async_op)


def gather(output, input, dst: int, group=None, async_op=False) -> Work | None:
    """output of rank `dst` <- the inputs of all ranks by rank; the other ranks pass output=None."""
    group = _resolve(group)
    return _finish(group.gather(output, input, _group_rank(group, dst, "dst"), blocking=not async_op), async_op)


def scatter(output, input, src: int, group=None, async_op=False) -> Work | None:
    """output <- this rank's block of rank `src`'s input; the other ranks pass input=None."""
    group = _resolve(group)
    return _finish(group.scatter(output, input, _group_rank(group, src, "src"), blocking=not async_op), async_op)


def reduce_scatter(
    output, input, op=ReduceOp.SUM, group=None, async_op=False, *, codec: str | None = None
) -> Work | None:
    """output <- op over ranks of this rank's block of input. input has `size` times output's elements.

    With a codec what travels is encoded once, the own block too; sums are in f32 and rounded once. SUM and AVG.
    """
    return _finish(_resolve(group).reduce_scatter(output, input, op, codec=codec, blocking=not async_op), async_op)


def all_to_all(
    output, input, output_splits=None, input_splits=None, group=None, async_op=False, *, codec: str | None = None
) -> Work | None:
    """Block r of input goes to rank r; block r of output comes from rank r.

    Args:
        output_splits, input_splits: rows (of dimension 0) per rank; equal blocks by default.
        codec: name of a codec; every block, the own one too, is encoded and decoded once.
    """
    group = _resolve(group)
    work = group.all_to_all(output, input, output_splits, input_splits, codec=codec, blocking=not async_op)
    return _finish(work, async_op)


def send(tensor, dst: int, group=None, async_op=False) -> Work | None:
    """Send tensor to rank `dst`, which calls recv with a tensor of the same size and type."""
    group = _resolve(group)
    return _finish(group.send(tensor, _group_rank(group, dst, "dst")), async_op)


def recv(tensor, src: int, group=None, async_op=False) -> Work | None:
    """tensor <- what rank `src` sends. Messages of one pair of ranks arrive in the order in which they were sent."""
    group = _resolve(group)
    return _finish(group.recv(tensor, _group_rank(group, src, "src")), async_op)


def broadcast_object(obj: object, src: int = 0, group=None) -> object:
    """The picklable object of rank `src`, on all ranks. Unpickles: use it only among ranks that trust each other."""
    group = _resolve(group)
    group.check()
    return group.broadcast_object(obj, _group_rank(group, src, "src"))


def all_gather_object(obj: object, group=None) -> list:
    """The picklable objects of all ranks, by rank. Unpickles: use it only among ranks that trust each other."""
    group = _resolve(group)
    group.check()
    return group.all_gather_object(obj)
