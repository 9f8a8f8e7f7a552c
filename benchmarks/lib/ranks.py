"""Starts the ranks of a benchmark as processes of the running script, and collects their results.

A script ends with `ranks.main(measure, main)`. `main()` runs in the process that the user started and calls
`run(world_size, options)`. That starts the same script again once per rank, where `measure(**options)` runs instead,
and returns the results (JSON) by rank.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bagua.replay.ranks import Ranks, answer

_FLAG = "--as-rank"


def main(measure: Callable[..., Any], script_main: Callable[[], None]) -> None:
    """Runs `measure` on a rank, and `script_main` in the process that the user started; ends every script."""
    if sys.argv[1:2] != [_FLAG]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every `finally` runs
        script_main()
        return
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    answer(measure, int(os.environ["RANK"]), *sys.argv[2:])


def run(
    world_size: int,
    options: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    master_addr: str = "127.0.0.1",
    under_mpirun: bool = False,
    timeout_s: float = 600.0,
    lost: Collection[int] = (),
    on_poll: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Runs this script's `measure(**options)` on `world_size` ranks; returns their values by rank.

    With `under_mpirun` mpirun starts them, so that mpi4py connects them too. The other arguments are those of
    `bagua.replay.ranks.Ranks`.
    """
    command = [sys.executable, "-m", sys.modules["__main__"].__spec__.name, _FLAG]
    with Ranks(command, world_size, options, env, master_addr) as ranks:
        if under_mpirun:
            if os.geteuid() == 0:
                os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            ranks.start_under([mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(world_size)])
        else:
            ranks.start(prefixes)
        return ranks.collect(timeout_s, lost, on_poll)


def mpirun() -> str | None:
    """Returns the path of mpirun if mpi4py can be imported too, otherwise None."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")
