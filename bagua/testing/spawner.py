"""The spawner, a process that forks ranks: it imports torch and bagua once, so that a new rank costs milliseconds.

Data path of a test: ranks.py (the test's process) -> this process -> worker.py (a rank). Each test process has one
spawner, started when first used. It runs no user code and starts no thread, so a fork of it behaves like a new process
that has just finished its imports.

Protocol, on a Unix socket of packets: a request is one byte with five descriptors (the rank's connection, its exit
pipe, stdout, stderr, a file for stack dumps). The spawner writes the rank's pid to the exit pipe at once, and its wait
status when it has ended. When the socket closes, the spawner ends, and the kernel ends its ranks.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import struct
import warnings
import weakref
from typing import NamedTuple

NUM_DESCRIPTORS = 5
_NUMBER = "<i"
# torch imports torch._dynamo for the first optimizer, which takes as long as all the rest.
PRELOADED = ("numpy", "torch", "torch._dynamo", "torch.distributed", "bagua", "pytest")


class RankDescriptors(NamedTuple):
    connection: int
    exit_pipe: int
    stdout: int
    stderr: int
    dump: int


def request(server: socket.socket, descriptors: RankDescriptors) -> None:
    """Requests a rank from the spawner at the other end of `server`; the caller closes its own copies."""
    socket.send_fds(server, [b"f"], descriptors)


def serve(descriptor: int, preload: list[str]) -> RankDescriptors | None:
    """Serves requests until the other end closes. Returns like fork: None here, the descriptors in each rank."""
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # torch's finalizers clean up its registries at exit, which a rank does not need. In a short rank they take most of
    # the time, because they copy pages shared with this process.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # otherwise a collection in a rank would touch, and so copy, all pages shared with this process

    server = socket.socket(fileno=descriptor)
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno())
    exit_pipes: dict[int, int] = {}  # pid -> write end

    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake_read in ready:
                wake_read.recv(4096)
                _reap(exit_pipes)
            if server not in ready:
                continue
            received = _receive(server)
            if received is None:
                return None
            pid = _fork()
            if pid == 0:
                break
            _write_number(received.exit_pipe, pid)
            exit_pipes[pid] = received.exit_pipe
            for unused in set(received) - {received.exit_pipe}:
                os.close(unused)

    # This is a new rank. It must close all of the spawner's descriptors, or other ranks would miss their end of file.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for held in (server, wake_read, wake_write):
        held.close()
    for pipe in (received.exit_pipe, *exit_pipes.values()):
        os.close(pipe)
    return received


def _receive(server: socket.socket) -> RankDescriptors | None:
    size = array.array("i", [0] * NUM_DESCRIPTORS)
    message, ancillary, _, _ = server.recvmsg(1, socket.CMSG_SPACE(size.itemsize * NUM_DESCRIPTORS))
    if not message:
        return None
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data)
    for received in descriptors:
        os.set_inheritable(received, False)
    return RankDescriptors(*descriptors)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads: a BLAS pool that handles forks itself
        return os.fork()


def _reap(exit_pipes: dict[int, int]) -> None:
    while exit_pipes:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        pipe = exit_pipes.pop(pid)
        _write_number(pipe, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def read_number(pipe: int) -> int:
    """Reads the next number from an exit pipe: the pid, then the exit code (negative for a signal)."""
    data = os.read(pipe, struct.calcsize(_NUMBER))
    if not data:
        raise RuntimeError("the process that starts the ranks has ended; its output shows why")
    (number,) = struct.unpack(_NUMBER, data)
    return number


def _write_number(pipe: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # a test that gave up no longer reads
        os.write(pipe, struct.pack(_NUMBER, value))
