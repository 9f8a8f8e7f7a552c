"""Shows the ratio of wire to compute from which each algorithm is faster.

Reads the measurements of record, benchmarks/results/performance.csv, and prints the table of docs/performance.md: all
cases with four hosts, ordered by the time of float32 gradients on the wire over the compute of a step, with the
speed-up over the better of DDP and `gradient_allreduce`. `--plot` draws them. `--simulate` puts beside each what the
simulator says, for the same models, hosts and rates: in brackets, and as dotted lines.

    .venv/bin/python -m benchmarks.replay.summary [--csv FILE] [--plot FILE] [--simulate]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import report
from benchmarks.replay.simulated import simulated_s

RECORD = report.ROOT / "benchmarks" / "results" / "performance.csv"
_RELAXATIONS = ("bytegrad", "qsgd:bits=4", "decentralized", "local_sgd")


class Summary(NamedTuple):
    """A case: its ratio, and its steps in ms by system."""

    wire_over_compute: float
    model: str
    scale: float
    rate_mbit: int
    step_ms: Mapping[str, float]

    @property
    def best_ddp_ms(self) -> float:
        return min(step_ms for system, step_ms in self.step_ms.items() if system.startswith("ddp"))

    def gains(self, step_ms: Mapping[str, float]) -> list[float]:
        """Returns the speed-ups of the relaxations, with their steps as given, over what was measured of systems that
        send everything at full precision or cast."""
        best_ms = min(self.best_ddp_ms, self.step_ms["gradient_allreduce"])
        return [best_ms / step_ms[system] for system in _RELAXATIONS]


def read(path: Path) -> list[Summary]:
    """Reads all cases on four hosts, ordered by ratio; of two rows of a case and system the later one counts."""
    cases: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["hosts"], row["ranks_per_host"], row["congestion"]) == ("4", "1", ""):
                cases.setdefault((row["profile"], row["scale"], row["rate_mbit"]), {})[row["system"]] = row
    summaries = []
    for (model, scale, rate), by_system in cases.items():
        full = by_system["gradient_allreduce"]
        wire_ms = float(full["wire_mb"]) * 8e3 / int(rate)
        step_ms = {system: float(row["step_ms"]) for system, row in by_system.items()}
        summaries.append(Summary(wire_ms / float(full["compute_ms"]), model, float(scale), int(rate), step_ms))
    return sorted(summaries, key=lambda one: one.wire_over_compute)


def simulate(summaries: Sequence[Summary]) -> list[dict[str, float]]:
    """Returns the simulated steps of each case, in ms by system. The four ranks of the record shared two cores."""
    from bagua.replay.cases import Case

    rehearsed: dict = {}
    return [
        {
            system: 1e3 * simulated_s(Case(one.model, one.scale, 4, 1, one.rate_mbit), system, "0.05ms", 2.0, rehearsed)
            for system in ("gradient_allreduce", *_RELAXATIONS)
        }
        for one in summaries
    ]


def table(summaries: Sequence[Summary], simulated: Sequence[Mapping[str, float]] = ()) -> list[str]:
    """Returns the table in Markdown."""
    cells = [["wire / compute", "model", "Mbit/s", "best DDP, ms", *_RELAXATIONS]]
    for index, one in enumerate(summaries):
        gains = [f"{gain:.2f}" for gain in one.gains(one.step_ms)]
        if simulated:
            gains = [f"{gain} ({other:.2f})" for gain, other in zip(gains, one.gains(simulated[index]), strict=True)]
        cells.append(
            [
                f"{one.wire_over_compute:.2f}",
                one.model,
                str(one.rate_mbit),
                report.three_digits(one.best_ddp_ms),
                *gains,
            ]
        )
    return report.aligned(cells)


def draw(summaries: Sequence[Summary], path: Path, simulated: Sequence[Mapping[str, float]] = ()) -> None:
    """Draws the speed-up of a step over the best DDP, by the ratio of wire to compute."""
    figure, (axis,) = report.subplots(1)
    figure.set_size_inches(9, 5)
    ratios = [one.wire_over_compute for one in summaries]
    for index, system in enumerate(("gradient_allreduce", *_RELAXATIONS)):
        gains = [one.best_ddp_ms / one.step_ms[system] for one in summaries]
        axis.plot(ratios, gains, f"C{index}o-", label=system, markersize=4, linewidth=0.5)
        if simulated:
            gains = [one.best_ddp_ms / other[system] for one, other in zip(summaries, simulated, strict=True)]
            label = "simulated" if index == 0 else None
            axis.plot(ratios, gains, f"C{index}x:", label=label, markersize=6, linewidth=1)
    axis.axhline(1, color="0.5", linewidth=1, label="the best DDP")
    axis.set(xscale="log", yscale="log")
    axis.set_yticks([0.5, 1, 2, 3, 5], ["0.5", "1", "2", "3", "5"])
    axis.minorticks_off()
    axis.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axis.set_xlabel("float32 gradients on the wire, over compute")
    axis.set_ylabel("times as fast as the best DDP")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RECORD)
    parser.add_argument("--plot", type=Path, help="draw this file too")
    parser.add_argument("--simulate", action="store_true", help="put what the simulator says beside it")
    args = parser.parse_args()
    summaries = read(args.csv)
    simulated = simulate(summaries) if args.simulate else []
    print(*table(summaries, simulated), sep="\n")
    if args.plot is not None:
        draw(summaries, args.plot, simulated)


if __name__ == "__main__":
    main()
