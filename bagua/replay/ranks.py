"""Starts the ranks of a measurement as processes, and collects their results.

A command is started once per rank, in the environment that torchrun sets, with two more arguments: a folder, and
options as JSON. It calls ``answer(measure)``, which writes the result of ``measure(**options)`` into the folder, as
JSON. torchrun itself would not do: ranks are also started inside network namespaces or under mpirun, and may be killed
on purpose without ending the others.

Invariant: no process outlives the block of ``Ranks``, however it ends, or the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

_GRACE_S = 5.0  # given to the others after the first rank has failed, so that they can report their own errors
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class RanksFailed(RuntimeError):
    """A rank failed, or time ran out; the message has the end of each rank's output."""


class Ranks:
    """A context manager for running ranks; it ends them all.

    Args:
        command: the command of every rank, as a list of words.
        world_size: the number of ranks.
        options: the arguments of ``measure``.
        env: variables for every rank, in addition to this process's and torchrun's.
        master_addr: rank 0's address, as other ranks reach it.
    """

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        options: Mapping[str, Any],
        env: Mapping[str, str] | None = None,
        master_addr: str = "127.0.0.1",
    ) -> None:
        self._command, self._size, self._options = command, world_size, json.dumps(dict(options))
        self._env, self._master_addr, self._port = env or {}, master_addr, _free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="bagua-ranks-")
        self._path = Path(self._folder.name)
        self._processes: list[subprocess.Popen] = []
        self._end_one = subprocess.Popen.kill

    def start(self, prefixes: Sequence[Sequence[str]] | None = None) -> None:
        """Starts all ranks.

        Args:
            prefixes: per node, the prefix of its ranks' commands, such as ``ip netns exec NAME``; every node gets
                equally many ranks. By default there is one node, without a prefix.
        """
        nodes = prefixes or [[]]
        ranks_per_node = self._size // len(nodes)
        for rank in range(self._size):
            node, local_rank = divmod(rank, ranks_per_node)
            numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
            self._spawn(nodes[node], numbers, ranks_per_node, f"rank{rank}")

    def start_under(self, launcher: Sequence[str]) -> None:
        """Starts a launcher, such as mpirun, that starts all ranks on this host and numbers them."""
        self._end_one = subprocess.Popen.terminate
        self._spawn(launcher, {"GROUP_RANK": 0}, self._size, "launcher")

    def _spawn(self, prefix: Sequence[str], numbers: Mapping[str, int], local_size: int, name: str) -> None:
        variables = {
            "OMP_NUM_THREADS": 1,
            "WORLD_SIZE": self._size,
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_ADDR": self._master_addr,
            "MASTER_PORT": self._port,
            **numbers,
            **self._env,
        }
        with open(self._path / f"{name}.log", "wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [
                        *("env", *(f"{key}={value}" for key, value in variables.items())),
                        *(*prefix, *self._command, self._folder.name, self._options),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    preexec_fn=_die_with_parent,
                )
            )

    def collect(
        self, timeout_s: float, lost: Collection[int] = (), on_poll: Callable[[list[int]], None] | None = None
    ) -> list[Any]:
        """Waits for all ranks; returns their results by rank.

        Args:
            timeout_s: seconds for all ranks together.
            lost: ranks that are killed or stopped on purpose; their value is None.
            on_poll: called again and again with the ranks' process ids while they run.

        Raises:
            RanksFailed: a rank failed, or time ran out.
        """
        deadline = time.monotonic() + timeout_s
        failed: subprocess.Popen | None = None
        while not self._are_done(lost):
            if failed is None:
                failed = next((p for i, p in enumerate(self._processes) if p.poll() and i not in lost), None)
                if failed is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
            if time.monotonic() > deadline or all(process.poll() is not None for process in self._processes):
                break
            if on_poll is not None:
                on_poll([process.pid for process in self._processes])
            time.sleep(0.02)
        if failed is not None or not self._are_done(lost):
            raise RanksFailed(self._report(failed, timeout_s))
        paths = [_answer_of(self._path, rank) for rank in range(self._size)]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def _are_done(self, lost: Collection[int]) -> bool:
        return all(p.poll() == 0 for i, p in enumerate(self._processes) if i not in lost)

    def _report(self, failed: subprocess.Popen | None, timeout_s: float) -> str:
        lines = ["a rank failed:" if failed is not None else f"the ranks had not finished after {timeout_s:g} s:"]
        for process, log in zip(self._processes, sorted(self._path.glob("*.log")), strict=True):
            end = log.read_text(errors="replace").strip().splitlines()[-25:]
            lines += [f"--- {log.stem} (exit status {process.poll()})", *end]
        return "\n".join(lines)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._processes:
            if process.poll() is None:
                self._end_one(process)
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()


def answer(measure: Callable[..., Any], rank: int, folder: str, options: str) -> None:
    """Calls ``measure`` on a rank with the options of ``Ranks``, and writes its value for ``collect``."""
    path = _answer_of(Path(folder), rank)
    value = measure(**json.loads(options))
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)


def _answer_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def _die_with_parent() -> None:
    """Has the kernel kill the rank when its parent ends, even by SIGKILL; runs between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
