"""Fault injection: processes that die or stop, ranks that fail at a step, unauthenticated peers that send garbage."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from dataclasses import dataclass
from typing import Literal, NamedTuple

Action = Literal["raise", "kill", "stop", "exit"]


class InjectedFault(RuntimeError):
    """An exception raised by ``fail_at(..., action="raise")``."""


def kill(pid: int | None = None) -> None:
    """Ends a process (this one by default) with SIGKILL: no handler runs, nothing is flushed."""
    os.kill(os.getpid() if pid is None else pid, signal.SIGKILL)


def stop(pid: int | None = None) -> None:
    """Stops a process (this one by default) with SIGSTOP: it stays connected and makes no progress."""
    os.kill(os.getpid() if pid is None else pid, signal.SIGSTOP)


def cont(pid: int) -> None:
    """Continues a stopped process."""
    os.kill(pid, signal.SIGCONT)


@dataclass(frozen=True)
class FailAt:
    """A fault on one rank at one step; calls at other ranks or steps have no effect. Made by :func:`fail_at`."""

    rank: int
    step: int
    action: Action

    def __call__(self, rank: int, step: int) -> None:
        """Injects the fault if this is its rank and step; every rank calls this in every step."""
        if (rank, step) != (self.rank, self.step):
            return
        if self.action == "raise":
            raise InjectedFault(f"injected: rank {rank} fails at step {step}")
        if self.action == "kill":
            kill()
        elif self.action == "stop":
            stop()
        else:
            os._exit(1)


def fail_at(rank: int, step: int, action: Action = "raise") -> FailAt:
    """Returns a fault for a training loop, which calls it as ``fault(rank, step)`` in every step.

    Args:
        action: the effect on ``rank`` at ``step``: "raise" InjectedFault, "kill" or "stop" the process, or "exit" with
            status 1 without any clean-up.

    Example:
        >>> fault = fail_at(rank=1, step=3)
        >>> fault(0, 3), fault(1, 2)
        (None, None)
        >>> fault(1, 3)
        Traceback (most recent call last):
        ...
        bagua.testing.faults.InjectedFault: injected: rank 1 fails at step 3
    """
    actions = ("raise", "kill", "stop", "exit")
    if action not in actions:
        raise ValueError(f"action is {action!r}, expected one of {', '.join(actions)}")
    return FailAt(rank, step, action)


class Garbage(NamedTuple):
    """The counts that :func:`send_garbage` returns."""

    connected: int
    refused: int
    sent_bytes: int


def send_garbage(
    host: str,
    port: int,
    connections: int,
    seed: int,
    *,
    max_bytes: int = 4096,
    timeout: float = 2.0,
    hold: float = 0.5,
) -> Garbage:
    """Connects as unauthenticated peers that send random bytes, or nothing.

    A fifth of the connections are closed without a byte, a fifth stay open and silent until the end (64 at
    most), the rest send up to ``max_bytes`` random bytes. The listener's answers are not read.

    Args:
        seed: the same seed sends the same bytes in the same order.
        timeout: seconds for each connection.
        hold: seconds that the silent connections stay open after the last one was made.
    """
    rng = random.Random(seed)
    connected = refused = sent_bytes = 0
    silent: list[socket.socket] = []
    try:
        for _ in range(connections):
            kind = rng.randrange(5)
            data = rng.randbytes(rng.randint(1, max_bytes))
            try:
                sock = socket.create_connection((host, port), timeout=timeout)
            except OSError:
                refused += 1
                continue
            connected += 1
            if kind == 0:
                silent.append(sock)
                if len(silent) > 64:
                    silent.pop(0).close()
                continue
            with sock:
                if kind == 1:
                    continue
                try:
                    sock.sendall(data)
                    sent_bytes += len(data)
                except OSError:  # the listener closed the connection first, as it may
                    pass
        time.sleep(hold)
    finally:
        for sock in silent:
            sock.close()
    return Garbage(connected, refused, sent_bytes)
