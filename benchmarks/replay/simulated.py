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

_PAYLOAD = 1448 / (1448 + 66)  # of a full frame, as tc counts it


def main() -> None:
    from bagua import simulator
    from bagua.replay.cases import PROFILES
    from bagua.replay.hosts import BURST_BYTES
    from bagua.replay.profiles import Profile
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
        name, options = parse(row["system"])
        shape = {"hosts": int(row["hosts"]), "ranks_per_host": int(row["ranks_per_host"])}
        key = (row["profile"], row["scale"], row["system"], *shape.values())
        if key not in rehearsed:
            ours = PROFILES / f"{row['profile']}.json"
            profile = Profile.load(ours if ours.exists() else row["profile"]).scaled(float(row["scale"]))
            rehearsed[key] = simulator.rehearse(profile, name, **shape, **options)
        rate = simulator.Link.parse(f"{row['rate_mbit']}mbit", args.latency)
        link = simulator.Link(up=_PAYLOAD * rate.up, latency=rate.latency, burst=BURST_BYTES)
        simulated_ms = 1e3 * rehearsed[key].play(link, slowdown=args.slowdown).step_s
        measured_ms = float(row["step_ms"])
        errors.append(simulated_ms / measured_ms - 1)
        case = f"{row['profile']}, {row['hosts']} hosts, {row['rate_mbit']} Mbit/s, {row['system']}"
        rows.append([case, f"{measured_ms:.4g}", f"{simulated_ms:.4g}", f"{100 * errors[-1]:+.1f}"])
    print("\n".join(aligned(rows)))
    off = sorted(map(abs, errors))
    print(f"\n{len(off)} cases: median {100 * statistics.median(off):.1f}%, worst {100 * off[-1]:.1f}%")


if __name__ == "__main__":
    main()
