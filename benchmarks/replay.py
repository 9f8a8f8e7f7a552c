"""What would each algorithm do for this model on that network?

Plays a model's profile on hosts with shaped links (network namespaces on this machine; needs root), under torch DDP on
gloo in three precisions and under every algorithm of bagua: real tensors, real buckets, real communication, and a sleep
in the place of compute. `--scale 0.1` shrinks tensors, so that 1 Gbit/s stands for 10 Gbit/s; buckets do not shrink
with them, so DDP and bagua also play with caps that do. All systems of a case run in the same processes, one
after the other, compute alone first; `--turns` as often, so that what drifts meets all alike. Columns:

    ratio            the best DDP's median over the system's
    processor ms     how long a rank's threads ran per step, in the kernel too, a mean; all hosts share the cores
    stolen %         what the hypervisor took of this machine's processors meanwhile, where it says so
    exposed ms       step less compute alone
    waiting ms       what bagua's own timeline says that a step waited, a mean
    wire MB          what a host's link carried per step, headers and acknowledgements too
    bound ms         what nobody can beat who sends these bytes: none leaves before its gradient is ready, the link is a
                     token bucket of its rate, and compute is what it is
    of bound         step over bound

A system is measured again, at most twice, while a hypervisor takes more than 10% of the processors; so is compute alone
while it, which only sleeps, takes 5% longer than the profile says. What was disturbed least counts.

    sudo .venv/bin/python benchmarks/replay.py [--profiles vgg16 bert_large] [--hosts 4] [--rates 1000] [--scale 1]
        [--ranks-per-host 1] [--systems ddp bytegrad qsgd:bits=4 ...] [--turns 1] [--congestion cubic] [--quick]

A profile is a file of benchmarks/profiles/, or one that `bagua bench record` has made. Under a launcher (`bagua run ...
benchmarks/replay.py`) it plays on the hosts that it is started on, for which `--rates` names the rate of their links;
without it there is no bound. Where there are two of `--rates` or more, the plot has them on its lower axis. Results are
named by the profiles.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import hosts
import ranks
import report
from replay_bars import bars_of
from replay_cases import PROFILES, Case, Outcome, cells_of, is_ddp, outcomes_of
from replay_plots import PLOTTED, plot
from replay_systems import ALONE, DDP_HOOKS, check, is_launched, measure, measure_here, parse

import bagua
from bagua.replay.profiles import Profile

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
_SHRUNK = (*DDP_HOOKS, "gradient_allreduce", "bytegrad", "qsgd:bits=4")
_CAP_MIB = 25  # of a bucket, torch's default and bagua's


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


def rows_of(outcomes: Sequence[Outcome]) -> list[report.Row]:
    """Compared to the best DDP of the case, where one was measured."""
    rows = {outcome.system: report.Row(outcome.system, outcome.step_s) for outcome in outcomes}
    best = min((rows[one.system] for one in outcomes if is_ddp(one)), key=lambda row: row.p50, default=None)
    for outcome in outcomes:
        row = rows[outcome.system]
        row.baseline = best if row is not best and outcome.system != ALONE else None
        row.cells = cells_of(outcome)
        row.cells["stolen %"] = "" if outcome.stolen is None else f"{100 * outcome.stolen:.1f}"
        row.cells["waiting ms"] = "" if outcome.waiting_s is None else report.three_digits(outcome.waiting_s * 1e3)
    return list(rows.values())


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
    parser.add_argument("--rates", nargs="+", type=int, help="Mbit/s of every host's link; 1000")
    parser.add_argument("--scale", type=float, default=1.0, help="of the tensors' sizes")
    parser.add_argument("--systems", nargs="+", help="ddp, ddp_fp16, ddp_bf16, or an algorithm; all of them")
    parser.add_argument("--congestion", default="", help="TCP's, for DDP and bagua (default: as they come)")
    parser.add_argument("--turns", type=int, default=1, help="how often all systems are measured")
    args = parser.parse_args()
    has_hosts = args.hosts is not None or args.ranks_per_host is not None
    args.hosts = [4] if args.hosts is None else args.hosts
    args.ranks_per_host = 1 if args.ranks_per_host is None else args.ranks_per_host
    rates = args.rates or [1000]
    args.rates = [None] if is_launched() and args.rates is None else rates
    for option, values in (("ranks-per-host", [args.ranks_per_host]), ("rates", rates), ("turns", [args.turns])):
        if min(values) < 1:
            parser.error(f"--{option} has {min(values)}; expected 1 or more")
    for option, values in (("profiles", args.profiles), ("hosts", args.hosts), ("rates", args.rates)):
        twice = next((value for value in values if list(values).count(value) > 1), None)
        if twice is not None:
            parser.error(f"--{option} has {twice} more than once")
    for reason in filter(None, map(hosts.why_not_as_many, args.hosts)):
        parser.error(f"--hosts has {reason}")
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
    args.plotted = args.systems or PLOTTED
    args.systems = args.systems or systems_of(args.scale)
    return args


def main() -> None:
    args = _arguments()
    samples = 3 if args.quick else 7
    if is_launched():
        _main_of_rank(args, samples)
        return
    hosts.need("replay", "Under a launcher it plays on the hosts that there are.")
    setup = {
        "TCP": args.congestion or f"DDP has the system's {hosts.system_congestion()}, bagua what `bagua doctor` says"
    }
    result = _report("a model's step under every algorithm, on shaped links", args, setup)
    cases = [
        Case(profile, args.scale, num_hosts, args.ranks_per_host, rate, args.congestion)
        for profile in args.profiles
        for num_hosts in args.hosts
        for rate in args.rates
    ]
    everything = []
    for case in cases:
        everything.append(run(case, args.systems, samples, args.turns))
        add_case(result, everything[-1])
    result.write(plot(everything, args.plotted))


def _link(rate_mbit: int | None) -> Mapping[str, str]:
    """What the header says of links that are there, not made."""
    return {"link": "not named; give --rates to have the bound" if rate_mbit is None else f"{rate_mbit} Mbit/s"}


def _report(question: str, args: argparse.Namespace, setup: Mapping[str, str]) -> report.Report:
    """Of one name for each choice of profiles."""
    stems = (Path(profile).stem for profile in args.profiles)
    return report.Report(__file__, question, args, setup, subject="-".join(dict.fromkeys(stems)))


def _main_of_rank(args: argparse.Namespace, samples: int) -> None:
    """On a rank that a launcher has started: the network is the one that is there; rank 0 reports."""
    cases = [Case(profile, args.scale, 1, 1, args.rates[0]) for profile in args.profiles]
    place, per_case = measure_here([case.task(args.systems, samples, args.turns) for case in cases])
    if place.rank == 0:
        result = _report("a model's step under every algorithm, on these hosts", args, _link(args.rates[0]))
        everything = []
        for case, per_rank in zip(cases, per_case, strict=True):
            here = replace(case, num_hosts=place.num_hosts, ranks_per_host=place.ranks_per_host)
            everything.append(outcomes_of(here, per_rank, 0))
            add_case(result, everything[-1])
        result.write(plot(everything, args.plotted))


if __name__ == "__main__":
    ranks.main(measure, main)
