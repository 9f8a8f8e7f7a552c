"""backend="torch": a process group of torch.distributed moves the payload, and two threads per peer call it.

Beside the data path: links.py makes bagua's own link to a peer as for TCP, and no data streams; then
attach() joins the peer's channel (csrc/transport/torch) to the group by a Forwarder. So failures, deadlines and
shutdown are those of every transport, and only payload travels through torch.

csrc/transport/torch cuts messages into frames and checks them; the Forwarder's threads call torch. They copy frames to
and from memory of their own, so whatever torch still does with a frame after a failure corrupts nothing.

torch's point-to-point works complete in wait() and cannot be polled before (gloo), nor cancelled, and a wait that times
out breaks the connections of the whole group. So the threads wait without a limit: the deadline is the operation's and
the core keeps it. A frame to receive is requested only when the core has posted a receive, so after a normal end no
thread is inside torch.

Invariant: of two ranks the one that dials chooses the tags of their link, others for each of its links, so a frame that
an operation left behind in torch never reaches another link.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua import _C
from bagua.config import LaunchEnvironment
from bagua.errors import BaguaError, InvalidArgument, TransportError

__all__ = ["Forwarder", "TorchTransport"]

# A link has one tag for each size of frame. Away from the small tags that programs choose for their own messages, below
# the 2^20 that the usual MPIs have.
_FIRST_TAG = 1 << 14
_NUM_LINKS = ((1 << 20) - _FIRST_TAG) // len(_C.TORCH_FRAME_SIZES)
# Counts over the life of the process: the default group of torch.distributed may outlive bagua's groups.
_links = itertools.count()

# How long the threads of a link that has ended may take; only one that is stuck in torch takes longer.
_JOIN_SECONDS = 0.3
_FLUSH_POLL_SECONDS = 0.002

# How many frames of a direction are with torch at a time: two messages, each with its header.
_WINDOW = 4
_NO_LIMIT = timedelta(days=365)
_WORK_POLL_SECONDS = 0.0002


class TorchTransport:
    """This process's use of torch.distributed as a transport.

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
        # The peer in the group and its forwarder, by the group's key.
        self._forwarders: dict[str, list[tuple[int, Forwarder]]] = defaultdict(list)
        self._stuck: list[Forwarder] = []  # of groups that failed; the closing thread's
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
        """The group that it uses; must be equal on all ranks."""
        return "torch (a gloo group of its own)" if self._is_own else f"torch (the default group, {self._cpu_backend})"

    def start(self, store: dist.Store, address: str) -> None:
        """Make the group, or take the default one; collective, called once. `address`: where an own group listens.

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
        """End the threads that failures left inside torch, which only an own group allows. After all groups are closed.

        On the program's group they stay until torch returns (when a peer exits, or the program), and block nothing.
        """
        group, self._group = self._group, None
        if self._is_own and self._stuck:
            _break_connections(group)
            deadline = time.monotonic() + _JOIN_SECONDS
            self._stuck = [forwarder for forwarder in self._stuck if not forwarder.join(deadline)]

    # ---- links

    def next_tag(self) -> int:
        """Returns the tag of the link that this rank is about to dial."""
        return _FIRST_TAG + next(_links) % _NUM_LINKS * len(_C.TORCH_FRAME_SIZES)

    def attach(self, key: str, core: _C.Group, group_peer: int, peer: int, tag: int) -> None:
        """Give the core its channel to a peer (`peer` is its global rank) and start to forward its frames."""
        link = core.attach_torch(group_peer)
        blocks_others = self._cpu_backend == "mpi"  # its wait() holds the lock that every call of MPI takes
        with self._lock:
            self._forwarders[key].append(
                (group_peer, Forwarder(link, self._group, peer, tag, blocks_others, f"{key}-{group_peer}"))
            )

    def flush(self, key: str, core: _C.Group) -> None:
        """Wait until the peers of a group have received what this rank sent, before it shuts its links down.

        The sockets of a process that exits still deliver; torch's process group does not. Returns early when the group
        has failed or has operations pending (they are aborted anyway), and at the timeout.
        """
        if self._pid != os.getpid():  # a forked child: the threads are its parent's, and they may have held any lock
            return
        deadline = time.monotonic() + self._timeout.total_seconds()
        while core.is_idle() and time.monotonic() < deadline:
            with self._lock:
                forwarders = list(self._forwarders[key])
            if not any(forwarder.link.has_unsent and not core.has_departed(peer) for peer, forwarder in forwarders):
                return
            try:
                core.check()
            except BaguaError:
                return
            time.sleep(_FLUSH_POLL_SECONDS)

    def join(self, key: str) -> None:
        """Wait for the threads of a group whose core has been closed. One that is stuck in torch is left to close()."""
        if self._pid != os.getpid():
            return
        with self._lock:
            forwarders = self._forwarders.pop(key, [])
        deadline = time.monotonic() + _JOIN_SECONDS
        self._stuck += [forwarder for _, forwarder in forwarders if not forwarder.join(deadline)]


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
            "the default group of torch.distributed is bagua itself, which would send through itself; initialise "
            'torch.distributed with "gloo", or do not pass backend="torch"'
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
        work = group.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], other, _FIRST_TAG - 1)
        work.wait(timedelta(milliseconds=1))
    except RuntimeError:
        pass


class Forwarder:
    """Moves frames between `link` and the rank `peer` until the link ends.

    Args:
        link: one peer's frames in one group.
        group: the process group of torch (or one of its backends) that moves CPU tensors.
        peer: rank in `group`.
        tag: the first of len(_C.TORCH_FRAME_SIZES) that tell this link's frames from those of other links, both ways.
        blocks_others: whether a work's wait() keeps other threads from calling `group`; then works are polled.
        name: of the threads.
    """

    def __init__(
        self, link: _C.TorchLink, group: dist.ProcessGroup, peer: int, tag: int, blocks_others: bool, name: str
    ):
        self.link = link
        self._group = group
        self._peer = peer
        self._tag = tag
        self._blocks_others = blocks_others
        # Daemons: one that is stuck inside torch must not keep the program from exiting.
        self._threads = [
            threading.Thread(target=self._run, args=(move,), name=f"bagua-torch-{verb}-{name}", daemon=True)
            for verb, move in (("send", self._send), ("recv", self._receive))
        ]
        for thread in self._threads:
            thread.start()

    def join(self, deadline: float) -> bool:
        """Wait for the threads of an ended link; False when torch still holds one at `deadline` (monotonic)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- everything below runs on the threads

    def _run(self, move: Callable[[], None]) -> None:
        try:
            move()
        except Exception as error:  # torch raises several kinds, and the core must hear of each
            rank = self.link.peer
            self.link.fail(
                TransportError(
                    f"torch.distributed lost the connection to rank {rank}: {error}; its process died or the network "
                    "between the hosts failed",
                    rank=rank,
                )
            )

    def _send(self) -> None:
        frames, works = _Frames(), deque()
        while True:
            frame = frames.next()
            size = self.link.take(frame.data_ptr(), not works) if len(works) < _WINDOW else _C.TorchLink.NONE
            if size == _C.TorchLink.ENDED:
                break
            if size == _C.TorchLink.NONE:
                self._complete(works.popleft())
                self.link.sent()
                continue
            part = frame[: _C.TORCH_FRAME_SIZES[size]]
            works.append(self._group.send([part], self._peer, self._tag + size))
            frames.advance()
        while works:  # their frames must live until torch has finished with them
            self._complete(works.popleft())

    def _receive(self) -> None:
        frames, works = _Frames(), deque()
        while True:
            size = self.link.expect(not works) if len(works) < _WINDOW else _C.TorchLink.NONE
            if size == _C.TorchLink.ENDED:
                break
            if size == _C.TorchLink.NONE:
                work, frame = works.popleft()
                self._complete(work)
                self.link.deliver(frame.data_ptr())
                continue
            frame = frames.next()
            part = frame[: _C.TORCH_FRAME_SIZES[size]]
            works.append((self._group.recv([part], self._peer, self._tag + size), frame))
            frames.advance()
        while works:
            self._complete(works.popleft()[0])

    def _complete(self, work: dist.Work) -> None:
        while self._blocks_others and not work.is_completed():
            time.sleep(_WORK_POLL_SECONDS)
        work.wait(_NO_LIMIT)


class _Frames:
    """The frames of one direction, used in turn. Pages that no frame has touched cost no memory."""

    def __init__(self) -> None:
        self._frames = [torch.empty(_C.TORCH_FRAME_SIZES[-1], dtype=torch.uint8, device="cpu") for _ in range(_WINDOW)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        return self._frames[self._turn]

    def advance(self) -> None:
        self._turn = (self._turn + 1) % _WINDOW
