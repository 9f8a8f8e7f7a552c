"""How a launch ends before its time: by a signal to the launcher, or by a rank that fails.

torch's agent ends all ranks in either case; what it says of that, some forty lines, becomes one line here.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
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

_HANDLED = (signal.SIGINT, signal.SIGTERM)
# Longer after the first failure than this, a rank that died of SIGKILL was ended by the agent, which had waited for it.
_KILLED_BY_ITSELF_S = 5
_BEHIND_FORK_S = 0.05  # after which a signal that has come around a fork comes again
_AGENT_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
)
_AGENT_SAYS = ("Received %s death signal", "Sending process %s closing signal", "failed (exitcode: %s)")
_LOST_RENDEZVOUS = " has failed to shutdown the rendezvous "  # in the middle, behind the name of the host


def _children() -> list[int]:
    """The processes that this one has started and that still run."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            try:
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has just ended
                continue
            if int(parent) == os.getpid() and state != "Z":
                found.append(int(entry))
    return found


def _kill(pid: int) -> None:
    """And what it has started itself: torch's agent starts ranks in sessions of their own."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


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
            _AtFork.active.restore()
            for number in signal.sigpending().intersection((*_HANDLED, signal.SIGHUP)):
                signal.signal(number, signal.SIG_DFL)
        self.in_parent()

    def has_deferred(self, number: int) -> bool:
        """Whether the signal, which has come around a fork, will come again behind it."""
        if self._masked is not None:
            threading.Timer(_BEHIND_FORK_S, os.kill, (os.getpid(), number)).start()
        return self._masked is not None


_at_fork = _AtFork()
os.register_at_fork(before=_at_fork.before, after_in_parent=_at_fork.in_parent, after_in_child=_at_fork.in_child)


class Interrupts:
    """SIGINT and SIGTERM while ranks run: the first one asks them to end, the second one kills them.

    The first one is raised in the main thread as torch's SignalException, on which its agent passes the signal on and
    waits for the ranks. The second one is handled in the middle of that wait, which ends by itself then.
    """

    def __init__(self) -> None:
        self._num_ranks = 0
        self._interrupted = False
        self._before: dict[int, Any] = {}
        self._progress = Progress("bagua run")
        self._ending = contextlib.ExitStack()

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _HANDLED}
            _AtFork.active = self
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()
        self._ending.close()

    def restore(self) -> None:
        """The handlers that were there before."""
        _AtFork.active = None
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def left_to_torch(self, signals: str) -> str:
        """Which of the signals of torchrun's --signals-to-handle torch may handle itself."""
        own = {number.name for number in _HANDLED} if self._before else set()
        return ",".join(name for name in signals.split(",") if name.strip() not in own) or signal.SIGHUP.name

    def told(self, number: int) -> str:
        """What to say when all have ended."""
        self._ending.close()
        why = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
        if not self._interrupted:  # a signal that torch handles
            return f"bagua run: {why}, all ranks of this host ended"
        ranks = "1 rank" if self._num_ranks == 1 else f"{self._num_ranks} ranks"
        return f"bagua run: {why}, {ranks} ended"

    def _handle(self, number: int, _: FrameType | None) -> None:
        if _at_fork.has_deferred(number):
            return
        children = _children()
        if self._interrupted:
            for pid in children:
                _kill(pid)
            return
        self._interrupted = True
        self._num_ranks = len(children)
        self._ending.enter_context(self._progress)
        self._progress.tell(f"waiting for {self._num_ranks} ranks to end, Ctrl-C kills them")
        raise SignalException(f"got {signal.Signals(number).name}", sigval=signal.Signals(number))


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
    """What is known of one rank's end; the first in this order is the cause of the others."""

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
    """How it began, by what is known of the ranks that failed on this host."""
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
    """Where the rank's stderr went, if that was not to the terminal."""
    log = Path(failure.error_file).with_name("stderr.log")
    return log if log.exists() and log.stat().st_size else None
