"""The command `bagua bench replay`: compares every algorithm and torch DDP on a model's profile and a network.

Options -> cases -> ranks that measure (systems.py) -> outcomes (cases.py) -> a table for each case, and on request a
CSV file and a plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

import bagua
from bagua import config
from bagua.errors import InvalidArgument
from bagua.replay import hosts, report
from bagua.replay.cases import PROFILES, Case, Outcome, outcomes_of
from bagua.replay.plots import PLOTTED, check_format, plot
from bagua.replay.profiles import Profile
from bagua.replay.ranks import Ranks, RanksFailed
from bagua.replay.systems import AUTO, DDP_HOOKS, HOOKS, check, check_scaled, measure_here, parse

__all__ = ["RanksFailed", "checked", "run", "systems_of"]

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
    "async_averaging",
)
_SHRUNK = (*DDP_HOOKS, "gradient_allreduce", "bytegrad", "qsgd:bits=4")
_CAP_MIB = 25  # bucket size, the default of torch and bagua
_SAMPLES, _FEW_SAMPLES = 7, 3
_TIMEOUT_S = 3600.0  # for one case


def _ours() -> list[str]:
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def systems_of(scale: float) -> tuple[str, ...]:
    """Returns all systems with their defaults; for a scaled model also some whose buckets are scaled too."""
    if scale >= 1:
        return SYSTEMS
    shrunk = []
    for system in _SHRUNK:
        is_ddp = system in DDP_HOOKS
        cap = f"bucket_cap_mb={_CAP_MIB * scale:g}" if is_ddp else f"bucket_bytes={int(_CAP_MIB * 2**20 * scale)}"
        shrunk.append(f"{system}{',' if ':' in system else ':'}{cap}")
    return (*SYSTEMS, *shrunk)


def checked(parser: argparse.ArgumentParser, args: argparse.Namespace) -> argparse.Namespace:
    """Fills in defaults of the options and checks them; the parser ends with an error before anything runs."""
    is_launched = config.is_launched()
    has_hosts = args.hosts is not None or args.ranks_per_host is not None
    args.hosts = [4] if args.hosts is None else args.hosts
    args.ranks_per_host = 1 if args.ranks_per_host is None else args.ranks_per_host
    rates = args.rates or [1000]
    args.rates = [None] if is_launched and args.rates is None else rates
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
    if is_launched and (has_hosts or args.congestion or len(args.rates) > 1):
        parser.error("under a launcher its hosts are used; pass only --rates, with the one rate of their links")
    known = (*HOOKS, AUTO, *bagua.algorithms.available())
    unknown = [system for system in args.systems or () if not _is_system(parse(system)[0], known)]
    if unknown:
        parser.error(f"--systems has {', '.join(unknown)}; expected {', '.join(known)}, with or without options")
    for system in args.systems or ():
        try:
            check(system)
        except InvalidArgument as error:
            parser.error(f"--systems has {system}: {error}")
    missing = [profile for profile in args.profiles if not Case(profile, 1, 1, 1, 1).path.exists()]
    if missing:
        parser.error(f"--profiles has {', '.join(missing)}; expected a file, or one of {', '.join(_ours())}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which is not installed: pip install matplotlib")
    try:
        profiles = [Profile.load(Case(profile, 1, 1, 1, 1).path) for profile in args.profiles]
        for option, path, example in (("--csv", args.csv, "replay.csv"), ("--plot", args.plot, "replay.png")):
            if path is not None:
                report.check_file(option, path, example)
        if args.csv is not None:
            report.check_csv(args.csv)
        if args.plot is not None:
            check_format(args.plot)
    except InvalidArgument as error:
        parser.error(str(error))
    args.plotted = args.systems or PLOTTED
    args.systems = args.systems or systems_of(args.scale)
    for system in args.systems:
        for name, profile in zip(args.profiles, profiles, strict=True):
            try:
                check_scaled(system, profile, args.scale)
            except InvalidArgument as error:
                parser.error(f"{system} cannot be played with {name}: {error}, or name other --systems")
    return args


def _is_system(name: str, known: Sequence[str]) -> bool:
    if name in known:
        return True
    try:
        bagua.algorithms.get(name)
    except InvalidArgument:
        return False
    return True  # an abbreviation, such as async


def run(args: argparse.Namespace) -> None:
    """Plays all cases of checked options and prints the outcomes; under a launcher, rank 0 prints them."""
    if config.is_launched():
        _run_here(args)
        return
    reason = hosts.why_not()
    if reason is not None:
        raise InvalidArgument(
            f"no hosts can be made here: {reason}. A launcher's hosts can be used instead: "
            "bagua run --nproc-per-node 2 -m bagua bench replay ..."
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts are removed and ranks ended
    cases = [
        Case(profile, args.scale, num_hosts, args.ranks_per_host, rate, args.congestion)
        for profile in args.profiles
        for num_hosts in args.hosts
        for rate in args.rates
    ]
    control = args.congestion or f"DDP has the system's {hosts.system_congestion()}, bagua what `bagua doctor` says"
    _say_head({"TCP": control})
    everything = []
    for case in cases:
        print(f"playing {case}, {len(args.systems)} systems ...", file=sys.stderr, flush=True)
        everything.append(play(case, args.systems, _samples(args), args.turns))
        _say(args, everything)


def rank_command() -> list[str]:
    """Returns the command that starts bagua/replay/__main__.py.

    It runs with this process's sys.path, because `python -m` searches the current folder first, which may hold bagua's
    source that is not built.
    """
    program = (
        "import json, runpy, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
        "runpy.run_module('bagua.replay', run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-c", program, json.dumps(sys.path)]


def play(case: Case, systems: Sequence[str], samples: int, turns: int = 1) -> list[Outcome]:
    """Makes the hosts, starts the ranks, and merges their results; compute alone comes first."""
    control = {"BAGUA_TCP_CONGESTION": "system"} if case.congestion else {}
    env = {"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0", **control}
    task = asdict(case.task(systems, samples, turns))
    with (
        hosts.hosts(case.num_hosts, case.rate_mbit, case.congestion) as prefixes,
        Ranks(rank_command(), case.num_hosts * case.ranks_per_host, task, env, hosts.address(0)) as ranks,
    ):
        ranks.start(prefixes)
        return outcomes_of(case, ranks.collect(_TIMEOUT_S), hosts.BURST_BYTES)


def _run_here(args: argparse.Namespace) -> None:
    """Plays all cases on a rank that a launcher started, on the network of its hosts."""
    (rate_mbit,) = args.rates
    cases = [Case(profile, args.scale, 1, 1, rate_mbit) for profile in args.profiles]
    position, per_case = measure_here([case.task(args.systems, _samples(args), args.turns) for case in cases])
    if position.rank != 0:
        return
    _say_head({"link": "not named; --rates gives the bound" if rate_mbit is None else f"{rate_mbit} Mbit/s"})
    everything = []
    for case, per_rank in zip(cases, per_case, strict=True):
        here = replace(case, num_hosts=position.num_hosts, ranks_per_host=position.ranks_per_host)
        everything.append(outcomes_of(here, per_rank, 0))
        _say(args, everything)


def _samples(args: argparse.Namespace) -> int:
    return _FEW_SAMPLES if args.quick else _SAMPLES


def _say_head(setup: dict[str, str]) -> None:
    for name, value in {**report.taken_on(), **setup}.items():
        print(f"- {name}: {value}")
    print(flush=True)


def _say(args: argparse.Namespace, everything: Sequence[Sequence[Outcome]]) -> None:
    """Prints the last case, appends it to the CSV file, and plots all cases so far."""
    outcomes = everything[-1]
    case = outcomes[0].case
    print(f"### {case}\n")
    if case.rate_mbit is not None and case.num_hosts > 1:
        profile = Profile.load(case.path).scaled(case.scale)
        print(f"wire over compute: {report.three_digits(profile.wire_over_compute(case.num_hosts, case.rate_mbit))}\n")
    chose = [f"{one.system} {one.chose}\n" for one in outcomes if one.chose]
    print(*report.table(outcomes), "", *chose, sep="\n", flush=True)
    if args.csv is not None:
        report.append_csv(args.csv, outcomes)
    if args.plot is not None:
        plot(everything, args.plotted).savefig(args.plot, dpi=120, bbox_inches="tight")
