"""The worlds that the tests of this folder and of faults/ run in: sizes, transports, imitated nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

import bagua
from bagua.testing import Pool

TIMEOUT_S = 30.0
SAME_TEST = pytest.mark.slow("the same test with other parameters")


@dataclass(frozen=True)
class WorldKind:
    """One way to connect ranks of this machine."""

    name: str
    size: int
    nodes: int | tuple[int, ...] = 1
    env: dict[str, str] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


def shm(size: int) -> WorldKind:
    return WorldKind(f"shm{size}", size)


def tcp(size: int) -> WorldKind:
    return WorldKind(f"tcp{size}", size, env={"BAGUA_SHARED_MEMORY": "0"})


def through_torch(size: int) -> WorldKind:
    """A gloo group of torch.distributed moves the bytes."""
    return WorldKind(f"torch{size}", size, env={"BAGUA_BACKEND": "torch"})


def mixed(size: int) -> WorldKind:
    """Two nodes: shared memory within them, TCP (over the loopback interface) between them."""
    return WorldKind(f"mixed{size}", size, nodes=2, env={"BAGUA_SOCKET_IFNAME": "lo"})


ALL_WORLDS = [shm(1), shm(2), shm(3), shm(4), tcp(2), tcp(3), tcp(4), mixed(4), through_torch(3)]
FEW_WORLDS = [shm(3), tcp(2), through_torch(2)]


def in_worlds(worlds: list[WorldKind], slow: Sequence[WorldKind] = ()) -> pytest.MarkDecorator:
    """Parametrises a test over `world`; those of `slow` are for tests of seconds, and skipped by make test."""
    return fast_in("world", worlds, slow)


def fast_in(names: str, fast: Sequence, every: Sequence) -> pytest.MarkDecorator:
    """Parametrises a test: make test runs it with `fast`, make test-all with `every`.

    Of several parameters `fast` has each value once, unless all their values take the same way through the product.
    """
    others = [pytest.param(*_values(value), marks=SAME_TEST) for value in every if value not in fast]
    return pytest.mark.parametrize(names, [*fast, *others], ids=_described)


def in_turns(names: str, first: Sequence, second: Sequence) -> pytest.MarkDecorator:
    """Parametrises a test: each of `first` with one of `second`, which take turns; all with all are slow."""
    fast = list(zip(first, itertools.cycle(second), strict=False))
    return fast_in(names, fast, list(itertools.product(first, second)))


def _described(value: object) -> str:
    return str(getattr(value, "__name__", None) or getattr(value, "spec", value))


def _values(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


class Pools:
    """Warm ranks by size and number of nodes; a pool's ranks can serve every transport."""

    def __init__(self) -> None:
        self._pools: dict[tuple, Pool] = {}

    def run(self, world: WorldKind, fn, *args, **options):
        """`fn(rank, world_size, *args)` on every rank of the world, with bagua's group made and destroyed around it."""
        key = (world.size, world.nodes)
        if key not in self._pools:
            self._pools[key] = Pool(world.size, nodes=world.nodes)
        env = {**world.env, **options.pop("env", {})}
        return self._pools[key].run(in_group, args=(fn, args), env=env, **options)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def in_group(rank, world_size, fn, args):
    with process_group():
        return fn(rank, world_size, *args)


@contextlib.contextmanager
def process_group(timeout_s: float = TIMEOUT_S) -> Iterator[bagua.ProcessGroup]:
    """bagua initialised for the time of the block."""
    bagua.init_process_group(timeout=timedelta(seconds=timeout_s))
    try:
        yield bagua.get_default_group()
    finally:
        bagua.destroy_process_group()
