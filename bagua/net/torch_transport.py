"""backend="torch": which process group of torch.distributed moves the bytes, and the pumps that call it.

Beside the data path: links.py makes bagua's own control connection to a peer as for TCP, without data streams;
then attach() joins the peer's channel (csrc/transport/torch) to the group by a Pump. So failures, deadlines and
goodbyes are those of every transport, and only payload travels through torch.

Invariant: of two ranks the one that dials names the tags of their link, others for each of its links, so a frame that
an operation left behind in torch never reaches another link.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua import _C
from bagua.config import LaunchEnvironment
from bagua.errors import BaguaError, InvalidArgument, TransportError
from bagua.net.torch_forwarder import Pump

__all__ = ["TorchTransport"]

# A link has one tag for each size of frame. Away from the small tags that programs choose for their own messages, below
# the 2^20 that the usual MPIs have.
_FIRST_TAG = 1 << 14
_NUM_LINKS = ((1 << 20) - _FIRST_TAG) // len(_C.TORCH_FRAME_SIZES)
# Counts over the life of the process: the default group of torch.distributed may outlive bagua's groups.
_links = itertools.count()

# How long the threads of a link that has ended may take; only one that is stuck in torch takes longer.
_JOIN_SECONDS = 0.3
_POLL_SECONDS = 0.002


class TorchTransport:
    """The way through torch.distributed of one process.

    Uses the default group of torch.distributed if there is one, otherwise (start) a gloo group of its own, which
    leaves torch.distributed alone: the program may initialise it before or after.

    Args:
        launch: this process's rank and the number of ranks.
        timeout: of making the group, and of waiting at the end for peers to receive what was sent.

    Raises:
        InvalidArgument: the default group has other ranks or cannot move CPU tensors; or there is none, and no gloo.
    """

    def __init__(self, launch: LaunchEnvironment, timeout: timedelta):
        self._pid = os.getpid()
        self._launch = launch
        self._timeout = timeout
        self._lock = threading.Lock()  # guards the next one
        self._pumps: dict[str, list[tuple[int, Pump]]] = defaultdict(list)  # by group name: peer in the group, pump
        self._stuck: list[Pump] = []  # of groups that failed; the closing thread's
        self._group: dist.ProcessGroup | None = None
        self._is_own = not dist.is_initialized()
        self._cpu_backend = "gloo" if self._is_own else _cpu_backend_of_default_group(launch)
        if self._is_own and not dist.is_gloo_available():
            raise InvalidArgument(
                'backend="torch" needs a process group, and this torch was built without gloo; call '
                "torch.distributed.init_process_group with a backend that it has first"
            )

    @property
    def description(self) -> str:
        """What all ranks must have in common."""
        return "torch (a gloo group of its own)" if self._is_own else f"torch (the default group, {self._cpu_backend})"

    def start(self, store: dist.Store, address: str) -> None:
        """Make or take the group; collective, called once. `address`: where an own group listens.

        Raises:
            TransportError: the gloo group could not be made; a rank did not come or cannot be reached.
        """
        if not self._is_own:
            self._group = dist.group.WORLD
            return
        options = dist.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._threads = 1  # they run torch's collectives, of which there are none here
        try:
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", store), self._launch.rank, self._launch.world_size, options
            )
        except RuntimeError as error:  # torch's DistError is one
            raise TransportError(
                f"torch could not make a gloo group of {self._launch.world_size} ranks at {address}: {error}; see the "
                "logs of the other ranks, and choose the interface with BAGUA_SOCKET_IFNAME"
            ) from error

    def close(self) -> None:
        """End the threads that failures left in torch, which takes an own group. After all groups are closed.

        On the program's group they stay until torch lets them go (a peer ends, or the program), and hold nothing up.
        """
        group, self._group = self._group, None
        if self._is_own and self._stuck:
            _break_connections(group)
            deadline = time.monotonic() + _JOIN_SECONDS
            self._stuck = [pump for pump in self._stuck if not pump.join(deadline)]

    # ---- links

    def next_tag(self) -> int:
        """For the link that this rank is about to dial."""
        return _FIRST_TAG + next(_links) % _NUM_LINKS * len(_C.TORCH_FRAME_SIZES)

    def attach(self, name: str, core: _C.Group, group_peer: int, peer: int, control_fd: int, tag: int) -> None:
        """Give the core its channel to a peer (`peer` is its global rank) and start to pump."""
        link = core.attach_torch(group_peer, control_fd)
        blocks_others = self._cpu_backend == "mpi"  # its wait() holds the lock that every call of MPI takes
        with self._lock:
            self._pumps[name].append(
                (group_peer, Pump(link, self._group, peer, tag, blocks_others, f"{name}-{group_peer}"))
            )

    def flush(self, name: str, core: _C.Group) -> None:
        """Wait until the peers of a group have received what this rank sent, before it says goodbye.

        Sockets of a process that ends still deliver; torch's process group does not. Returns early when the group has
        failed or has operations pending (they are aborted anyway), and at the timeout.
        """
        if self._pid != os.getpid():  # a forked child: the threads are its parent's, and they may have held any lock
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while core.is_idle() and time.monotonic() < deadline:
            with self._lock:
                pumps = list(self._pumps[name])
            if not any(pump.link.has_unsent and not core.has_departed(peer) for peer, pump in pumps):
                return
            try:
                core.check()
            except BaguaError:
                return
            time.sleep(_POLL_SECONDS)

    def join(self, name: str) -> None:
        """Wait for the threads of a group whose core has been closed. One that is stuck in torch is left to close()."""
        if self._pid != os.getpid():
            return
        with self._lock:
            pumps = self._pumps.pop(name, [])
        deadline = time.monotonic() + _JOIN_SECONDS
        self._stuck += [pump for _, pump in pumps if not pump.join(deadline)]


def _cpu_backend_of_default_group(launch: LaunchEnvironment) -> str:
    """Name of the backend that moves CPU tensors there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (launch.rank, launch.world_size):
        raise InvalidArgument(
            f"this process is rank {rank} of {world_size} in torch.distributed but rank {launch.rank} of "
            f'{launch.world_size} in bagua; backend="torch" uses the default group of torch.distributed, so give both '
            "the same rank and world size"
        )
    config = dist.get_backend_config()
    by_device = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    name = by_device.get("cpu")
    if name == "bagua":
        raise InvalidArgument(
            "the default group of torch.distributed is bagua itself, so bytes would go round in circles; initialise "
            'torch.distributed with "gloo", or leave backend="torch" out'
        )
    if name is None or not _has_cpu_backend():
        raise InvalidArgument(
            f"the default group of torch.distributed ({config}) does not move CPU tensors; initialise it with "
            '"cpu:gloo,cuda:nccl", or call bagua.init_process_group before torch.distributed'
        )
    return name


def _has_cpu_backend() -> bool:
    try:
        return dist.group.WORLD._get_backend(torch.device("cpu")) is not None
    except RuntimeError:
        return False


def _break_connections(group: dist.ProcessGroup) -> None:
    """Have every pending call of a gloo group fail: a timeout breaks all of its connections."""
    other = (group.rank() + 1) % group.size()
    try:
        work = group.recv([torch.empty(1, dtype=torch.uint8)], other, _FIRST_TAG - 1)
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass
