"""What else a machine does while something is measured on it, and measuring again where that is too much.

Beside the data path. Virtual machines share processors: what a hypervisor gives to others meanwhile is time that no
program here has spent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")
_TRIES = 3


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
