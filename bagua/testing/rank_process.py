"""The parent's view of one rank: its process, connection, exit status and stack dumps."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

from bagua.testing import spawner, worker

EXIT_LIMIT_S = 20.0
_START_LIMIT_S = 120.0
_DUMP_LIMIT_S = 2.0


class RankProcess:
    """A process that runs worker.rank_main. Its stdout and stderr are this process's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        exit_read, exit_write = os.pipe()
        self._dump = os.memfd_create("stacks")
        self._code: int | None = None
        self.connection = Connection(ours.detach())
        self.exit_pipe = Connection(exit_read, writable=False)
        with theirs:
            _Spawner.shared().fork(spawner.RankDescriptors(theirs.fileno(), exit_write, 1, 2, self._dump))
        os.close(exit_write)
        if not self.exit_pipe.poll(_START_LIMIT_S):
            raise RuntimeError(f"rank {rank} was not started within {_START_LIMIT_S:.0f} s")
        self.pid = spawner.read_number(self.exit_pipe.fileno())

    def receive(self) -> worker.Outcome | None:
        """Returns the answer to the last task, None if the rank is dead."""
        try:
            return worker.Outcome(*self.connection.recv()) if self.connection.poll() else None
        except (EOFError, OSError):
            return None

    def wait_exit(self, timeout: float) -> int | None:
        """Waits for the exit status, negative for a signal; None if the rank is still running after `timeout`."""
        if self._code is None and self.exit_pipe.poll(max(0.0, timeout)):
            self._code = spawner.read_number(self.exit_pipe.fileno())
        return self._code

    def is_stopped(self) -> bool:
        """Returns True if the process was stopped by SIGSTOP."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.wait_exit(0) is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def dump_bytes(self) -> int:
        """Returns the number of bytes of stacks that the rank has written."""
        return os.fstat(self._dump).st_size

    def read_dump(self) -> str:
        """Returns the stacks that the rank wrote after a fatal signal or worker.STACK_SIGNAL."""
        return os.pread(self._dump, self.dump_bytes(), 0).decode(errors="replace")

    def close(self) -> None:
        """Waits for the process, which must be ending or killed, and releases the descriptors of this end."""
        self.connection.close()
        self.wait_exit(EXIT_LIMIT_S)
        self.exit_pipe.close()
        os.close(self._dump)


def prepare() -> None:
    """Starts the spawner, if it is not running, so that it imports torch in the background."""
    _Spawner.shared()


def dump_stacks(ranks: list[RankProcess]) -> str:
    """Returns the stack of every thread of the given ranks."""
    before = [rank.dump_bytes() for rank in ranks]
    for rank in ranks:
        rank.signal(worker.STACK_SIGNAL)
    deadline = time.monotonic() + _DUMP_LIMIT_S
    sizes = None
    while time.monotonic() < deadline:
        # The dumps are complete when each has begun and none has grown since the last check.
        previous, sizes = sizes, [rank.dump_bytes() for rank in ranks]
        if sizes == previous and all(size > start for size, start in zip(sizes, before, strict=True)):
            break
        time.sleep(0.05)
    return "\n".join(f"--- rank {rank.rank} (process {rank.pid})\n{_stack_of(rank)}" for rank in ranks)


def _stack_of(rank: RankProcess) -> str:
    code = rank.wait_exit(0)
    if code is not None:
        return f"    has ended with exit code {code}\n{rank.read_dump()}"
    if rank.is_stopped():
        return "    is stopped (SIGSTOP), so it cannot show its stack"
    return rank.read_dump() or "    gave no stack"


class _Spawner:
    """The client of this process's spawner."""

    _shared: _Spawner | None = None

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        preload = [name for name in spawner.PRELOADED if name != "pytest" or name in sys.modules]
        program = (
            f"import os, sys; sys.path[:] = {sys.path!r}\n"
            "from bagua.testing import spawner, worker\n"
            f"descriptors = spawner.serve({theirs.fileno()}, {preload!r})\n"
            "if descriptors: worker.rank_main(descriptors)\n"
            "os._exit(0)"  # skips tearing down modules, as a rank does
        )
        # Numerical libraries get one thread each, as under torchrun; they read the variable when they are loaded.
        environ = {"OMP_NUM_THREADS": "1", **os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                env=environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C reaches the test only, which then ends the ranks
            )
        atexit.register(self.close)

    def fork(self, descriptors: spawner.RankDescriptors) -> None:
        """Starts a rank that owns copies of the descriptors."""
        spawner.request(self._server, descriptors)

    def is_usable(self) -> bool:
        """Returns False in a fork of the process that started the spawner, and after the spawner has died."""
        return self.owner == os.getpid() and self._process.poll() is None

    def close(self) -> None:
        """Ends the spawner; the kernel then ends its ranks."""
        if self.owner == os.getpid():
            self._server.close()
            try:
                self._process.wait(EXIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGKILL)
                self._process.wait()

    @classmethod
    def shared(cls) -> _Spawner:
        if cls._shared is None or not cls._shared.is_usable():
            cls._shared = cls()
        return cls._shared
