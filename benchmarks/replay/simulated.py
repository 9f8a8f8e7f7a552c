"""Compares simulated steps with those that `bagua bench replay` has measured.

The file of `bagua bench replay --csv` has the cases; each is simulated with the same profile, hosts and rate, less the
headers of Ethernet, IP and TCP. docs/simulator.md has the table.

    sudo .venv/bin/bagua bench replay --profiles vgg16 resnet50 --scale 0.1 --rates 100 1000 --csv build/measured.csv
    .venv/bin/python -m benchmarks.replay.simulated [--slowdown 2] build/measured.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua.replay.cases import Case

_PAYLOAD = 1448 / (1448 + 66)  # of a full frame, as tc counts it


def simulated_s(case: Case, system: str, latency: str, slowdown: float, rehearsed: dict[Any, Any]) -> float:
    """Returns the seconds of a step on the links that `bagua bench replay` makes; keeps rehearsals in `rehearsed`."""
    from bagua import simulator
    from bagua.replay.hosts import BURST_BYTES
    from bagua.replay.profiles import Profile
    from bagua.replay.systems import parse

    name, options = parse(system)
    key = (case.profile, case.scale, case.num_hosts, case.ranks_per_host, system)
    if key not in rehearsed:
        profile = Profile.load(case.path).scaled(case.scale)
        shape = {"hosts": case.num_hosts, "ranks_per_host": case.ranks_per_host}
        rehearsed[key] = simulator.rehearse(profile, name, **shape, **options)
    rate = simulator.Link.parse(f"{case.rate_mbit}mbit", latency)
    link = simulator.Link(up=_PAYLOAD * rate.up, latency=rate.latency, burst=BURST_BYTES)
    return rehearsed[key].play(link, slowdown=slowdown).step_s


def main() -> None:
    from bagua import simulator
    from bagua.replay.cases import Case
    from bagua.replay.report import aligned
    from bagua.replay.systems import parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="the file of `bagua bench replay --csv`")
    parser.add_argument("--latency", default="0.05ms", help="of the links (0.05ms)")
    parser.add_argument("--slowdown", type=float, default=1.0, help="ranks per core, where they share cores (1)")
    args = parser.parse_args()
    rows, errors, rehearsed = [["case", "measured ms", "simulated ms", "off by %"]], [], {}
    with args.measured.open() as file:
        cases = [
            row for row in csv.DictReader(file) if parse(row["system"])[0] in simulator.available() and row["rate_mbit"]
        ]
    for row in cases:
        case = Case(
            row["profile"], float(row["scale"]), int(row["hosts"]), int(row["ranks_per_host"]), int(row["rate_mbit"])
        )
        simulated_ms = 1e3 * simulated_s(case, row["system"], args.latency, args.slowdown, rehearsed)
        measured_ms = float(row["step_ms"])
        errors.append(simulated_ms / measured_ms - 1)
        rows.append(
            [f"{case}, {row['system']}", f"{measured_ms:.4g}", f"{simulated_ms:.4g}", f"{100 * errors[-1]:+.1f}"]
        )
    print("\n".join(aligned(rows)))
    off = sorted(map(abs, errors))
    print(f"\n{len(off)} cases: median {100 * statistics.median(off):.1f}%, worst {100 * off[-1]:.1f}%")


if __name__ == "__main__":
    main()
