"""Rank, world size and other facts about this process, under the original project's names.

They work before init_process_group too, because programs choose their device with them. Until then they return the
values that the launcher set in the environment; without a launcher, this process is the only one.
"""

from __future__ import annotations

import socket

from bagua import config
from bagua.buckets import DEFAULT_BUCKET_BYTES
from bagua.distributed import world

__all__ = [
    "find_free_network_port",
    "get_default_bucket_size",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_world_size",
]


def get_rank() -> int:
    """Returns the rank of this process among all."""
    return world.get_rank() if world.is_initialized() else _launched().rank


def get_world_size() -> int:
    """Returns the number of ranks."""
    return world.get_world_size() if world.is_initialized() else _launched().world_size


def get_local_rank() -> int:
    """Returns the position of this rank among those of its node."""
    return world.get_local_rank() if world.is_initialized() else _launched().local_rank or 0


def get_local_size() -> int:
    """Returns the number of ranks on this node."""
    return world.get_local_world_size() if world.is_initialized() else _launched().local_world_size


def get_node_rank() -> int:
    """Returns the position of this node among the nodes."""
    return world.get_node_rank() if world.is_initialized() else _launched().node_rank


def get_master_addr() -> str:
    """Returns the address of rank 0, as the launcher has set it; 127.0.0.1 without a launcher."""
    return _launched().master_addr


def get_default_bucket_size() -> int:
    """Returns the default maximum size of a bucket, in bytes."""
    return DEFAULT_BUCKET_BYTES


def find_free_network_port() -> int:
    """Returns a TCP port of this host on which no process listens at the moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))  # on all addresses, so that it is free on each of them
        return probe.getsockname()[1]


def _launched() -> config.LaunchEnvironment:
    if config.is_launched():
        return config.launch_environment(needs_master=False)
    return config.launch_environment(rank=0, world_size=1, needs_master=False)
