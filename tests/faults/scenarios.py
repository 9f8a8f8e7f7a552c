"""What the tests of this folder share: worlds, a loop of collectives, and what a rank tells of the failure it saw."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch

import bagua
from bagua.testing import Pool, kill
from tests.distributed.worlds import WorldKind, mixed, shm, tcp

WORLDS = [shm(3), tcp(3), mixed(4)]
LONG_S = 20.0  # a timeout that does not pass
NOTICED_S = LONG_S / 4  # within this, a death or an end was noticed: no deadline has passed

# What runs while a rank fails: through rings or sockets, in place in shared memory, staged, coded, without data.
OPERATIONS: dict[str, Callable[[], Callable[[], object]]] = {
    "small": lambda: repeat(torch.ones(100), bagua.all_reduce),
    "large": lambda: repeat(torch.ones(2_000_000), bagua.all_reduce),
    "shared": lambda: repeat(bagua.empty(2_000_000), bagua.all_reduce),
    "coded": lambda: repeat(torch.ones(1_000_000), lambda x: bagua.all_reduce(x, codec="minmax_uint8")),
    "broadcast": lambda: repeat(torch.ones(1_000_000), lambda x: bagua.broadcast(x, 0)),
    "barrier": lambda: bagua.barrier,
}


def repeat(x: torch.Tensor, call: Callable[[torch.Tensor], object]) -> Callable[[], object]:
    def run() -> None:
        call(x.zero_())

    return run


@dataclass
class Seen:
    """How a failure looked from one rank."""

    kind: str
    rank: int | None  # who is blamed
    message: str
    began: float  # the call that failed; monotonic clock, which all processes of a host share
    at: float  # it raised
    again_seconds: float  # the next call
    destroy_seconds: float
    operation: str | None  # which failed


def watch(call: Callable[[], object], limit_s: float = 60.0) -> Seen:
    """Calls until a BaguaError comes; then once more, and destroys the groups."""
    end = time.monotonic() + limit_s
    while True:
        began = time.monotonic()
        assert began < end, "no failure was seen"
        try:
            call()
        except bagua.BaguaError as error:
            at = time.monotonic()
            first = error
            break
    try:
        call()
        raise AssertionError("a call after a failure succeeded")
    except bagua.BaguaError as error:
        assert str(error) == str(first) and type(error) is type(first), (
            f"not the first cause: {error!r} after {first!r}"
        )
        assert error.rank == first.rank
    again = time.monotonic()
    bagua.destroy_process_group()
    destroyed = time.monotonic()
    return Seen(type(first).__name__, first.rank, str(first), began, at, again - at, destroyed - again, first.operation)


def check_patience(results: list[Seen], timeout_s: float) -> None:
    """Somebody has waited for the whole timeout before anybody fails; and nobody for longer than is promised.

    That is twice the timeout: once for the operation, once more to find out whom to name. Only what takes twice as long
    as that has failed, for the clock of a busy machine counts what others do, too.
    """
    assert min(seen.at for seen in results) - min(seen.began for seen in results) >= timeout_s, results
    for seen in results:
        assert seen.at - seen.began < 2 * 2 * timeout_s, seen


def die_in_the_middle(call: Callable[[], object], path: str) -> NoReturn:
    """Calls over and over, until this process kills itself on another thread, and notes when.

    The others must be in `watch`, or on their way to it and in no other call: `meet` before both.
    """

    def die() -> None:
        note_time(path)
        kill()

    threading.Timer(0.05, die).start()
    while True:
        call()


@contextlib.contextmanager
def process_group(timeout_s: float = LONG_S) -> Iterator[bagua.ProcessGroup]:
    """bagua initialised for the time of the block. Where a short deadline is under test, only that operation has it:
    init, connections and what comes before have LONG_S, `meet` follows, and then `set_timeout`."""
    bagua.init_process_group(timeout=timeout_s)
    try:
        yield bagua.get_default_group()
    finally:
        bagua.destroy_process_group()


def spawn_in(world: WorldKind, fn, *args, expect_exit=None, env=None, timeout=60.0):
    """New ranks for every call: they are not fit for another one."""
    with Pool(world.size, nodes=world.nodes) as pool:
        return pool.run(fn, args=args, env={**world.env, **(env or {})}, expect_exit=expect_exit, timeout=timeout)


def note_time(path: str) -> None:
    """Writes down now and the process, in a way that survives kill -9."""
    with open(f"{path}.part", "w") as file:
        file.write(f"{time.monotonic()!r} {os.getpid()}")
    os.rename(f"{path}.part", path)


def noted_time(path: str) -> float:
    with open(path) as file:
        return float(file.read().split()[0])


def wait_for_note(path: str) -> int:
    """Until somebody has called note_time; whose process it was."""
    while not os.path.exists(path):
        time.sleep(0.001)
    with open(path) as file:
        return int(file.read().split()[1])


def wait_for_end(path: str) -> None:
    """Until the process that noted the time there is dead or stopped."""
    pid = wait_for_note(path)
    with contextlib.suppress(OSError):
        while process_state(pid) not in "TZX":
            time.sleep(0.001)


def process_state(pid: int) -> str:
    """R, S, D: it is there; T: stopped; Z, X: dead.

    Raises:
        OSError: dead, too, and its parent knows.
    """
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
