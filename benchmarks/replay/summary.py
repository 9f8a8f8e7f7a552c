"""Shows the ratio of wire to compute from which each algorithm is faster.

Reads the measurements of record, benchmarks/results/performance.csv, and prints the table of docs/performance.md: all
cases with four hosts, ordered by the time of float32 gradients on the wire over the compute of a step, with the
speed-up over the better of DDP and `gradient_allreduce`. `--plot` draws them.

    .venv/bin/python -m benchmarks.replay.summary [--csv FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.lib import report

RECORD = report.ROOT / "benchmarks" / "results" / "performance.csv"
_RELAXATIONS = ("bytegrad", "qsgd:bits=4", "decentralized", "local_sgd")


class Summary(NamedTuple):
    """A case: its ratio, and its steps in ms by system."""

    wire_over_compute: float
    model: str
    rate_mbit: int
    step_ms: Mapping[str, float]

    @property
    def best_ddp_ms(self) -> float:
        return min(step_ms for system, step_ms in self.step_ms.items() if system.startswith("ddp"))

    def gains(self) -> list[float]:
        """Returns the speed-ups of the relaxations over systems that send everything at full precision or cast."""
        best_ms = min(self.best_ddp_ms, self.step_ms["gradient_allreduce"])
        return [best_ms / self.step_ms[system] for system in _RELAXATIONS]


def read(path: Path) -> list[Summary]:
    """Reads all cases on four hosts, ordered by ratio; of two rows of a case and system the later one counts."""
    cases: dict[tuple[str, str, str], dict[str, dict[str, str]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["hosts"], row["ranks_per_host"], row["congestion"]) == ("4", "1", ""):
                cases.setdefault((row["profile"], row["scale"], row["rate_mbit"]), {})[row["system"]] = row
    summaries = []
    for (model, _, rate), by_system in cases.items():
        full = by_system["gradient_allreduce"]
        wire_ms = float(full["wire_mb"]) * 8e3 / int(rate)
        step_ms = {system: float(row["step_ms"]) for system, row in by_system.items()}
        summaries.append(Summary(wire_ms / float(full["compute_ms"]), model, int(rate), step_ms))
    return sorted(summaries, key=lambda one: one.wire_over_compute)


def table(summaries: Sequence[Summary]) -> list[str]:
    """Returns the table in Markdown."""
    cells = [["wire / compute", "model", "Mbit/s", "best DDP, ms", *_RELAXATIONS]]
    for one in summaries:
        gains = [f"{gain:.2f}" for gain in one.gains()]
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


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Draws the speed-up of a step over the best DDP, by the ratio of wire to compute."""
    figure, (axis,) = report.subplots(1)
    figure.set_size_inches(9, 5)
    ratios = [one.wire_over_compute for one in summaries]
    for system in ("gradient_allreduce", *_RELAXATIONS):
        gains = [one.best_ddp_ms / one.step_ms[system] for one in summaries]
        axis.plot(ratios, gains, "o-", label=system, markersize=4, linewidth=0.5)
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
    args = parser.parse_args()
    summaries = read(args.csv)
    print(*table(summaries), sep="\n")
    if args.plot is not None:
        draw(summaries, args.plot)


if __name__ == "__main__":
    main()
