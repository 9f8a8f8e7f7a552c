"""Times several contenders in turns, so that noise of the machine affects all of them.

A sample is the mean of `inner` consecutive calls. Ranks take samples in lockstep; `slowest` merges them, because a
collective is done when its last rank is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass
class Contender:
    """A contender: `run` is timed; `prepare`, which may refill the input, runs untimed before every sample."""

    run: Callable[[], None]
    prepare: Callable[[], None] = lambda: None


def interleaved(
    contenders: Mapping[str, Contender],
    *,
    repetitions: int,
    inner: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, list[float]]]:
    """Returns `wall` and `cpu` seconds per call of this process (all threads), per contender and repetition.

    A first round is discarded, because it opens connections, faults pages and allocates workspaces.
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
    """Returns the slowest rank's time, sample by sample."""
    return [max(values) for values in zip(*per_rank, strict=True)]


def total(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Returns the sum over ranks, sample by sample."""
    return [sum(values) for values in zip(*per_rank, strict=True)]
