"""Times several ways of doing one thing side by side: in turns, so that noise of the machine meets all of them.

A sample is the mean of `inner` calls back to back. Ranks take samples in lockstep; `slowest` merges them, because a
collective is done when its last rank is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_TRIES = 3


@dataclass
class Contender:
    """One way: `run` is timed, `prepare` (refill the input, for example) runs before every sample and is not."""

    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None


def interleaved(
    contenders: Mapping[str, Contender],
    *,
    repetitions: int,
    inner: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Per contender `wall` and `cpu`: seconds per call of this process, all its threads, one number per repetition.

    One more round comes first and is thrown away: connections, page faults, workspaces.
    """
    samples = {name: {"wall": [], "cpu": []} for name in contenders}
    for repetition in range(repetitions + 1):
        for name, contender in contenders.items():
            contender.prepare()
            barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for _ in range(inner):
                contender.run()
            wall, cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
            if repetition > 0:
                samples[name]["wall"].append(wall / inner)
                samples[name]["cpu"].append(cpu / inner)
    return samples


def least_disturbed(measure: Callable[[], _T], disturbance: Callable[[_T], float]) -> _T:
    """What is measured, again while the machine has other things to do, at most twice; the least disturbed of all.

    Args:
        disturbance: of what was measured, in parts of what is allowed; the same on all ranks.
    """
    tries: list[tuple[float, _T]] = []
    while len(tries) < _TRIES and (not tries or tries[-1][0] > 1):
        measured = measure()
        tries.append((disturbance(measured), measured))
    return min(tries, key=lambda one: one[0])[1]


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample the slowest rank's time."""
    return [max(values) for values in zip(*per_rank, strict=True)]


def total(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample the sum over ranks."""
    return [sum(values) for values in zip(*per_rank, strict=True)]


class Stolen:
    """What a hypervisor takes of this machine's processors from here on: other machines run on them meanwhile."""

    def __init__(self) -> None:
        self._begin_s, self._taken_s = time.perf_counter(), _stolen_s()

    def share(self) -> float:
        """Between 0 and 1."""
        return (_stolen_s() - self._taken_s) / ((time.perf_counter() - self._begin_s) * (os.cpu_count() or 1))


def _stolen_s() -> float:
    """Since boot, over all processors: proc_stat(5), the eighth figure of the first line."""
    of_all = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(of_all[8]) / os.sysconf("SC_CLK_TCK")
