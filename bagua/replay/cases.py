"""A case, which is a model on a network, its outcomes, and a lower bound of step times.

The measurements of all ranks (systems.py) become one outcome per system here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua.replay.systems import DDP_HOOKS, Result, Task, parse

PROFILES = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Case:
    """A profile on a network; `rate_mbit` is the rate of every host's link, None if unknown."""

    profile: str
    scale: float
    num_hosts: int
    ranks_per_host: int
    rate_mbit: int | None
    congestion: str = ""  # congestion control of all TCP connections; not changed if empty

    def task(self, systems: Sequence[str], samples: int, turns: int) -> Task:
        """Returns the measurements that a rank takes."""
        return Task(str(self.path), self.scale, self.rate_mbit, list(systems), samples, turns)

    def __str__(self) -> str:
        ranks_each = f" x {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        rate = "" if self.rate_mbit is None else f", {self.rate_mbit} Mbit/s"
        control = f", {self.congestion} for all" if self.congestion else ""
        stem = Path(self.profile).stem
        return f"{stem}, scale {self.scale:g}, {self.num_hosts} hosts{ranks_each}{rate}{control}"

    @property
    def path(self) -> Path:
        """The path of the profile: a shipped one by name, or any file."""
        ours = PROFILES / f"{self.profile}.json"
        return ours if ours.exists() else Path(self.profile)


@dataclass
class Outcome:
    """The measurements of one system in one case, over all ranks."""

    case: Case
    system: str
    step_s: list[float]  # of the slowest rank
    compute_s: float
    bound_s: float | None  # None if the link's rate is unknown
    wire_bytes: float
    processor_s: float  # mean over ranks
    waiting_s: float | None
    stolen: float | None = None  # share of processor time that the hypervisor took, between 0 and 1
    chose: str = ""  # by `auto`

    @property
    def p50(self) -> float:
        """The median of the seconds per step."""
        return statistics.median(self.step_s)

    @property
    def exposed_s(self) -> float:
        """The seconds per step beyond compute alone."""
        return max(0.0, self.p50 - self.compute_s)


def outcomes_of(case: Case, per_rank: Sequence[Sequence[dict]], burst_bytes: float) -> list[Outcome]:
    """Merges every rank's results into one outcome per system; links carry `burst_bytes` at once."""
    outcomes: list[Outcome] = []
    for of_system in zip(*per_rank, strict=True):
        results = [Result(**one) for one in of_system]
        first = results[0]
        step_s = [max(of_ranks) for of_ranks in zip(*(result.step_s for result in results), strict=True)]
        first.wire_bytes = max(result.wire_bytes for result in results)
        compute_s = outcomes[0].p50 if outcomes else statistics.median(step_s)
        waiting = [result.waiting_s for result in results if result.waiting_s is not None]
        bound = None if case.rate_mbit is None else bound_s(first, compute_s, case.rate_mbit, burst_bytes)
        waiting_s = max(waiting, default=None)
        processor_s = statistics.mean(result.processor_s for result in results)
        stolen = max(result.stolen for result in results)
        counts = (first.wire_bytes, processor_s, waiting_s, stolen)
        outcomes.append(Outcome(case, first.system, step_s, compute_s, bound, *counts, first.chose))
    return outcomes


def bound_s(result: Result, compute_s: float, rate_mbit: float, burst_bytes: float) -> float:
    """Returns the lower bound of seconds per step for any implementation that sends these bytes.

    No byte of a gradient is sent before the gradient is ready, whatever the buckets, and compute is not shortened. The
    link is a token bucket: it carries `rate_mbit`, and while idle it saves up to `burst_bytes`, which it then carries
    at once. That happens once per exchange, so once in `result.period` steps.
    """
    bytes_per_s = rate_mbit * 1e6 / 8
    if result.overlap == "nothing":
        return compute_s + max(0.0, result.wire_bytes - burst_bytes / result.period) / bytes_per_s
    if result.overlap == "step":
        return max(compute_s, result.wire_bytes / bytes_per_s)
    at, tokens = 0.0, burst_bytes
    for ready_s, part in result.ready:
        if ready_s > at:
            tokens = min(burst_bytes, tokens + (ready_s - at) * bytes_per_s)
            at = ready_s
        from_burst = min(tokens, part * result.wire_bytes)
        tokens -= from_burst
        at += (part * result.wire_bytes - from_burst) / bytes_per_s
    return max(at, compute_s)


def is_ddp(outcome: Outcome) -> bool:
    """Returns True for torch's DDP, with any options."""
    return parse(outcome.system)[0] in DDP_HOOKS


def best_ddp(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Returns the fastest DDP, None if none was played."""
    return min(filter(is_ddp, outcomes), key=lambda one: one.p50, default=None)
