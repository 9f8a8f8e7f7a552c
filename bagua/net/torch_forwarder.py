"""Two threads that move the frames of one peer through a process group of torch.distributed.

Beside the data path of the core: csrc/transport/torch cuts messages into frames and checks them, these threads call
torch. They copy frames to and from memory of their own, so whatever torch still does with a frame after a failure
harms nobody.

torch's point-to-point works complete in wait() and cannot be asked before (gloo), nor withdrawn, and a wait that times
out breaks the connections of the whole group. So the threads wait without a limit: the deadline is the operation's and
the core keeps it. A frame to receive is asked for only when the core has posted a receive, so on a normal end no
thread is inside torch.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from bagua import _C
from bagua.errors import TransportError

__all__ = ["Pump"]

# How many frames of a direction are with torch at a time: two messages, each with its head.
_WINDOW = 4
_NO_LIMIT = timedelta(days=365)
_POLL_SECONDS = 0.0002


class Pump:
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
        # Daemons: one that torch does not let go of must not keep the program from ending.
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

    # ---- on the threads

    def _run(self, move: Callable[[], None]) -> None:
        try:
            move()
        except Exception as error:  # torch raises several kinds, and the core must learn of all of them
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
        while works:  # kept until torch is through with their memory
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
            time.sleep(_POLL_SECONDS)
        work.wait(_NO_LIMIT)


class _Frames:
    """As many frames as may be with torch at a time, in turn. Pages that no frame has needed cost no memory."""

    def __init__(self) -> None:
        self._frames = [torch.empty(_C.TORCH_FRAME_SIZES[-1], dtype=torch.uint8) for _ in range(_WINDOW)]
        self._turn = 0

    def next(self) -> torch.Tensor:
        return self._frames[self._turn]

    def advance(self) -> None:
        self._turn = (self._turn + 1) % _WINDOW
