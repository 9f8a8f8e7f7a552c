"""Detection of other load on a machine during a measurement, and repeating the measurement if there was too much.

Virtual machines share processors: time that a hypervisor gives to other machines is spent by no program of this one.
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
    """Measures, at most twice more while there is too much other load; returns the least disturbed result.

    Args:
        disturbance: the disturbance of a result, over the allowed one; the same on all ranks.
    """
    tries: list[tuple[float, _T]] = []
    while len(tries) < _TRIES and (not tries or tries[-1][0] > 1):
        measured = measure()
        tries.append((disturbance(measured), measured))
    return min(tries, key=lambda one: one[0])[1]


class Stolen:
    """The processor time that a hypervisor gives to other machines from now on."""

    def __init__(self) -> None:
        self._begin_s, self._taken_s = time.perf_counter(), _stolen_s()

    def share(self) -> float:
        """Returns the stolen share of processor time, between 0 and 1."""
        return (_stolen_s() - self._taken_s) / ((time.perf_counter() - self._begin_s) * (os.cpu_count() or 1))


def _stolen_s() -> float:
    """Returns the seconds stolen since boot, over all processors: proc_stat(5), the first line's eighth figure."""
    of_all = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(of_all[8]) / os.sysconf("SC_CLK_TCK")
