"""Makes a group of processes that are not connected yet: endpoint, rendezvous in a store, and the group of all of them.

Used for the world (world.py), and for a group of torch.distributed whose ranks have no world of bagua in common.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua import _C, config
from bagua.distributed.job_ranks import JobRanks
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import BaguaError, InvalidArgument, TransportError
from bagua.net import rendezvous
from bagua.net.interfaces import choose_address
from bagua.net.links import Endpoint
from bagua.net.torch_transport import TorchTransport

__all__ = ["bootstrap", "REPORT_TIMEOUT", "bootstrap_alone", "describe_thresholds", "format_ranks", "report_mistake"]

logger = logging.getLogger("bagua")

# How long a rank that has made a mistake tries to reach the others' store.
REPORT_TIMEOUT = timedelta(seconds=10)

_has_warned = False


def bootstrap(
    store: dist.Store,
    launch: config.LaunchEnvironment,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    settings: config.Settings,
    torch_transport: TorchTransport | None = None,
    backend: str = "native",
) -> tuple[Endpoint, ProcessGroup]:
    """The rendezvous of `size` processes in a store that only they use, and the group of all of them."""
    with rendezvous.meeting(store, rank, size, timeout, launch.use_agent_store) as meeting:
        address = choose_address(settings.interface, launch.single_host, launch.master_addr)
        try:
            endpoint = Endpoint(settings, address, torch_transport)
        except TransportError as error:  # this rank has nothing left to make it of
            raise TransportError(str(error), rank=rank) from error
        try:
            mine = rendezvous.RankRecord(
                rank=rank,
                world_size=size,
                version=_C.__version__,
                protocol=rendezvous.PROTOCOL,
                backend=backend,
                thresholds=describe_thresholds(settings.thresholds),
                host=rendezvous.host_identity(launch.node_rank),
                node_rank=launch.node_rank,
                address=address.published,
                port=endpoint.port,
                unix_name=endpoint.unix_name,
                pid=os.getpid(),
                heartbeat_timeout_ms=int(1000 * settings.heartbeat_timeout_s),
            )
            records, credentials = meeting.exchange(mine, settings.auth_token)
            if torch_transport:
                torch_transport.start(store, address.address)
            endpoint.start(records, credentials, timeout.total_seconds())
            group = ProcessGroup(endpoint, name, range(size), rank, timeout)
        except BaseException:
            endpoint.close()
            raise
    logger.info(
        "rank %d of %d in %s listens on %s:%d (%s)",
        rank,
        size,
        name,
        address.address,
        endpoint.port,
        address.interface,
    )
    if rank == 0 and settings.auth_token is None:
        _warn_without_token(records)
    return endpoint, group


def _warn_without_token(records: Sequence[rendezvous.RankRecord]) -> None:
    """Once per process, where other hosts can reach the ranks and no token keeps anybody out."""
    global _has_warned
    if _has_warned or all(ipaddress.ip_address(record.address).is_loopback for record in records):
        return
    _has_warned = True
    logger.warning(
        "this job has no token: whoever reaches the store at MASTER_ADDR:MASTER_PORT can join it as a rank or take "
        "the place of one, and read and change what it computes; make a token with `bagua token --output FILE` and "
        "give it to all ranks (BAGUA_AUTH_TOKEN_FILE), or keep others out of this network (docs/security.md)"
    )


def report_mistake(
    store: dist.Store, launch: config.LaunchEnvironment, rank: int, size: int, mistake: BaguaError
) -> None:
    """Reports to the other ranks why this one does not come to their rendezvous, as far as the store can be reached."""
    with contextlib.suppress(BaguaError), rendezvous.meeting(store, rank, size, REPORT_TIMEOUT, launch.use_agent_store):
        raise mistake


def bootstrap_alone(
    store: dist.Store, ranks: Sequence[int], rank: int, world_size: int, timeout: timedelta
) -> tuple[ProcessGroup, Callable[[], None]]:
    """A group beside the world, or without one: its members connect by themselves and share nothing with other groups.

    Args:
        store: new, and used by these ranks only.
        ranks: global ranks of the members, in the group's order; a rank of the group counts within these.
        rank, world_size: this process among all processes of the job.
        timeout: deadline of the rendezvous and of every operation.

    Returns:
        The group, and a function that closes its endpoint after the group itself was closed.

    Raises:
        BaguaError: what init_process_group raises.
    """
    launch = config.launch_environment(rank, world_size, needs_master=False)
    try:
        settings = config.settings()
        if settings.backend == "torch":
            raise InvalidArgument(
                f"BAGUA_BACKEND=torch moves bytes for all ranks, but the group has {format_ranks(ranks)} of "
                f"{world_size}; call bagua.init_process_group() on all ranks first"
            )
    except InvalidArgument as error:
        report_mistake(store, launch, list(ranks).index(rank), len(ranks), error)
        raise
    name = f"ranks {format_ranks(ranks)}"
    endpoint, group = bootstrap(store, launch, name, list(ranks).index(rank), len(ranks), timeout, settings)
    group.job_ranks = JobRanks(name, ranks)
    return group, endpoint.close


def describe_thresholds(changes: dict[str, int]) -> str:
    """Returns the selector's thresholds that are not the defaults, as text that the ranks compare.

    Raises:
        InvalidArgument: there is no such threshold.
    """
    known = _C.default_thresholds()
    for name in changes:
        if name not in known:
            raise InvalidArgument(f"BAGUA_THRESHOLDS names {name!r}; the thresholds are {', '.join(sorted(known))}")
    return ",".join(f"{name}={value}" for name, value in sorted(changes.items())) or "the defaults"


def format_ranks(ranks: Sequence[int]) -> str:
    """All ranks if they are few, otherwise the first, the last and their number."""
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]}({len(ranks)})"
