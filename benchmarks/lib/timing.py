"""Times several ways of doing one thing side by side: in turns, so that noise of the machine meets all of them.

A sample is the mean of `inner` calls back to back. Ranks take samples in lockstep; `slowest` merges them, because a
collective is done when its last rank is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


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


def slowest(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample the slowest rank's time."""
    return [max(values) for values in zip(*per_rank, strict=True)]


def total(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Sample by sample the sum over ranks."""
    return [sum(values) for values in zip(*per_rank, strict=True)]
