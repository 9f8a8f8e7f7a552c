"""Runs small jobs with random faults and judges how each ends: `python -m bagua.testing.random_faults`.

The seed and the index of a case determine all of it: ranks, transport, algorithm, and the rank, moment and kind of each
fault. The ranks are processes that run faulty_program.py. The verdict is "ok" if every rank ended in time, every rank
without a fault raised an error that names a faulty rank, and no result was wrong before.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import TCPStore

import bagua
from bagua.replay import hosts
from bagua.testing.failures import Failure, RankDied
from bagua.testing.faults import cont
from bagua.testing.faulty_program import (
    HEARTBEAT_TIMEOUT_S,
    SLEEP_S,
    TIMEOUT_S,
    Case,
    Fault,
    Report,
    WrongNumbers,
    run,
    struck_at,
)
from bagua.testing.ranks import Pool, Run

TRANSPORTS = ("shm", "tcp", "namespaces")
KINDS = ("kill", "stop", "term", "raise", "sleep", "cut")  # cut: namespaces only
# An operation that waits for a rank fails after its timeout, its cause is found within as long again, and before that a
# link is silent for the heartbeat's timeout. The rest is for a loaded machine.
LIMIT_S = 2 * TIMEOUT_S + HEARTBEAT_TIMEOUT_S + 5.0
_START_LIMIT_S = 60.0
_POLL_S = 0.05
_NUM_STEPS = 6  # in which a fault may strike
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}


class Verdict(NamedTuple):
    """The verdict on one case."""

    words: str  # "ok", or the defects found
    seconds: float  # from the last fault to the last error of a rank without a fault
    details: list[str]  # lines about the ranks, if there are defects

    @property
    def is_good(self) -> bool:
        """Returns True for "ok", and for a case that was skipped because it cannot run here."""
        return self.words == "ok" or self.words.startswith("skipped")


def draw(seed: int, index: int) -> Case:
    """Returns the case of that seed and index."""
    rng = random.Random(f"{seed}/{index}")
    size = rng.randint(2, 4)
    transport = rng.choice(TRANSPORTS)
    algorithm = rng.choice(("", *_algorithms()))
    num_faulty = 2 if size > 2 and rng.random() < 0.15 else 1
    faults = [_draw_fault(rng, rank, transport, algorithm) for rank in rng.sample(range(size), num_faulty)]
    return Case(seed, index, size, transport, algorithm, tuple(faults))


@functools.cache
def _algorithms() -> tuple[str, ...]:
    """Returns all algorithms, plug-ins included."""
    return bagua.algorithms.available()


def _draw_fault(rng: random.Random, rank: int, transport: str, algorithm: str) -> Fault:
    kind = "cut" if transport == "namespaces" and rng.random() < 0.5 else rng.choice(KINDS[:-1])
    wheres = ["before"] if kind == "raise" else ["before", "in"]
    if rng.random() < 0.4:
        phase = rng.choice(("init", "wrap") if algorithm else ("init",))
    else:
        phase = f"step {rng.randrange(_NUM_STEPS)}"
        wheres += ["backward"] if algorithm else []
    return Fault(rank, kind, rng.choice(wheres), phase, rng.uniform(0, 0.1 if phase == "init" else 0.03))


def run_case(case: Case) -> Verdict:
    """Runs a case and returns its verdict; no process of it is left."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bagua-faults-")))
        host_names, env = stack.enter_context(_network(case))
        pool = Pool(case.size, nodes=case.size if host_names else 1)
        stack.callback(pool.kill)
        env = {**env, "BAGUA_HEARTBEAT_TIMEOUT": str(HEARTBEAT_TIMEOUT_S)}
        started = pool.start(run, args=(case, str(folder), host_names), env=env)
        resumed, ends, stacks = _wait(case, started, folder)
        return judge(case, struck_at(folder, case), resumed, ends, stacks)


@contextlib.contextmanager
def _network(case: Case) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yields the host of each rank (none if all share this one) and the environment that selects the transport."""
    if case.transport != "namespaces":
        yield [], {"BAGUA_SHARED_MEMORY": "1" if case.transport == "shm" else "0"}
        return
    with hosts.hosts(case.size + 1, None) as prefixes:  # the store has a host of its own, as a launcher may
        *names, name = [prefix[-1] for prefix in prefixes]
        store = _store_on(name, hosts.address(case.size))
        address = {"MASTER_ADDR": hosts.address(case.size), "MASTER_PORT": str(store.port)}
        yield names, {"BAGUA_SOCKET_IFNAME": "eth0", **address}


def _store_on(host: str, address: str) -> TCPStore:
    """Returns a store that this process holds on another host."""
    made: list[TCPStore] = []

    def make() -> None:
        hosts.move_to(host)
        made.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))

    thread = threading.Thread(target=make, name="store")  # a thread can move to a host by itself
    thread.start()
    thread.join()
    return made[0]


def _wait(case: Case, started: Run, folder: Path) -> tuple[float, dict[int, Any], str]:
    """Waits until all ranks that are not stopped have ended, then continues the stopped ones.

    Returns:
        The time at which those were continued, the outcome of each rank, and the stacks of ranks that did not end in
        time.
    """
    begin = time.monotonic()
    while True:
        ends = started.ended(_POLL_S)
        running = [rank for rank in range(case.size) if rank not in ends and not started.is_stopped(rank)]
        if not running:
            break
        struck = struck_at(folder, case)
        due = [_due(fault, struck) for fault in case.faults if fault.rank in struck]
        if time.monotonic() > max(due, default=begin + _START_LIMIT_S):
            return time.monotonic(), ends, started.stacks()
    resumed = time.monotonic()
    for rank in set(range(case.size)) - set(ends):
        cont(started.pids[rank])
    ends = started.ended(LIMIT_S)
    return resumed, ends, "" if len(ends) == case.size else started.stacks()


def _due(fault: Fault, struck: dict[int, float]) -> float:
    """Returns the time by which its rank, and every rank that waits for it, must have ended."""
    return struck[fault.rank] + (SLEEP_S if fault.kind == "sleep" else 0) + LIMIT_S


def judge(case: Case, struck: dict[int, float], resumed: float, ends: dict[int, Any], stacks: str) -> Verdict:
    """Judges the outcomes of all ranks.

    Args:
        struck: by rank, the time at which its fault struck.
        resumed: the time at which stopped ranks were continued.
        ends: by rank, its Report or Failure; ranks that did not end are missing.
        stacks: the stacks of those.
    """
    bad = {rank: _defect_of_rank(case, rank, ends.get(rank), struck, resumed) for rank in range(case.size)}
    words = sorted({word for word in bad.values() if word})
    reports = {rank: end for rank, end in ends.items() if isinstance(end, Report)}
    if any(len({*digests}) > 1 for digests in _by_step([report.digests for report in reports.values()])):
        words.append("wrong numbers")
    if not struck:
        words.append("no fault")  # the case tested nothing
    last = max(struck.values(), default=resumed)
    seconds = max((report.at - last for rank, report in reports.items() if rank not in struck), default=0.0)
    details = [f"rank {rank}: {_describe(ends.get(rank), last)}" for rank in range(case.size)] + stacks.splitlines()
    details = [f"faults struck on ranks {sorted(struck)}", *details]
    return Verdict(", ".join(words) or "ok", max(seconds, 0.0), details if words else [])


def _by_step(digests: Sequence[list[str]]) -> Iterator[list[str]]:
    """Yields the digests of all ranks that have one, step by step."""
    for step in range(max(map(len, digests), default=0)):
        yield [of_rank[step] for of_rank in digests if step < len(of_rank)]


def _defect_of_rank(
    case: Case, rank: int, end: Report | Failure | None, struck: dict[int, float], resumed: float
) -> str:
    """Returns the defect in the end of a rank, "" if there is none."""
    fault = next((fault for fault in case.faults if fault.rank == rank and rank in struck), None)
    if end is None:
        return "hang"
    if isinstance(end, Failure):
        signal_number = _SIGNALS.get(fault.kind) if fault else None
        if isinstance(end.error, RankDied):
            return "" if signal_number and end.error.exit_code == -signal_number else "died"
        return "wrong numbers" if isinstance(end.error, WrongNumbers) else "another error"
    since = max(struck.values(), default=end.ended)
    if fault is not None:
        since = max(since, {"sleep": struck[rank] + SLEEP_S, "stop": resumed}.get(fault.kind, since))
    if end.ended - since > LIMIT_S:
        return "late"
    if not end.error:
        return "unnoticed" if struck else ""
    return "" if end.error == "InjectedFault" else _defect_of_blame(case, rank, end.named, struck)


def _defect_of_blame(case: Case, rank: int, named: int | None, struck: dict[int, float]) -> str:
    """Returns the defect in the rank that an error names, "" if there is none."""
    if named in struck:
        return ""
    cut = {fault.rank for fault in case.faults if fault.kind == "cut" and fault.rank in struck}
    # If no other rank can know on which side a link was cut, the error may name no rank, or the rank itself.
    is_alone = bool(cut) and len(struck.keys() | {rank}) == case.size
    # The same holds if at least half of the ranks were cut off: they might be together on the other side.
    is_half = 2 * len(cut) >= case.size
    if named is None:
        return "" if is_alone or is_half or rank in struck else "no rank named"
    return "" if is_alone and named == rank and case.size > 2 else "innocent named"


def _describe(end: Report | Failure | None, last: float) -> str:
    if end is None:
        return "has not ended"
    if isinstance(end, Failure):
        return end.text or str(end.error)
    if not end.error:
        return f"succeeded, {end.ended - last:.2f} s after the fault"
    when = f"after {end.at - last:.2f} s, ended after {end.ended - last:.2f} s"
    return f"{end.error} {when}, names {end.named}: {end.message}"


def _table(results: Sequence[tuple[Case, Verdict]]) -> str:
    """Returns a table of counts and the longest time, by kind and moment of the fault."""
    rows: dict[str, list[Verdict]] = defaultdict(list)
    for case, verdict in results:
        for key in (_kind_of(case), "all"):
            rows[key].append(verdict)
    lines = [f"{'fault':24}  cases     ok    bad  skipped  longest"]
    for key in sorted(rows, key=lambda key: (key == "all", key)):
        verdicts = rows[key]
        skipped = sum(verdict.words.startswith("skipped") for verdict in verdicts)
        bad = sum(not verdict.is_good for verdict in verdicts)
        longest = max(verdict.seconds for verdict in verdicts)
        counts = f"{len(verdicts):5}  {len(verdicts) - skipped - bad:5}  {bad:5}  {skipped:7}"
        lines.append(f"{key:24}  {counts}  {longest:5.2f} s")
    return "\n".join(lines)


def _kind_of(case: Case) -> str:
    if len(case.faults) > 1:
        return "two ranks"
    (fault,) = case.faults
    return f"{fault.kind}, in {'training' if fault.phase.startswith('step') else 'set-up'}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bagua.testing.random_faults",
        description="Small jobs in which ranks are killed, stopped, cut off, late or raise an exception, in set-up or "
        "in training; each must end in time with an error that names the rank at fault. The exit status is 1 "
        "if one did not. Cases on several hosts (network namespaces) need root.",
    )
    parser.add_argument("--count", type=int, default=300, help="number of cases (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="K", help="index of the first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of all cases (default: %(default)s)")
    parser.add_argument(
        "--only", type=int, action="append", metavar="K", help="only the case of this index; repeatable"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.count < 1:
        parser.error(f"--count is {args.count}; expected 1 or more")
    # torch's store looks up the name of each peer, which takes seconds on hosts without a name server, and warns.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    no_hosts = hosts.why_not()
    results = []
    for index in args.only or range(args.first, args.first + args.count):
        case = draw(args.seed, index)
        if no_hosts and case.transport == "namespaces":
            verdict = Verdict(f"skipped: {no_hosts}", 0.0, [])
        else:
            verdict = run_case(case)
        print(f"seed {args.seed}  case {index:3}  {case}  {verdict.seconds:.2f} s  {verdict.words}", flush=True)
        for line in verdict.details:
            print(f"    {line}", flush=True)
        results.append((case, verdict))
    print(f"\n{_table(results)}")
    return 0 if all(verdict.is_good for _, verdict in results) else 1


if __name__ == "__main__":
    sys.exit(main())
