"""The tables and the plot of convergence.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib import report
from benchmarks.training.convergence_tasks import Setup, Task

INSIDE, BETTER, WORSE, FAILED = "inside", "better", "worse", "diverges"


@dataclass
class Result:
    """A row: a way of training on one task, with all seeds.

    Attributes:
        trainings: per seed: `curve`, `bytes`, `distance`, `alone`; or `error`.
        errors: the reasons, if there are no numbers.
        baseline: DDP with the same kind of optimizer; None for DDP itself.
    """

    task: Task
    case: str
    setup: Setup
    trainings: Sequence[Mapping[str, Any]]
    errors: Sequence[str]
    baseline: Result | None

    @property
    def final(self) -> list[float]:
        return [one["curve"][-1] for one in self.trainings]

    def mean(self, key: str) -> float:
        return statistics.fmean(one[key] for one in self.trainings)

    def verdict(self) -> str:
        """Compares the mean over the seeds with DDP's best and worst seed."""
        if self.errors:
            return FAILED
        if self.baseline is None:
            return "-"
        low, high = min(self.baseline.final), max(self.baseline.final)
        mean = statistics.fmean(self.final)
        if low <= mean <= high:
            return INSIDE
        return BETTER if (mean < low) == self.task.is_loss else WORSE

    def epochs_to_target(self) -> str:
        """Returns the median over the seeds of the first epoch at whose end the target is reached."""
        target = self.task.target["sgd" if self.setup.optimizer == "sgd" else "adam"]
        sign = -1 if self.task.is_loss else 1
        epochs = []
        for one in self.trainings:
            reached = (epoch for epoch, value in enumerate(one["curve"], 1) if sign * value >= sign * target)
            epochs.append(next(reached, math.inf))
        median = statistics.median_low(epochs)
        return str(median) if median < math.inf else "never"

    def shown(self, value: float) -> str:
        return f"{value:.3f}" if self.task.is_loss else f"{value:.2f}"

    def numbers(self) -> str:
        """Returns the mean and range over seeds, ascending, such as "98.61 (98.06 to 99.17)"."""
        if self.errors:
            return FAILED
        low, high = min(self.final), max(self.final)
        return f"{self.shown(statistics.fmean(self.final))} ({self.shown(low)} to {self.shown(high)})"

    def cells(self) -> list[str]:
        if self.errors:
            return [self.case, "-", FAILED, "never", "-", "-", "-", "-"]
        distance = max(one["distance"] for one in self.trainings)
        baseline = self.baseline or self
        return [
            self.case,
            self.numbers(),
            self.verdict(),
            self.epochs_to_target(),
            report.three_digits(self.mean("bytes") / 1e3),
            f"{self.mean('bytes') / baseline.mean('bytes'):.3f}",
            f"{distance:.1g}" if distance else "0",
            self.shown(self.mean("alone")),
        ]


def table(rows: Sequence[Result]) -> list[str]:
    """Returns the table of one task."""
    name = rows[0].task.metric.split(",")[0]
    head = ["way", name, "to DDP", "epochs", "kB per step", "of DDP's", "apart", "one rank"]
    return report.aligned([head, *(row.cells() for row in rows)])


def plot(rows: Mapping[str, Sequence[Result]]) -> Any:
    """Draws the end of every training, a point per seed, over the range of DDP's seeds."""
    figure, axes = report.subplots(len(rows))
    figure.set_size_inches(7.5 * len(rows), 1 + 0.22 * max(len(of_task) for of_task in rows.values()))
    for axis, (name, of_task) in zip(axes, rows.items(), strict=True):
        finished = [row for row in of_task if not row.errors]
        for row_index, row in enumerate(finished):
            of_ddp = (row.baseline or row).final
            axis.fill_betweenx([row_index - 0.5, row_index + 0.5], min(of_ddp), max(of_ddp), color="0.87", lw=0)
            color = {WORSE: "tab:red", BETTER: "tab:green", INSIDE: "tab:blue"}.get(row.verdict(), "black")
            axis.plot(row.final, [row_index] * len(row.final), "o", color=color, ms=4, mfc="none")
            axis.plot([statistics.fmean(row.final)], [row_index], "|", color=color, ms=11, mew=2)
        axis.set_title(f"{name}: {of_task[0].task.metric}, end of the run")
        axis.set_yticks(range(len(finished)), [row.case for row in finished], fontsize=8)
        axis.set_ylim(len(finished) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    return figure
