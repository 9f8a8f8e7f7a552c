"""What a rank runs in a case of random_faults.py: set-up, then training or collectives, with a fault at some moment.

Every number that comes out is checked: a collective's result and plain training against loops over all ranks' data, and
of algorithms that exchange gradients the digest of the weights after every step, which all ranks' reports have alike.
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
    """Something ended well with a result that is not the one of plain loops."""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and when."""

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
    """A job and what goes wrong in it."""

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
        """Of the program."""
        last = max((int(fault.phase.split()[1]) for fault in self.faults if fault.phase.startswith("step")), default=0)
        return last + 1 + _STEPS_AFTER_THE_LAST_FAULT


class Report(NamedTuple):
    """How the program ended on one rank."""

    error: str  # its class; "" where it ended well
    named: int | None  # the rank at fault, by the error
    message: str
    at: float  # the error came; on the monotonic clock, which all processes of a host share
    ended: float  # the groups were destroyed
    digests: list[str]  # of the weights after each step, where all ranks have the same


def run(rank: int, size: int, case: Case, folder: str, host_names: Sequence[str]) -> Report:
    """The program of one rank.

    Args:
        folder: where the ranks meet before they start, and note when their faults struck.
        host_names: the host of each rank, for hosts.move_to; empty where all share one.

    Raises:
        WrongNumbers: a result that came without an error is wrong.
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
    """By rank, when its fault struck, of those that did."""
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
    # Nobody ends well after a fault: a message that was sent before it may let a rank out of the first of these, but
    # the second waits for one that its peers send after theirs.
    bagua.barrier()
    bagua.barrier()


class _Strikes:
    """The faults of one rank, of which there is at most one."""

    def __init__(self, case: Case, rank: int, folder: Path, host_names: Sequence[str]) -> None:
        self._fault = next((fault for fault in case.faults if fault.rank == rank), None)
        self._path, self._host_names = folder / f"struck-{rank}", host_names

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The block is that phase: a fault of before, and one of within, strike unless an error comes first."""
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
        """Called in the middle of it."""
        if self._fault is not None and (self._fault.where, self._fault.phase) == ("backward", f"step {step}"):
            self._strike()

    def _strike(self) -> None:
        fault = self._fault
        assert fault is not None
        if fault.kind == "cut":
            hosts.cut(self._host_names, fault.rank)
        self._note()
        if fault.kind == "kill":
            kill()
        elif fault.kind == "stop":
            stop()
        elif fault.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(TIMEOUT_S)  # until it is delivered
        elif fault.kind == "raise":
            raise InjectedFault(f"injected: {fault}")
        elif fault.kind == "sleep" and fault.where == "in":
            ctypes.PyDLL(None).usleep(int(SLEEP_S * 1e6))  # with the interpreter's lock, so that all of it sleeps
        elif fault.kind == "sleep":
            time.sleep(SLEEP_S)

    def _note(self) -> None:
        part = self._path.with_suffix(".part")
        part.write_text(repr(time.monotonic()))
        part.rename(self._path)


def _meet(folder: Path, rank: int, size: int) -> None:
    """All processes are there, so none is late by itself."""
    (folder / f"there-{rank}").touch()
    deadline = time.monotonic() + _MEETING_LIMIT_S
    while not all((folder / f"there-{other}").exists() for other in range(size)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the ranks were not started within {_MEETING_LIMIT_S:g} s")
        time.sleep(0.005)


class _Training:
    """A model of six layers, in several buckets, that learns nothing."""

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
        """One step of training; the digest of the weights after it, where all ranks have the same."""
        self._step = step
        self._optimizer.zero_grad()
        self._loss(self._model, self._rank, step).backward()
        self._optimizer.step()
        weights = torch.cat([parameter.detach().flatten() for parameter in self._model.parameters()])
        if not bool((weights.abs() < 10).all()):  # a NaN is not
            raise WrongNumbers(f"weights up to {weights.abs().max()} after step {step}; they start below 1")
        if self._case.algorithm == "gradient_allreduce":
            self._compare(weights, step)
        return [hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]] if self._are_weights_equal else []

    def _loss(self, model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank + 1)
        return model(torch.randn(8, _WIDTH, generator=generator)).square().mean()

    def _compare(self, weights: torch.Tensor, step: int) -> None:
        """With one process that has all ranks' data."""
        self._plain_optimizer.zero_grad()
        for rank in range(self._case.size):
            (self._loss(self._plain, rank, step) / self._case.size).backward()
        self._plain_optimizer.step()
        plain = torch.cat([parameter.detach().flatten() for parameter in self._plain.parameters()])
        off = float((weights - plain).abs().max())
        if off > 1e-5:
            raise WrongNumbers(f"a weight is off by {off} after step {step}")


def _make_optimizer(own: type[torch.optim.Optimizer], model: torch.nn.Module) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD if own is torch.optim.Optimizer else own
    return kind(model.parameters(), lr=0.01)


class _Collectives:
    """In each step another one, drawn for all ranks alike, of whole numbers that float32 adds exactly."""

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
        """To the next rank, from the one before."""
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
