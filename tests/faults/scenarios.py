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
from tests.communication.worlds import WorldKind, mixed, shm, tcp

WORLDS = [shm(3), tcp(3), mixed(4)]

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
    at: float  # monotonic clock, which all processes of a host share
    again_seconds: float  # the next call
    destroy_seconds: float
    operation: str | None  # which failed


def watch(call: Callable[[], object], limit_s: float = 60.0) -> Seen:
    """Calls until a BaguaError comes; then once more, and destroys the groups."""
    end = time.monotonic() + limit_s
    while True:
        assert time.monotonic() < end, "no failure was seen"
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
    return Seen(type(first).__name__, first.rank, str(first), at, again - at, time.monotonic() - again, first.operation)


def die_in_the_middle(call: Callable[[], object], path: str) -> NoReturn:
    """Calls over and over, until this process kills itself on another thread, and notes when."""

    def die() -> None:
        note_time(path)
        kill()

    threading.Timer(0.05, die).start()
    while True:
        call()


@contextlib.contextmanager
def process_group(timeout_s: float) -> Iterator[None]:
    bagua.init_process_group(timeout=timeout_s)
    try:
        yield
    finally:
        bagua.destroy_process_group()


def spawn_in(world: WorldKind, fn, *args, expect_exit=None, env=None, timeout=60.0):
    """New ranks for every call: they are not fit for another one."""
    with Pool(world.size, nodes=world.nodes) as pool:
        return pool.run(fn, args=args, env={**world.env, **(env or {})}, expect_exit=expect_exit, timeout=timeout)


def note_time(path: str) -> None:
    """Writes down now, in a way that survives kill -9."""
    with open(f"{path}.part", "w") as file:
        file.write(repr(time.monotonic()))
    os.rename(f"{path}.part", path)


def noted_time(path: str) -> float:
    with open(path) as file:
        return float(file.read())
