"""Real processes as ranks, for tests: `spawn` runs one function on new ranks, `Pool` many functions on warm ones.

A test can rely on torchrun's environment in every rank, including an agent's store (a TCPStore that this process holds
on a port chosen by the kernel); on one deadline for the world; on no process being left, however the test ends; and on
the first cause of a failure being raised here with the rank's traceback.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from bagua.testing import worker
from bagua.testing.failures import Failure, RankDied, WorldTimeout, raise_first
from bagua.testing.rank_process import EXIT_LIMIT_S, RankProcess, dump_stacks

T = TypeVar("T")

# Other ranks may continue this long after the first failure, so that they can report their own errors.
_GRACE_S = 5.0


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    args: Sequence[Any] = (),
    nodes: int | Sequence[int] = 1,
    expect_exit: Mapping[int, int] | None = None,
) -> list[T | None]:
    """Runs ``fn(rank, world_size, *args)`` in ``world_size`` new processes; returns the values by rank.

    Args:
        fn: any function of an importable module or a test file; closures and lambdas need cloudpickle.
        timeout: seconds for the whole world, counted from the start of its processes.
        env: variables in addition to this process's and torchrun's; None removes one.
        nodes: torchrun nodes to imitate on this machine: a number that divides ``world_size``, or the
            number of ranks of each node. Ranks of different nodes do not share memory.
        expect_exit: the ranks that do not return, with their end: an exit status, the signal that kills them, such as
            ``signal.SIGKILL``, or ``signal.SIGSTOP`` if they stay stopped. Their value is None.

    Raises:
        The exception of the rank that failed first, with that rank's traceback as its cause.
        RankDied: a rank ended without an exception: killed, crashed, or os._exit.
        WorldTimeout: after ``timeout``, with the stack of every thread of every rank that had not finished.

    Example:
        >>> def double(rank, world_size, x):
        ...     return 2 * x + rank
        >>> spawn(double, 2, args=(10,))
        [20, 21]
    """
    with Pool(world_size, nodes=nodes) as pool:
        return pool.run(fn, timeout=timeout, env=env, args=args, expect_exit=expect_exit)


class Pool:
    """A set of ranks that stay alive between functions, with the state that functions leave in their modules.

    Every function gets a new store and must destroy the process groups that it makes. If a rank fails, dies or does not
    finish, all are ended, and the next run starts new ones. A pool must not be used by several threads at once.

    Example:
        >>> with Pool(2) as pool:
        ...     pool.run(lambda rank, world_size: rank + 1)
        ...     pool.run(lambda rank, world_size: rank * 10)
        [1, 2]
        [0, 10]
    """

    def __init__(self, world_size: int, *, nodes: int | Sequence[int] = 1) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}, expected at least 1")
        self.world_size = world_size
        self._layout = _layout(world_size, nodes)
        self._ranks: list[RankProcess] = []
        self._store: Any = None

    def run(
        self,
        fn: Callable[..., T],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[Any] = (),
        expect_exit: Mapping[int, int] | None = None,
    ) -> list[T | None]:
        """Runs one function on all ranks; arguments, result and errors are those of :func:`spawn`."""
        return self.start(fn, timeout=timeout, env=env, args=args, expect_exit=expect_exit).result()

    def start(
        self,
        fn: Callable[..., T],
        *,
        timeout: float = 60.0,
        env: Mapping[str, str | None] | None = None,
        args: Sequence[Any] = (),
        expect_exit: Mapping[int, int] | None = None,
    ) -> Run:
        """Starts a function as :meth:`run` does, but returns at once, for tests that act on running ranks."""
        from torch.distributed import TCPStore

        expect_exit = dict(expect_exit or {})
        for rank in expect_exit:
            if not 0 <= rank < self.world_size:
                raise ValueError(f"expect_exit names rank {rank}, expected one of 0..{self.world_size - 1}")
        call = worker.dumps((fn, tuple(args)))
        module = getattr(fn, "__module__", None) or "__main__"
        if not self._ranks:
            self._ranks = [RankProcess(rank) for rank in range(self.world_size)]
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in self._ranks:
            task = {
                "environ": self._environ(rank.rank, env or {}),
                "cwd": os.getcwd(),
                "sys_path": sys.path,
                "module": module,
                "file": getattr(sys.modules.get(module), "__file__", None),
                "call": call,
            }
            try:
                rank.connection.send(task)
            except OSError:  # the rank has died
                code = rank.wait_exit(EXIT_LIMIT_S)
                self.kill()
                raise RankDied(rank.rank, code, "between two functions") from None
        return Run(self, self._ranks, timeout, expect_exit)

    @property
    def pids(self) -> list[int]:
        """The process ids by rank; empty before the first run and after a failure."""
        return [rank.pid for rank in self._ranks]

    def kill(self) -> None:
        """Ends all ranks at once. The next run starts new ones."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.close()
        self._store = None

    def close(self) -> None:
        """Ends the ranks as a program ends.

        Raises:
            RankDied: a rank crashed while ending, or had not ended after 20 seconds.
        """
        self.retire(self._ranks)

    def retire(self, healthy: Sequence[RankProcess]) -> None:
        """Ends these ranks as a program ends, and kills the others."""
        try:
            for rank in healthy:
                rank.connection.close()
            deadline = time.monotonic() + EXIT_LIMIT_S
            for rank in healthy:
                code = rank.wait_exit(deadline - time.monotonic())
                if code is None:
                    stacks = dump_stacks([rank])
                    raise RankDied(rank.rank, None, f"within {EXIT_LIMIT_S:.0f} s of its last function\n{stacks}")
                if code != 0:
                    raise RankDied(rank.rank, code, f"while the interpreter was shutting down\n{rank.read_dump()}")
        finally:
            self.kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self.kill()

    def _environ(self, rank: int, env: Mapping[str, str | None]) -> dict[str, str]:
        node, local_rank, local_size = self._layout[rank]
        environ = dict(os.environ)
        environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
        environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(self.world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            GROUP_RANK=str(node),
            GROUP_WORLD_SIZE=str(self._layout[-1][0] + 1),
            ROLE_RANK=str(rank),
            ROLE_WORLD_SIZE=str(self.world_size),
            ROLE_NAME="default",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self._store.port),
            TORCHELASTIC_USE_AGENT_STORE="True",  # this process holds the store, not rank 0
            TORCHELASTIC_RESTART_COUNT="0",
            TORCHELASTIC_MAX_RESTARTS="0",
            TORCHELASTIC_RUN_ID=f"bagua-testing-{os.getpid()}",
        )
        for name, value in env.items():
            if value is None:
                environ.pop(name, None)
            else:
                environ[name] = value
        return environ


class Run:
    """A function that is running on the ranks of a Pool."""

    def __init__(self, pool: Pool, ranks: list[RankProcess], timeout: float, expect_exit: dict[int, int]) -> None:
        self._pool = pool
        self._ranks = ranks
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._expect_exit = expect_exit
        self._values: dict[int, Any] = {}
        self._failures: list[Failure] = []
        self._stuck = ""  # stacks of the ranks that did not finish after another one had failed

    @property
    def pids(self) -> list[int]:
        """The process ids by rank."""
        return [rank.pid for rank in self._ranks]

    def is_stopped(self, rank: int) -> bool:
        """Returns True if the rank's process was stopped by SIGSTOP."""
        return self._ranks[rank].is_stopped()

    def ended(self, seconds: float) -> dict[int, Any]:
        """Waits for all ranks, at most for `seconds`; returns the value or the Failure of each that has ended, by rank.

        It is for callers that expect failures and judge them themselves.
        """
        until = time.monotonic() + seconds
        while pending := self._running():
            by_object = {o: rank for rank in pending for o in (rank.connection, rank.exit_pipe)}
            ready = wait(list(by_object), max(0.0, until - time.monotonic()))
            if not ready:
                break
            for rank in {by_object[o].rank: by_object[o] for o in ready}.values():
                self._take(rank)
        return {**self._values, **{failure.rank: failure for failure in self._failures}}

    def stacks(self) -> str:
        """Returns the stack of every thread of the ranks that have not ended."""
        return dump_stacks(self._running())

    def _running(self) -> list[RankProcess]:
        failed = {failure.rank for failure in self._failures}
        return [rank for rank in self._ranks if rank.rank not in self._values and rank.rank not in failed]

    def result(self) -> list[Any]:
        """Waits for all ranks; returns the values by rank, or raises the first failure as :func:`spawn` does."""
        try:
            self._collect()
        except BaseException:
            self._pool.kill()
            raise
        if self._failures:
            self._pool.kill()
            raise_first(self._failures, len(self._ranks), self._stuck)
        if self._expect_exit:
            self._pool.retire([rank for rank in self._ranks if rank.rank not in self._expect_exit])
        return [self._values.get(rank) for rank in range(len(self._ranks))]

    def _collect(self) -> None:
        pending = {rank.rank: rank for rank in self._ranks}
        deadline = self._deadline
        while pending and not self._only_stopped_ranks(pending):
            by_object = {o: rank for rank in pending.values() for o in (rank.connection, rank.exit_pipe)}
            # A rank that is stopped does not wake wait(), so poll if one is expected to stop. Every other end wakes it.
            limit = max(0.0, deadline - time.monotonic())
            ready = wait(list(by_object), min(limit, 0.1) if self._expect_exit else limit)
            for rank in {by_object[o].rank: by_object[o] for o in ready}.values():
                self._take(rank)
                del pending[rank.rank]
            if self._failures:
                deadline = min(deadline, self._failures[0].at + _GRACE_S)
            if pending and time.monotonic() >= deadline:
                stacks = dump_stacks(list(pending.values()))
                if self._failures:
                    self._stuck = stacks
                    return
                finished = sorted(set(range(len(self._ranks))) - set(pending))
                raise WorldTimeout(
                    f"ranks {sorted(pending)} of {len(self._ranks)} had not finished after {self._timeout:g} s"
                    f"{f', ranks {finished} had' if finished else ''}; their stacks:\n{stacks}"
                )

    def _take(self, rank: RankProcess) -> None:
        """Records a rank's answer, or its death."""
        expected = self._expect_exit.get(rank.rank)
        outcome = rank.receive()
        if outcome is None:
            code = rank.wait_exit(EXIT_LIMIT_S)
            if expected is None or code != _exit_code(expected):
                text = rank.read_dump() + (f"expected exit {expected!r}" if expected is not None else "")
                self._failures.append(Failure(time.monotonic(), rank.rank, RankDied(rank.rank, code, text), None))
        elif outcome.text is not None:
            error = pickle.loads(outcome.error) if outcome.error else None
            self._failures.append(Failure(outcome.at, rank.rank, error, outcome.text))
        elif expected is not None:
            error = AssertionError(f"rank {rank.rank} returned, but was expected to end by {expected!r}")
            self._failures.append(Failure(outcome.at, rank.rank, error, None))
        else:
            assert outcome.value is not None
            self._values[rank.rank] = pickle.loads(outcome.value)

    def _only_stopped_ranks(self, pending: dict[int, RankProcess]) -> bool:
        return all(
            self._expect_exit.get(rank.rank) == signal.SIGSTOP and rank.is_stopped() for rank in pending.values()
        )


def free_port() -> int:
    """Returns a TCP port that was free a moment ago, for tests that need a number before there is a socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _layout(world_size: int, nodes: int | Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the node, the local rank and the local world size of every rank."""
    if isinstance(nodes, int):
        if nodes < 1 or world_size % nodes:
            raise ValueError(
                f"nodes is {nodes}, which does not divide world_size {world_size}; "
                f"name the number of ranks of each node, such as nodes=[{world_size - 1}, 1]"
            )
        nodes = [world_size // nodes] * nodes
    if sum(nodes) != world_size or min(nodes) < 1:
        raise ValueError(f"nodes is {list(nodes)}, expected positive numbers of ranks that add up to {world_size}")
    return [(node, local_rank, size) for node, size in enumerate(nodes) for local_rank in range(size)]


def _exit_code(expected: int) -> int:
    return -int(expected) if isinstance(expected, signal.Signals) else expected
