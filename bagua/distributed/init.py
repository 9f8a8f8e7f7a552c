"""How processes meet: an endpoint for each, the rendezvous in a store of theirs, and the group of all of them.

The world is met so (world.py), and a group of torch.distributed whose ranks have no world in common.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from bagua import _C, config
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument
from bagua.net import rendezvous
from bagua.net.interfaces import choose_address
from bagua.net.links import Endpoint
from bagua.net.torch_transport import TorchTransport

__all__ = ["describe_thresholds", "meet", "open_alone", "spell"]

logger = logging.getLogger("bagua")


def meet(
    store: dist.Store,
    launch: config.LaunchEnvironment,
    name: str,
    rank: int,
    size: int,
    timeout: timedelta,
    settings: config.Settings,
    auth_token: str | None = None,
    through_torch: TorchTransport | None = None,
    backend: str = "native",
) -> tuple[Endpoint, ProcessGroup]:
    """The rendezvous of `size` processes in a store that is theirs alone, and the group of all of them."""
    # Without a second process of this job there is nobody else to listen to; torchrun tells how many share the host.
    address = choose_address(settings.interface, launch.single_host, launch.master_addr)
    endpoint = Endpoint(settings, address, through_torch)
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
            address=address.address,
            port=endpoint.port,
            unix_name=endpoint.unix_name,
            pid=os.getpid(),
            token_proof="",
        )
        records, secret = rendezvous.exchange_records(store, mine, auth_token or settings.auth_token, timeout)
        if through_torch:
            through_torch.start(store, address.address)
        endpoint.start(records, secret)
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
    return endpoint, group


def open_alone(
    store: dist.Store, ranks: Sequence[int], rank: int, world_size: int, timeout: timedelta
) -> tuple[ProcessGroup, Callable[[], None]]:
    """A group beside the world, or without one: its members meet by themselves and share nothing with other groups.

    Args:
        store: of these ranks alone, and new.
        ranks: global ranks of the members, in the group's order; a rank of the group counts within these.
        rank, world_size: this process among all processes of the job.
        timeout: deadline of the rendezvous and of every operation.

    Returns:
        The group, and what closes its connections after the group itself.

    Raises:
        BaguaError: what init_process_group raises.
    """
    settings = config.settings()
    if settings.backend == "torch":
        raise InvalidArgument(
            f"BAGUA_BACKEND=torch moves bytes for all ranks, but the group has {spell(ranks)} of {world_size}; call "
            "bagua.init_process_group() on all ranks first"
        )
    launch = config.launch_environment(rank, world_size, needs_master=False)
    name = f"ranks {spell(ranks)}"
    endpoint, group = meet(store, launch, name, list(ranks).index(rank), len(ranks), timeout, settings)
    return group, endpoint.close


def describe_thresholds(changes: dict[str, int]) -> str:
    """How the selector's thresholds differ from the defaults, as the ranks compare it."""
    known = _C.default_thresholds()
    for name in changes:
        if name not in known:
            raise InvalidArgument(f"BAGUA_THRESHOLDS names {name!r}; the thresholds are {', '.join(sorted(known))}")
    return ",".join(f"{name}={value}" for name, value in sorted(changes.items())) or "the defaults"


def spell(ranks: Sequence[int]) -> str:
    """All of them if they are few, otherwise enough to see a mistake."""
    return ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}..{ranks[-1]}({len(ranks)})"
