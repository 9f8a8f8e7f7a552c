"""The program of a rank in a case of random_faults.py: set-up, then training or collectives, with one fault.

All results are checked. Collectives and `gradient_allreduce` are compared with loops over all ranks' data. Where an
algorithm exchanges gradients, the reports hold a digest of the weights after each step, which must agree on all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import bagua
from bagua.replay import hosts
from bagua.testing.faults import InjectedFault, kill, stop

TIMEOUT_S = 3.0
HEARTBEAT_TIMEOUT_S = 1.0
SLEEP_S = 2.5 * TIMEOUT_S
_STEPS_AFTER_THE_LAST_FAULT = 4
_MEETING_LIMIT_S = 60.0
_OPTIONS: dict[str, dict[str, Any]] = {"async_averaging": {"sync_interval": 0.0}, "local_sgd": {"sync_every": 3}}
_WIDTH = 64


class WrongNumbers(AssertionError):
    """An operation succeeded with a result that differs from plain loops."""


@dataclass(frozen=True)
class Fault:
    """A fault of one rank: its kind and its moment."""

    rank: int
    kind: str  # kill, stop, term, raise, cut, sleep
    where: str  # "before" a phase, "in" it (after delay_s, on another thread), or in the "backward" of a step
    phase: str  # "init", "wrap", "step 0", "step 1", ...
    delay_s: float

    def __str__(self) -> str:
        where = "in backward of" if self.where == "backward" else self.where
        return f"rank {self.rank}: {self.kind} {where} {self.phase}"


@dataclass(frozen=True)
class Case:
    """A job and the faults in it."""

    seed: int
    index: int
    size: int
    transport: str  # shm, tcp, namespaces
    algorithm: str  # "" for collectives without training
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        faults = " and ".join(map(str, self.faults))
        return f"{self.size} ranks  {self.transport:10}  {self.algorithm or 'collectives':27}  {faults}"

    @property
    def num_steps(self) -> int:
        """The number of steps of the program."""
        last = max((int(fault.phase.split()[1]) for fault in self.faults if fault.phase.startswith("step")), default=0)
        return last + 1 + _STEPS_AFTER_THE_LAST_FAULT


class Report(NamedTuple):
    """The end of the program on one rank."""

    error: str  # class of the error; "" if the program succeeded
    named: int | None  # the rank at fault, according to the error
    message: str
    at: float  # time of the error, on the monotonic clock, which all processes of a host share
    ended: float  # time after the groups were destroyed
    digests: list[str]  # digests of the weights after each step, where all ranks should have the same


def run(rank: int, size: int, case: Case, folder: str, host_names: Sequence[str]) -> Report:
    """Runs the program of one rank.

    Args:
        folder: files here synchronise the start of the ranks, and record the times of faults.
        host_names: the host of each rank, for hosts.move_to; empty if all share one.

    Raises:
        WrongNumbers: an operation succeeded with a wrong result.
    """
    if host_names:
        hosts.move_to(host_names[rank])
    strikes = _Strikes(case, rank, Path(folder), host_names)
    digests: list[str] = []
    error: Exception | None = None
    _meet(Path(folder), rank, size)
    try:
        _run(case, rank, strikes, digests)
    except (bagua.BaguaError, InjectedFault) as caught:
        error = caught
    finally:
        at = time.monotonic()
        bagua.destroy_process_group()
    kind = type(error).__name__ if error else ""
    return Report(kind, getattr(error, "rank", None), str(error or ""), at, time.monotonic(), digests)


def struck_at(folder: Path, case: Case) -> dict[int, float]:
    """Returns the time at which the fault of each rank struck, without those that did not strike."""
    paths = {fault.rank: folder / f"struck-{fault.rank}" for fault in case.faults}
    return {rank: float(path.read_text()) for rank, path in paths.items() if path.exists()}


def _run(case: Case, rank: int, strikes: _Strikes, digests: list[str]) -> None:
    with strikes.during("init"):
        bagua.init_process_group(timeout=TIMEOUT_S)
    with strikes.during("wrap"):
        program = _Training(case, rank, strikes) if case.algorithm else _Collectives(case, rank)
    for step in range(case.num_steps):
        with strikes.during(f"step {step}"):
            digests += program.step(step)
    # No rank succeeds after a fault: a message sent before the fault may complete the first barrier, but the second
    # waits for messages that peers send after their first.
    bagua.barrier()
    bagua.barrier()


class _Strikes:
    """The fault of one rank, if it has one."""

    def __init__(self, case: Case, rank: int, folder: Path, host_names: Sequence[str]) -> None:
        self._fault = next((fault for fault in case.faults if fault.rank == rank), None)
        self._path, self._host_names = folder / f"struck-{rank}", host_names

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Runs the block as that phase; a fault before it or in it strikes, unless an error comes first."""
        fault = self._fault
        if fault is None or fault.phase != phase or fault.where == "backward":
            yield
            return
        if fault.where == "before":
            self._strike()
            yield
            return
        timer = threading.Timer(fault.delay_s, self._strike)
        timer.start()
        try:
            yield
        except BaseException:
            timer.cancel()
            raise
        finally:
            timer.join()  # it strikes even if the phase was shorter

    def in_backward(self, step: int) -> None:
        """Injects a fault in the backward of a step; called by a hook in the middle of it."""
        if self._fault is not None and (self._fault.where, self._fault.phase) == ("backward", f"step {step}"):
            self._strike()

    def _strike(self) -> None:
        fault = self._fault
        assert fault is not None
        if fault.kind == "cut":
            hosts.cut(self._host_names, fault.rank)
        self._record_time()
        if fault.kind == "kill":
            kill()
        elif fault.kind == "stop":
            stop()
        elif fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(TIMEOUT_S)  # until the signal is delivered
        elif fault.kind == "raise":
            raise InjectedFault(f"injected: {fault}")
        elif fault.kind == "sleep" and fault.where == "in":
            ctypes.PyDLL(None).usleep(int(SLEEP_S * 1e6))  # holds the interpreter's lock, so that all threads sleep
        elif fault.kind == "sleep":
            time.sleep(SLEEP_S)

    def _record_time(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(repr(time.monotonic()))
        part.rename(self._path)


def _meet(folder: Path, rank: int, size: int) -> None:
    """Waits until all processes have started, so that none is late without a fault."""
    (folder / f"there-{rank}").touch()
    deadline = time.monotonic() + _MEETING_LIMIT_S
    while not all((folder / f"there-{other}").exists() for other in range(size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks were not started within {_MEETING_LIMIT_S:g} s")
        time.sleep(0.005)


class _Training:
    """Training of a model of six layers, in several buckets, on random data."""

    def __init__(self, case: Case, rank: int, strikes: _Strikes) -> None:
        self._case, self._rank = case, rank
        about = bagua.algorithms.get(case.algorithm)
        torch.manual_seed(case.index)
        self._model = torch.nn.Sequential(*[torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(6)])
        self._plain = copy.deepcopy(self._model)
        self._plain_optimizer = torch.optim.SGD(self._plain.parameters(), lr=0.01)
        self._optimizer = _make_optimizer(about.optimizer_class, self._model)
        self._are_weights_equal = about.exchanges == "gradients"
        options = _OPTIONS.get(case.algorithm, {})
        bagua.with_bagua(self._model, [self._optimizer], algorithm=case.algorithm, bucket_bytes=20_000, **options)
        self._step = 0
        in_the_middle = list(self._model.parameters())[6]
        in_the_middle.register_hook(lambda _: strikes.in_backward(self._step))

    def step(self, step: int) -> list[str]:
        """Trains one step; returns a digest of the weights if all ranks should have the same."""
        self._step = step
        self._optimizer.zero_grad()
        self._loss(self._model, self._rank, step).backward()
        self._optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])
        if not bool((weights.abs() < 10).all()):  # true for a NaN too
            raise WrongNumbers(f"weights up to {weights.abs().max()} after step {step}; they start below 1")
        if self._case.algorithm == "gradient_allreduce":
            self._compare(weights, step)
        return [hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]] if self._are_weights_equal else []

    def _loss(self, model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return model(torch.randn(8, _WIDTH, generator=generator)).square().mean()

    def _compare(self, weights: torch.Tensor, step: int) -> None:
        """Compares the weights with training in one process on all ranks' data."""
        self._plain_optimizer.zero_grad()
        for rank in range(self._case.size):
            (self._loss(self._plain, rank, step) / self._case.size).backward()
        self._plain_optimizer.step()
        plain = torch.cat([parameter.detach().flatten() for parameter in self._plain.parameters()])
        off = float((weights - plain).abs().max())
        if off > 1e-5:
            raise WrongNumbers(f"a weight is off by {off} after step {step}")


def _make_optimizer(wanted: type[torch.optim.Optimizer], model: torch.nn.Module) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if wanted is torch.optim.Optimizer else wanted
    return kind(model.parameters(), lr=0.01)


class _Collectives:
    """A random collective per step, the same on all ranks, on whole numbers that float32 adds exactly."""

    def __init__(self, case: Case, rank: int) -> None:
        self._case, self._rank, self._size = case, rank, case.size
        self._shared = bagua.empty(300_000)

    def step(self, step: int) -> list[str]:
        rng = random.Random(f"{self._case.seed}/{self._case.index}/{step}")
        verbs = (
            self._all_reduce,
            self._all_reduce_shared,
            self._all_reduce_coded,
            self._broadcast,
            self._all_gather,
            self._reduce_scatter,
            self._all_to_all,
            self._pass_on,
        )
        rng.choice(verbs)(rng.choice((12, 1200, 240_000)), step)
        return []

    def _values(self, rank: int, numel: int, step: int) -> torch.Tensor:
        return torch.arange(numel, dtype=torch.float32) % 97 + 100 * rank + step

    def _check(self, found: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> None:
        off = float((found - expected).abs().max())
        if not off <= tolerance:
            raise WrongNumbers(f"a value of {found.numel()} is off by {off}")

    def _sum(self, numel: int, step: int) -> torch.Tensor:
        total = torch.zeros(numel)
        for rank in range(self._size):
            total += self._values(rank, numel, step)
        return total

    def _all_reduce(self, numel: int, step: int) -> None:
        x = self._values(self._rank, numel, step)
        bagua.all_reduce(x)
        self._check(x, self._sum(numel, step))

    def _all_reduce_shared(self, numel: int, step: int) -> None:
        x = self._shared[:numel].copy_(self._values(self._rank, numel, step))
        bagua.all_reduce(x)
        self._check(x, self._sum(numel, step))

    def _all_reduce_coded(self, numel: int, step: int) -> None:
        x = self._values(self._rank, numel, step)
        bagua.all_reduce(x, codec="minmax_uint8")
        expected = self._sum(numel, step)
        self._check(x, expected, tolerance=float(expected.max()) * 6 / 255)

    def _broadcast(self, numel: int, step: int) -> None:
        x, root = self._values(self._rank, numel, step), step % self._size
        bagua.broadcast(x, root)
        self._check(x, self._values(root, numel, step))

    def _all_gather(self, numel: int, step: int) -> None:
        found = torch.empty(self._size * numel)
        bagua.all_gather(found, self._values(self._rank, numel, step))
        self._check(found, torch.cat([self._values(rank, numel, step) for rank in range(self._size)]))

    def _reduce_scatter(self, numel: int, step: int) -> None:
        found = torch.empty(numel // self._size)
        bagua.reduce_scatter(found, self._values(self._rank, numel, step))
        self._check(found, self._sum(numel, step).chunk(self._size)[self._rank])

    def _all_to_all(self, numel: int, step: int) -> None:
        found = torch.empty(numel)
        bagua.all_to_all(found, self._values(self._rank, numel, step))
        parts = [self._values(rank, numel, step).chunk(self._size)[self._rank] for rank in range(self._size)]
        self._check(found, torch.cat(parts))

    def _pass_on(self, numel: int, step: int) -> None:
        """Sends to the next rank and receives from the previous one."""
        before, found = (self._rank - 1) % self._size, torch.empty(numel)
        sent = self._values(self._rank, numel, step)
        works = [
            bagua.send(sent, (self._rank + 1) % self._size, async_op=True),
            bagua.recv(found, before, async_op=True),
        ]
        for work in works:
            assert work is not None
            work.wait()
        self._check(found, self._values(before, numel, step))
