"""The ends of a launch before its time: by a signal to the launcher, or by a rank that fails.

torch's agent ends all ranks in either case; what it says of that, some forty lines, becomes one line here.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from bagua.cli.progress import Progress

__all__ = ["Interrupts", "quiet_agent", "who_failed_first", "without_rendezvous"]

# Longer after the first failure than this, a rank that died of SIGKILL was ended by the agent, which had waited for it.
_KILLED_BY_ITSELF_S = 5
_POLL_S = 0.1
_BEHIND_FORK_S = 0.05  # after which a signal that has come around a fork comes again
_AGENT_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)
_AGENT_SAYS = ("Received %s death signal", "Sending process %s closing signal", "failed (exitcode: %s)")
_LOST_RENDEZVOUS = " has failed to shutdown the rendezvous "  # in the middle, behind the name of the host


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    group: int

    @property
    def is_leader(self) -> bool:
        """True if it leads a process group."""
        return self.pid == self.group


def _running() -> list[_Process]:
    """The processes of this host that have not ended."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                state, parent, group = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:  # it has just ended
                continue
            if state != "Z":
                found.append(_Process(int(entry), int(parent), int(group)))
    return found


def _ranks_of(processes: Sequence[_Process]) -> list[_Process]:
    """The ranks that this process has started: torch's agent starts programs as leaders of groups of their own, and
    functions (--run-path) by multiprocessing, whose other helpers are no ranks."""
    functions = {child.pid for child in multiprocessing.active_children()}
    mine = [process for process in processes if process.parent == os.getpid()]
    return [process for process in mine if process.pid in functions or process.is_leader]


def _signal(rank: _Process, number: int, with_group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError):
        if with_group and rank.is_leader:
            os.killpg(rank.group, number)
        else:
            os.kill(rank.pid, number)


class _AtFork(threading.local):
    """No signal is lost around a fork, as of ranks of `--start-method fork`, whose handlers are their own.

    Python forgets a signal that a forked process gets before it has begun in it, and what a handler raises around a
    fork, so such a rank would outlive SIGTERM, and the launcher Ctrl-C. Signals wait meanwhile. The rank has the
    handlers that were there before the launcher's, and ends of those that came first as if it had none.
    """

    active: ClassVar[Interrupts | None] = None
    _masked: set[int] | None = None

    def before(self) -> None:
        if _AtFork.active is not None:
            self._masked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())

    def in_parent(self) -> None:
        if self._masked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._masked)
            self._masked = None

    def in_child(self) -> None:
        if _AtFork.active is not None:
            numbers = _AtFork.active.numbers
            _AtFork.active.restore()
            for number in signal.sigpending() & numbers:
                signal.signal(number, signal.SIG_DFL)
        try:
            self.in_parent()
        except BaseException as error:  # a handler raised it, and Python drops what a hook raises
            number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def has_deferred(self, number: int) -> bool:
        """Returns True if the signal has come around a fork and will come again behind it."""
        if self._masked is not None:
            threading.Timer(_BEHIND_FORK_S, os.kill, (os.getpid(), number)).start()
        return self._masked is not None


_at_fork = _AtFork()
os.register_at_fork(before=_at_fork.before, after_in_parent=_at_fork.in_parent, after_in_child=_at_fork.in_child)


class Interrupts:
    """The signals that end a launch: the first one asks the ranks to end, a second one kills them.

    A rank is signalled by itself, so that what it has started, such as a DataLoader's workers, serves it while it saves
    its state. The rest of its process group gets the signal when the rank has ended. What still runs when the grace
    time is over is killed. Then the signal is raised in the main thread as torch's SignalException, on which torch's
    agent finds that the ranks have ended.

    Args:
        signals: the names of those that are handled, beside SIGINT, SIGTERM and SIGUSR1.
        grace_s: the time that ranks have to end.

    Raises:
        ValueError: there is no signal of that name, or none that can be handled.
    """

    def __init__(self, signals: Sequence[str] = (), grace_s: float = 30.0) -> None:
        for name in signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                raise ValueError(f"--signals-to-handle has {name!r}, which is no signal that can be handled")
        self.numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *(signal.Signals[name] for name in signals)}
        self._grace_s = grace_s
        self._num_ranks = self._num_killed = 0
        self._left: list[_Process] = []  # ranks that run, or whose process groups do
        self._begin_s: float | None = None  # when the first signal came
        self._killed_after_s = 0.0
        self._before: dict[int, Any] = {}
        self._progress = Progress("bagua run")
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in self.numbers}
            _AtFork.active = self
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self._ending.close()

    def restore(self) -> None:
        """Sets the handlers that were there before."""
        _AtFork.active = None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def summary(self, number: int) -> str:
        """Returns the last line of the launch, when all ranks have ended."""
        self._ending.close()
        why = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        if self._begin_s is None:  # a signal that an older version of torch handles
            return f"bagua run: {why}, all ranks of this host ended"
        ranks = "1 rank" if self._num_ranks == 1 else f"{self._num_ranks} ranks"
        killed = ""
        if self._num_killed:
            killed = f", {self._num_killed} of them killed after {self._killed_after_s:.0f} s (--grace)"
        return f"bagua run: {why}, {ranks} ended{killed}"

    def _handle(self, number: int, _: FrameType | None) -> None:
        if _at_fork.has_deferred(number):
            return
        if self._begin_s is not None:
            self._kill()
            return
        self._begin_s = time.monotonic()
        self._left = _ranks_of(_running())
        self._num_ranks = len(self._left)
        self._ending.enter_context(self._progress)
        self._progress.tell(f"waiting {self._grace_s:g} s for {self._num_ranks} ranks to end, Ctrl-C kills them")
        for rank in self._left:
            _signal(rank, number)
        self._await(self._begin_s + self._grace_s, number)
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))

    def _await(self, end_s: float, number: int) -> None:
        """Returns when the ranks and their process groups have ended; kills those that have not in time."""
        signalled: set[int] = set()  # groups whose rank has ended
        while True:
            running = _running()
            pids, groups = {process.pid for process in running}, {process.group for process in running}
            self._left = [rank for rank in self._left if rank.pid in pids or (rank.is_leader and rank.pid in groups)]
            for rank in self._left:
                if rank.pid not in pids | signalled:
                    signalled.add(rank.pid)
                    _signal(rank, number, with_group=True)
            if not self._left:
                return
            if time.monotonic() > end_s:
                self._kill()
                return
            time.sleep(_POLL_S)

    def _kill(self) -> None:
        running = {process.pid for process in _running()}
        self._num_killed = sum(rank.pid in running for rank in self._left)
        self._killed_after_s = time.monotonic() - (self._begin_s or 0.0)
        for rank in self._left:
            _signal(rank, signal.SIGKILL, with_group=True)


@contextlib.contextmanager
def quiet_agent() -> Iterator[None]:
    """Drop what torch's agent logs of ranks that end: the launcher says it."""

    def keep(record: logging.LogRecord) -> bool:
        said = str(record.msg)
        return not said.startswith(_AGENT_SAYS) and _LOST_RENDEZVOUS not in said

    loggers = [logging.getLogger(name) for name in _AGENT_LOGGERS]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


@dataclass(frozen=True)
class _Failure:
    """The known facts of one rank's end; the first in this order is the cause of the others."""

    kind: int
    time_s: float
    rank: int
    text: str
    exit_status: int
    untold: str = ""  # the traceback, where rank.py has not shown it
    rank_at_fault: int | None = None  # whom it followed


# In the order in which one explains another: a rank that crashed, one that raised, one that ended with a status, one
# that raised because of another rank, one that the agent ended.
_CRASHED, _RAISED, _EXITED, _FOLLOWED, _TERMINATED = range(5)


def who_failed_first(error: ChildFailedError) -> tuple[str, int]:
    """(lines of which one names the rank that failed first and why, the exit status for the command)."""
    by_local_rank = {failure.local_rank: (rank, failure) for rank, failure in error.failures.items()}
    begin_s = min(failure.timestamp for failure in error.failures.values())
    failures = [_failure(rank, failure, begin_s) for rank, failure in by_local_rank.values()]
    first = min(failures, key=lambda one: (one.kind, one.time_s))
    others = [one.rank for one in failures if one.rank != first.rank and one.kind != _TERMINATED]
    lines = [f"[rank {first.rank}] {line}" for line in first.untold.splitlines()]
    lines.append(f"bagua run: {_beginning(first, {one.rank: one.kind for one in failures})}, {first.text}")
    if others:
        lines.append(f"bagua run: {_ranks(sorted(others))} failed after that")
    log = _log_of(next(failure for rank, failure in by_local_rank.values() if rank == first.rank))
    if log is not None:
        lines.append(f"bagua run: what it wrote is in {log}")
    return "\n".join(lines), first.exit_status


def without_rendezvous(error: Exception, args: argparse.Namespace) -> str:
    """Lines on hosts that did not meet, or lost each other; torch's agent has ended the ranks of this one."""
    at_endpoint = bool(args.rdzv_endpoint)
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    option = "--rdzv-endpoint" if at_endpoint else "--master-port"
    raised = "".join(traceback.format_exception_only(error)).partition("\n")[0]
    if "EADDRINUSE" in str(error):
        given = where if at_endpoint else args.master_port
        remedy = "give another one, on all hosts"
        if args.nnodes in ("1", "1:1"):
            remedy = "give another one, or none: then a free one is chosen"
        return f"bagua run: the port of {option} {given} is in use on this host; {remedy}"
    if isinstance(error, RendezvousTimeoutError):
        what = f"--nnodes is {args.nnodes}, and so many hosts did not come to the rendezvous at {where} in time; start"
        what += " `bagua run` on all of them with the same options"
    else:
        what = f"the rendezvous at {where} is lost: the host that holds it has ended, or cannot be reached from here;"
        what += " see its output. The ranks of this host were ended"
    return f"bagua run: {what}\nbagua run: what torch says of it: {raised}"


def _beginning(first: _Failure, kinds: dict[int, int]) -> str:
    """Returns the beginning of the sentence, by what is known of the ranks that failed on this host."""
    cause = first.rank_at_fault
    if first.kind != _FOLLOWED or cause is None or kinds.get(cause) == _FOLLOWED:
        return f"rank {first.rank} failed first"
    where = "was ended before it said why" if cause in kinds else "is not on this host or ended with status 0"
    return f"rank {first.rank} ended because of rank {cause}, which {where}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _failure(rank: int, failure: ProcessFailure, begin_s: float) -> _Failure:
    exit_status = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    message = failure.message
    if isinstance(message, dict):  # what rank.py, or torch's @record, has written down
        details = message["extraInfo"]
        kind = _FOLLOWED if details.get("names_another_rank") else _RAISED
        time_s = float(details.get("time_s", details["timestamp"]))
        # A rank that waits for nothing but its last line, and is ended by the agent meanwhile.
        exit_status = exit_status if failure.exitcode > 0 else 1
        raised = message["message"].partition("\n")[0]
        untold = "" if "names_another_rank" in details else details.get("py_callstack", "")
        text = f"exit status {exit_status}: {raised}"
        return _Failure(kind, time_s, rank, text, exit_status, untold, details.get("rank_at_fault"))
    if failure.exitcode > 0:
        return _Failure(_EXITED, failure.timestamp, rank, f"exit status {exit_status}", exit_status)
    late = failure.timestamp - begin_s > _KILLED_BY_ITSELF_S
    ended = failure.exitcode == -signal.SIGTERM or (failure.exitcode == -signal.SIGKILL and late)
    kind = _TERMINATED if ended else _CRASHED
    return _Failure(kind, failure.timestamp, rank, f"it died of {failure.signal_name()}", exit_status)


def _log_of(failure: ProcessFailure) -> Path | None:
    """Returns the file of the rank's stderr; None if that went to the terminal."""
    log = Path(failure.error_file).with_name("stderr.log")
    return log if log.exists() and log.stat().st_size else None
