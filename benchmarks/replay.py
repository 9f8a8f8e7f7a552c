"""What would each algorithm do for this model on that network?

Plays a model's profile on hosts with shaped links (network namespaces on this machine; needs root), under torch DDP on
gloo in three precisions and under every algorithm of bagua: real tensors, real buckets, real communication, and a sleep
in the place of compute. `--scale 0.1` shrinks tensors, so that 1 Gbit/s stands for 10 Gbit/s; buckets do not shrink
with them, so DDP and bagua also play with caps that do. All systems of a case run in the same processes, one
after the other, compute alone first; `--turns` as often, so that what drifts meets all alike. Columns:

    ratio            the best DDP's median over the system's
    exposed ms       step less compute alone
    waiting ms       what bagua's own timeline says that a step waited, a mean
    wire MB          what a host's link carried per step, headers and acknowledgements too
    bound ms         what nobody can beat who sends these bytes: none leaves before its gradient is ready, the link is a
                     token bucket of its rate, and compute is what it is
    of bound         step over bound

    sudo .venv/bin/python benchmarks/replay.py [--profiles vgg16 bert_large] [--hosts 4] [--rates 1000] [--scale 1]
        [--ranks-per-host 1] [--systems ddp bytegrad qsgd:bits=4 ...] [--turns 1] [--congestion cubic] [--quick]

A profile is a file of benchmarks/profiles/, or one that `bagua bench record` has made. Under a launcher (`bagua run ...
benchmarks/replay.py`) it plays on the hosts that it is started on, for which `--rates` names the rate of their links.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import hosts
import ranks
import report
import timing
from replay_systems import ALONE, DDP_HOOKS, Result, Task, bound_s, check, is_launched, measure, measure_here, parse

import bagua
from bagua.profiles import Profile

PROFILES = Path(__file__).parent / "profiles"
SYSTEMS = (
    *DDP_HOOKS,
    "gradient_allreduce",
    "bytegrad",
    "qsgd",
    "qsgd:bits=4",
    "qsgd:bits=2",
    "qadam",
    "decentralized",
    "low_precision_decentralized",
    "local_sgd",
    "async",
)
_SHRUNK = ("ddp", "ddp_fp16", "gradient_allreduce", "bytegrad", "qsgd:bits=4")
_CAP_MIB = 25  # of a bucket, torch's default and bagua's
# Profile and system at 4 hosts, 1 Gbit/s, scale 0.1: the time of the best DDP as it comes over ours, and ours over the
# bound.
BARS = {
    ("vgg16", "gradient_allreduce"): (1.0, 1.08),
    ("vgg16", "bytegrad"): (2.1, 1.15),
    ("vgg16", "qsgd:bits=4"): (2.6, 1.15),
    ("bert_large", "gradient_allreduce"): (1.0, 1.08),
    ("bert_large", "bytegrad"): (1.9, 1.15),
    ("bert_large", "qsgd:bits=4"): (3.0, 1.15),
}
# Where compute hides all communication: profile, rate, and the step over compute alone.
HIDDEN = ("resnet50", 5000, 1.05)


@dataclass(frozen=True)
class Case:
    """A profile on a network; `rate_mbit` is that of every host's link."""

    profile: str
    scale: float
    num_hosts: int
    ranks_per_host: int
    rate_mbit: int
    congestion: str = ""  # control of all TCP connections; as they come if empty

    def task(self, systems: Sequence[str], samples: int, turns: int) -> Task:
        """What a rank does in it."""
        return Task(str(self.path), self.scale, self.rate_mbit, list(systems), samples, turns)

    def __str__(self) -> str:
        ranks_each = f" x {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return (
            f"{Path(self.profile).stem}, scale {self.scale:g}, {self.num_hosts} hosts{ranks_each}, "
            f"{self.rate_mbit} Mbit/s{f', {self.congestion} for all' if self.congestion else ''}"
        )

    @property
    def path(self) -> Path:
        """Of the profile: one of ours by name, or any file."""
        ours = PROFILES / f"{self.profile}.json"
        return ours if ours.exists() else Path(self.profile)


@dataclass
class Outcome:
    """One system in one case, over all ranks."""

    case: Case
    system: str
    step_s: list[float]  # the slowest rank's
    compute_s: float
    bound_s: float
    wire_bytes: float
    waiting_s: float | None

    @property
    def p50(self) -> float:
        """Seconds per step."""
        return statistics.median(self.step_s)


def systems_of(scale: float) -> tuple[str, ...]:
    """All systems as they come; of a smaller model also some whose buckets shrink along."""
    if scale >= 1:
        return SYSTEMS
    shrunk = []
    for system in _SHRUNK:
        is_ddp = system in DDP_HOOKS
        cap = f"bucket_cap_mb={_CAP_MIB * scale:g}" if is_ddp else f"bucket_bytes={int(_CAP_MIB * 2**20 * scale)}"
        shrunk.append(f"{system}{',' if ':' in system else ':'}{cap}")
    return (*SYSTEMS, *shrunk)


def run(case: Case, systems: Sequence[str], samples: int, turns: int = 1) -> list[Outcome]:
    """Makes the hosts, starts the ranks, and merges what they measured; compute alone first."""
    control = {"BAGUA_TCP_CONGESTION": "system"} if case.congestion else {}
    with hosts.hosts(case.num_hosts, case.rate_mbit, case.congestion) as prefixes:
        per_rank = ranks.run(
            case.num_hosts * case.ranks_per_host,
            asdict(case.task(systems, samples, turns)),
            env={"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0", **control},
            prefixes=prefixes,
            ranks_per_prefix=case.ranks_per_host,
            master_addr=hosts.address(0),
            timeout_s=3600,
        )
    return outcomes_of(case, per_rank, hosts.BURST_BYTES)


def outcomes_of(case: Case, per_rank: Sequence[Sequence[dict]], burst_bytes: float) -> list[Outcome]:
    """From every rank's results to one per system; links carry `burst_bytes` at once."""
    outcomes: list[Outcome] = []
    for of_system in zip(*per_rank, strict=True):
        results = [Result(**one) for one in of_system]
        first = results[0]
        step_s = timing.slowest([result.step_s for result in results])
        first.wire_bytes = max(result.wire_bytes for result in results)
        compute_s = outcomes[0].p50 if outcomes else statistics.median(step_s)
        waiting = [result.waiting_s for result in results if result.waiting_s is not None]
        bound = bound_s(first, compute_s, case.rate_mbit, burst_bytes)
        waiting_s = max(waiting, default=None)
        outcomes.append(Outcome(case, first.system, step_s, compute_s, bound, first.wire_bytes, waiting_s))
    return outcomes


def is_ddp(outcome: Outcome) -> bool:
    """Whether it is one of torch's, with whatever options."""
    return parse(outcome.system)[0] in DDP_HOOKS


def rows_of(outcomes: Sequence[Outcome]) -> list[report.Row]:
    """Compared to the best DDP of the case, where one was measured."""
    rows = {outcome.system: report.Row(outcome.system, outcome.step_s) for outcome in outcomes}
    best = min((rows[one.system] for one in outcomes if is_ddp(one)), key=lambda row: row.p50, default=None)
    for outcome in outcomes:
        row = rows[outcome.system]
        row.baseline = best if row is not best and outcome.system != ALONE else None
        if outcome.system != ALONE:
            row.cells = {
                "exposed ms": report.three_digits(max(0.0, outcome.p50 - outcome.compute_s) * 1e3),
                "waiting ms": "" if outcome.waiting_s is None else report.three_digits(outcome.waiting_s * 1e3),
                "wire MB": report.three_digits(outcome.wire_bytes / 1e6),
                "bound ms": report.three_digits(outcome.bound_s * 1e3),
                "of bound": f"{outcome.p50 / outcome.bound_s:.2f}",
            }
    return list(rows.values())


def bars_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What this project has set itself, beside what was measured; one line each."""
    case = outcomes[0].case
    if (case.scale, case.num_hosts, case.ranks_per_host, case.congestion) != (0.1, 4, 1, ""):
        return []
    by_name = {outcome.system: outcome for outcome in outcomes}
    lines = []
    profile, rate_mbit, overhead = HIDDEN
    if (case.profile, case.rate_mbit) == (profile, rate_mbit):
        for system in ("gradient_allreduce", "bytegrad", "qsgd:bits=4"):
            if system in by_name:
                reached = by_name[system].p50 / by_name[system].compute_s
                lines.append(
                    f"- {profile} at {rate_mbit} Mbit/s, {system}: compute hides the communication; the step takes "
                    f"{reached:.3f} of compute alone (bar {overhead}): {'met' if reached <= overhead else 'MISSED'}"
                )
    if case.rate_mbit != 1000:
        return lines
    for (profile, system), (ratio, of_bound) in BARS.items():
        is_full = system == "gradient_allreduce"
        baselines = [by_name[name].p50 for name in (("ddp",) if is_full else DDP_HOOKS) if name in by_name]
        if profile != case.profile or system not in by_name or not baselines:
            continue
        ours = by_name[system]
        best_s = min(baselines)
        reached = (best_s / ours.p50, ours.p50 / ours.bound_s)
        is_met = reached[0] >= ratio and reached[1] <= of_bound
        missed = "MISSED" if best_s / ours.bound_s >= ratio else "MISSED, and beyond its bound on this machine"
        beside = "DDP" if is_full else "the best DDP as it comes"
        tuned_s = min(one.p50 for one in outcomes if is_ddp(one))
        also = "" if is_full or tuned_s == best_s else f"; {tuned_s / ours.p50:.2f} beside one with smaller buckets"
        lines.append(
            f"- {profile}, {system}: {reached[0]:.3f} times as fast as {beside} (bar {ratio}, at its bound it would be "
            f"{best_s / ours.bound_s:.2f}{also}), {reached[1]:.2f} of its bound (bar {of_bound}): "
            f"{'met' if is_met else missed}"
        )
    return lines


def add_case(result: report.Report, outcomes: Sequence[Outcome]) -> None:
    """A table, and the bars that are set for its case."""
    notes = ["ratio: the best DDP's median over the system's. The other columns: see the head of benchmarks/replay.py."]
    result.add(report.Table(str(outcomes[0].case), rows_of(outcomes), notes=notes))
    bars = bars_of(outcomes)
    if bars:
        result.say(*bars)


def _arguments() -> argparse.Namespace:
    """The options, after what is wrong with them was said."""
    parser = report.parser(__doc__)
    parser.add_argument("--profiles", nargs="+", default=["vgg16", "bert_large"], help="names, or files")
    parser.add_argument("--hosts", nargs="+", type=int, help="how many; 4")
    parser.add_argument("--ranks-per-host", type=int, help="1")
    parser.add_argument("--rates", nargs="+", type=int, default=[1000], help="Mbit/s of every host's link")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tensors' sizes")
    parser.add_argument("--systems", nargs="+", help="ddp, ddp_fp16, ddp_bf16, or an algorithm; all of them")
    parser.add_argument("--congestion", default="", help="TCP's, for DDP and bagua (default: as they come)")
    parser.add_argument("--turns", type=int, default=1, help="how often all systems are measured")
    args = parser.parse_args()
    has_hosts = args.hosts is not None or args.ranks_per_host is not None
    args.hosts = [4] if args.hosts is None else args.hosts
    args.ranks_per_host = 1 if args.ranks_per_host is None else args.ranks_per_host
    for option in ("hosts", "ranks_per_host", "rates", "turns"):
        values = getattr(args, option)
        least = min(values if isinstance(values, list) else [values])
        if least < 1:
            parser.error(f"--{option.replace('_', '-')} has {least}; expected 1 or more")
    if not 0 < args.scale < math.inf:
        parser.error(f"--scale is {args.scale}; expected a number of more than 0, such as 0.1")
    available = hosts.available_congestions()
    if args.congestion and args.congestion not in available:
        parser.error(f"--congestion is {args.congestion}; this kernel has {', '.join(available)}")
    if is_launched() and (has_hosts or args.congestion or len(args.rates) > 1):
        parser.error("under a launcher the hosts are those that there are; pass one of --rates, that of their links")
    known = (*DDP_HOOKS, *bagua.algorithms.available())
    unknown = [system for system in args.systems or () if parse(system)[0] not in known]
    if unknown:
        parser.error(f"--systems has {', '.join(unknown)}; expected {', '.join(known)}, with or without options")
    for system in args.systems or ():
        try:
            check(system)
        except bagua.InvalidArgument as error:
            parser.error(f"--systems has {system}: {error}")
    missing = [profile for profile in args.profiles if not Case(profile, 1, 1, 1, 1).path.exists()]
    if missing:
        names = ", ".join(sorted(path.stem for path in PROFILES.glob("*.json")))
        parser.error(f"--profiles has {', '.join(missing)}; expected a file, or one of {names}")
    for profile in args.profiles:
        try:
            Profile.load(Case(profile, 1, 1, 1, 1).path)
        except bagua.InvalidArgument as error:
            parser.error(f"--profiles: {error}")
    args.systems = args.systems or systems_of(args.scale)
    return args


def main() -> None:
    args = _arguments()
    samples = 3 if args.quick else 7
    if is_launched():
        _main_of_rank(args, samples)
        return
    reason = hosts.why_not()
    if reason is not None:
        print(f"replay SKIPPED: {reason}. Under a launcher it plays on the hosts that there are.")
        return
    setup = {
        "TCP": args.congestion or f"DDP has the system's {hosts.system_congestion()}, bagua what `bagua doctor` says"
    }
    result = report.Report(__file__, "a model's step under every algorithm, on shaped links", args, setup)
    cases = [
        Case(profile, args.scale, num_hosts, args.ranks_per_host, rate, args.congestion)
        for profile in args.profiles
        for num_hosts in args.hosts
        for rate in args.rates
    ]
    everything = []
    for case in cases:
        outcomes = run(case, args.systems, samples, args.turns)
        everything.append(outcomes)
        add_case(result, outcomes)
    figure, axes = report.subplots(len(cases))
    for axis, outcomes in zip(axes, everything, strict=True):
        report.bars(axis, rows_of(outcomes), str(outcomes[0].case), "ms per step", 1e3)
        for place, outcome in enumerate(outcomes):
            axis.plot([outcome.bound_s * 1e3] * 2, [place - 0.4, place + 0.4], color="tab:red")
    figure.tight_layout()
    result.write(figure)


def _main_of_rank(args: argparse.Namespace, samples: int) -> None:
    """On a rank that a launcher has started: the network is the one that is there; rank 0 reports."""
    cases = [Case(profile, args.scale, 1, 1, args.rates[0]) for profile in args.profiles]
    place, per_case = measure_here([case.task(args.systems, samples, args.turns) for case in cases])
    if place.rank == 0:
        result = report.Report(__file__, "a model's step under every algorithm, on these hosts", args)
        for case, per_rank in zip(cases, per_case, strict=True):
            here = replace(case, num_hosts=place.num_hosts, ranks_per_host=place.ranks_per_host)
            add_case(result, outcomes_of(here, per_rank, 0))
        result.write()


if __name__ == "__main__":
    ranks.main(measure, main)
