"""`bagua simulate` plays a model's profile on a network that is not there, under every algorithm."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.cli.calibrate import measured_link
from bagua.cli.progress import Progress
from bagua.errors import InvalidArgument

if TYPE_CHECKING:
    from bagua.simulator import Simulated

__all__ = ["main"]

_DESCRIPTION = """\
What would each algorithm do for this model on that network?

One rank rehearses some steps of the profile, on this machine, and what it does is played for all ranks in virtual time:

    bagua simulate --profile vgg16 --hosts 16 --link 1gbit --latency 1ms
    bagua simulate --profile mine.json --hosts 64 --ranks-per-host 8 --algorithm gradient_allreduce qsgd:bits=4
    bagua simulate --profile vgg16 --hosts 4 --link 1gbit --algorithm bytegrad --timeline bytegrad.json
"""
_COLUMNS = """\
columns of the table:
  step      a training step on the slowest rank, a mean
  ratio     how many times as fast as gradient_allreduce, if that comes before
  waited    what a rank's thread waited for communication in a step, a mean
  link      what a host's link carries out per step

What a simulation does not know: docs/simulator.md of the project.
"""
_ALL = "all"
_BASE = "gradient_allreduce"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua simulate",
        description=_DESCRIPTION,
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = Path(__file__).parents[1] / "replay" / "models"
    ours = ", ".join(sorted(path.stem for path in models.glob("*.json")))
    option = parser.add_argument
    option("--profile", required=True, help=f"a file of `bagua bench record`, or one of {ours}")
    option("--hosts", type=int, default=4, help="how many (4)")
    option("--ranks-per-host", type=int, default=1, help="how many (1)")
    option(
        "--link",
        default="1gbit",
        help="what every host's link carries each way, without headers; or `measured`, by `bagua bench links` (1gbit)",
    )
    option("--latency", default="0.05ms", help="from the last byte on the link to its arrival (0.05ms)")
    option("--algorithm", nargs="+", default=[_ALL], help="names, with options as in qsgd:bits=4; all of them (all)")
    option("--scale", type=float, default=1.0, help="of the tensors' sizes (1)")
    option("--slowdown", type=float, default=1.0, help="how many times as long the hosts' processors take as this one")
    option(
        "--jitter", type=float, default=0.0, help="spread of the ranks' compute: the sigma of a lognormal factor (0)"
    )
    option("--plot", type=Path, help="draw steps by the rate of the link here, with matplotlib")
    option("--timeline", type=Path, help="write rank 0's operations here, of one algorithm, for ui.perfetto.dev")
    option(
        "--chakra", metavar="PREFIX", help="write Chakra traces PREFIX.<rank>.et of one algorithm, for other simulators"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; 0 when it has done its work, 1 when it says why not."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        _simulate(parser, args)
    except InvalidArgument as error:
        print(f"bagua simulate: {error}", file=sys.stderr)
        return 1
    return 0


def _simulate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from bagua.replay.cases import PROFILES
    from bagua.replay.profiles import Profile
    from bagua.replay.report import aligned
    from bagua.replay.systems import check_scaled, parse
    from bagua.simulator import Link, Stragglers, available, rehearse

    if args.link == "measured":
        found = measured_link()
        link = Link(up=found["up"], latency=found["latency"], burst=found["burst"])
        args.link, args.latency = f"{link.up / 1e6:.0f}mbit, measured {found['date']},", f"{1e6 * link.latency:.0f}us"
    else:
        link = Link.parse(args.link, args.latency)
    late = Stragglers(sigma=args.jitter)
    ours = PROFILES / f"{args.profile}.json"
    profile = Profile.load(ours if ours.exists() else args.profile)
    is_all = args.algorithm == [_ALL]
    systems = [_BASE, *(name for name in available() if name != _BASE)] if is_all else args.algorithm
    for name, value in (("timeline", args.timeline), ("chakra", args.chakra)):
        if value is not None and len(systems) != 1:
            parser.error(f"--{name} is of one algorithm, but --algorithm has {len(systems)}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot draws with matplotlib, which is not installed: pip install matplotlib")
    rows = [["algorithm", "step ms", "ratio", "waited ms", "link MB"]]
    base_s, refused, lines = None, [], {}
    rates = [link.up * 10 ** (place / 8) for place in range(-16, 17)]
    with Progress("bagua simulate") as progress:
        for system in systems:
            progress.tell(system)
            name, options = parse(system)
            try:
                check_scaled(system, profile, args.scale)
                hosts = {"hosts": args.hosts, "ranks_per_host": args.ranks_per_host}
                rehearsed = rehearse(profile.scaled(args.scale), name, **hosts, **options)
            except InvalidArgument as error:
                if system == _BASE or not is_all:  # that one can do whatever any can
                    raise
                refused.append(f"{system} is left out: {error}")
                continue
            repetitions = 1 if not args.jitter else -(-100 // rehearsed.num_steps)
            how = {"stragglers": late, "repetitions": repetitions, "slowdown": args.slowdown}
            found = rehearsed.play(link, **how)
            base_s = found.step_s if name == _BASE else base_s
            ratio = "" if base_s is None or name == _BASE else f"{base_s / found.step_s:.2f}"
            rows.append([system, _ms(found.step_s), ratio, _ms(found.waited_s), f"{found.link_bytes / 1e6:.2f}"])
            if args.plot is not None:
                at_rates = [dataclasses.replace(link, up=rate) for rate in rates]
                lines[system] = [1e3 * rehearsed.play(one, **how).step_s for one in at_rates]
            if args.timeline is not None:
                _write_timeline(args.timeline, found)
            if args.chakra is not None:
                rehearsed.save_chakra(args.chakra)
    compute = f"{profile.forward_ms + profile.backward_ms:.4g} ms of compute"
    of_host = f"{args.ranks_per_host} rank{'s' * (args.ranks_per_host > 1)} each"
    print(f"{profile.name}: {profile.scaled(args.scale).num_parameters:,} parameters, {compute} per step")
    print(f"{args.hosts} hosts, {of_host}, links of {args.link} with a latency of {args.latency}\n")
    print("\n".join([*aligned(rows), *refused]))
    if args.plot is not None:
        _draw(args.plot, [rate / 1e6 for rate in rates], lines, f"{profile.name}, {args.hosts} hosts")


def _draw(path: Path, rates_mbit: Sequence[float], lines: dict[str, list[float]], title: str) -> None:
    from bagua.replay.plots import subplots

    figure, (axis,) = subplots(1)
    for number, (system, steps_ms) in enumerate(lines.items()):
        axis.plot(rates_mbit, steps_ms, f"C{number % 10}{'-' if number < 10 else '--'}", label=system)
    axis.set(xscale="log", yscale="log", xlabel="link, Mbit/s", ylabel="step, ms", title=title)
    axis.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=120, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"--plot {path} cannot be written: {error}; name a .png in a folder of yours") from error


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _write_timeline(path: Path, found: Simulated) -> None:
    spans = [
        {
            "name": operation.label or operation.what,
            "cat": operation.what,
            "ph": "X",
            "ts": 1e6 * begin,
            "dur": 1e6 * (end - begin),
            "pid": 0,
            "tid": 0,
        }
        for operation, begin, end in found.spans
    ]
    named = [("process_name", "rank 0, simulated"), ("thread_name", "communication")]
    about = [{"name": name, "ph": "M", "pid": 0, "tid": 0, "args": {"name": text}} for name, text in named]
    try:
        path.write_text(json.dumps({"traceEvents": [*about, *spans]}) + "\n")
    except OSError as error:
        raise InvalidArgument(
            f"--timeline {path} cannot be written: {error}; name a file in a folder of yours"
        ) from error
