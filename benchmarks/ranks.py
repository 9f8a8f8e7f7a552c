"""Starts the ranks of a benchmark as processes of the running script, and collects what each returns.

A script ends with `ranks.main(measure, main)`. `main()` runs in the process that the user started and calls
`run(world_size, options)`; that starts the same script again once per rank, in the environment that torchrun sets,
where `measure(**options)` runs instead; what it returns (JSON) comes back by rank. Not torchrun itself, because
ranks are also started inside network namespaces, under mpirun, and are killed on purpose without ending the others.

Invariant: no process outlives `run`, however it ends, nor the process that called it.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLAG = "--as-rank"
_GRACE_S = 5.0  # for the others after the first rank has failed: long enough to say what they saw of it
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def main(measure: Callable[..., Any], script_main: Callable[[], None]) -> None:
    """The last line of every script: `measure` on a rank, `script_main` in the process that the user started."""
    if sys.argv[1:2] != [_FLAG]:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every `finally` runs
        script_main()
        return
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
    folder, options = Path(sys.argv[2]), json.loads(sys.argv[3])
    path = folder / f"rank{os.environ['RANK']}.json"
    value = measure(**options)
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def run(
    world_size: int,
    options: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    prefixes: Sequence[Sequence[str]] | None = None,
    ranks_per_prefix: int = 1,
    master_addr: str = "127.0.0.1",
    under_mpirun: bool = False,
    timeout_s: float = 600.0,
    lost: Collection[int] = (),
    watch: Callable[[list[int]], None] | None = None,
) -> list[Any]:
    """Runs this script's `measure(**options)` on `world_size` ranks; returns their values by rank.

    Args:
        env: variables for every rank, on top of this process's and torchrun's.
        prefixes: per node, what stands before the commands of its ranks, such as `ip netns exec NAME`; one node
            without.
        ranks_per_prefix: consecutive ranks that are on one of these nodes.
        master_addr: rank 0's address as the others see it.
        under_mpirun: started by mpirun, so that mpi4py connects the ranks too.
        timeout_s: for the whole run.
        lost: ranks that are killed or stopped on purpose; their value is None.
        watch: called again and again with the ranks' process ids while they run.

    Raises:
        RuntimeError: a rank failed, with the end of what it printed, or time ran out.
    """
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        world = _World(Path(folder), world_size, options, env or {}, master_addr)
        try:
            if under_mpirun:
                world.start_mpirun()
            else:
                world.start(prefixes, ranks_per_prefix)
            return world.collect(timeout_s, set(lost), watch)
        finally:
            world.end()


@dataclass
class _World:
    folder: Path
    size: int
    options: Mapping[str, Any]
    env: Mapping[str, str]
    master_addr: str

    def __post_init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.port = _free_port()

    def start(self, prefixes: Sequence[Sequence[str]] | None, ranks_per_prefix: int) -> None:
        ranks_per_node = ranks_per_prefix if prefixes else self.size
        for rank in range(self.size):
            node, local_rank = divmod(rank, ranks_per_node)
            place = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
            self._spawn(list(prefixes[node]) if prefixes else [], place, ranks_per_node, f"rank{rank}")

    def start_mpirun(self) -> None:
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
        prefix = [mpirun() or "mpirun", "--oversubscribe", "--bind-to", "none", "-n", str(self.size)]
        self._spawn(prefix, {"GROUP_RANK": 0, **root}, self.size, "mpirun")

    def _spawn(self, prefix: list[str], place: Mapping[str, Any], local_size: int, name: str) -> None:
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(local_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.port),
            **{key: str(value) for key, value in place.items()},
            **self.env,
        }
        command = [*prefix, sys.executable, os.path.abspath(sys.argv[0]), _FLAG]
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*command, str(self.folder), json.dumps(dict(self.options))],
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_die_with_parent,
                )
            )

    def collect(self, timeout_s: float, lost: set[int], watch: Callable[[list[int]], None] | None) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        failed: subprocess.Popen | None = None
        while not self._are_done(lost):
            if failed is None:
                failed = next((p for i, p in enumerate(self.processes) if p.poll() and i not in lost), None)
                if failed is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline or all(process.poll() is not None for process in self.processes):
                break
            if watch is not None:
                watch([process.pid for process in self.processes])
            time.sleep(0.02)
        if failed is not None or not self._are_done(lost):
            raise RuntimeError(self._story(failed, timeout_s))
        paths = [self.folder / f"rank{rank}.json" for rank in range(self.size)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def _are_done(self, lost: set[int]) -> bool:
        return all(p.poll() == 0 for i, p in enumerate(self.processes) if i not in lost)

    def _story(self, failed: subprocess.Popen | None, timeout_s: float) -> str:
        lines = ["a rank failed:" if failed is not None else f"the ranks had not finished after {timeout_s:g} s:"]
        for process, log in zip(self.processes, sorted(self.folder.glob("*.log")), strict=True):
            end = log.read_text(errors="replace").strip().splitlines()[-25:]
            lines += [f"--- {log.stem} (exit status {process.poll()})", *end]
        return "\n".join(lines)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate() if "mpirun" in str(process.args[0]) else process.kill()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def mpirun() -> str | None:
    """The path of mpirun where mpi4py can be imported too, otherwise None."""
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        return None
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def _die_with_parent() -> None:
    """Between fork and exec: the kernel kills the rank when its parent ends, even by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
