"""Turns measurements into what every benchmark leaves behind: a table, a plot, and what they were taken on.

`Report` prints, and writes `<folder>/<date>-<script>.md` and `.png`. Every row carries its samples, so that minimum,
median and maximum come from the same place, and names the row that it is compared to.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LONGEST_SUBJECT = 100  # of what a file's name may have
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6}


class Parser(argparse.ArgumentParser):
    """Refuses a folder of results that cannot be written, before anything is measured for it."""

    def parse_args(self, *args: Any, **kwargs: Any) -> argparse.Namespace:
        """The options; makes the folder, on the rank that writes."""
        options = super().parse_args(*args, **kwargs)
        if importlib.util.find_spec("matplotlib") is None:
            self.error("results are drawn with matplotlib, which is not installed: pip install matplotlib")
        if os.environ.get("RANK", "0") == "0":
            self.check_folder("--out", options.out, options.out)
        return options

    def check_folder(self, option: str, value: Path, folder: Path) -> None:
        """Makes the folder that an option needs; ends with an error where it cannot be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            self.error(
                f"{option} is {value}, but {folder} is no folder to write to ({error.strerror}); name another one"
            )


def parser(description: str | None) -> Parser:
    """The options that all scripts share; `description` is the script's docstring."""
    options = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="few repetitions: to see that it works")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    options.add_argument("--note", default="", help="a line for the header, such as what else ran on the machine")
    return options


@dataclass
class Row:
    """One case: its samples in seconds (or bytes), what it is compared to, and cells for further columns."""

    case: str
    samples: Sequence[float]
    baseline: Row | None = None
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)


@dataclass
class Table:
    """Rows under one title.

    Attributes:
        unit: of min, p50 and max: "ms", "us", "s", "MB" (10^6) where the samples are bytes.
        ratio: the ratio column is "speed-up" (baseline / case, more is better) or "relative" (case / baseline).
        notes: lines below the table.
    """

    title: str
    rows: Sequence[Row]
    unit: str = "ms"
    ratio: str = "speed-up"
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """The table in Markdown, readable as text."""
        extra = list(dict.fromkeys(name for row in self.rows for name in row.cells))
        ratio = "ratio" if self.ratio == "speed-up" else "ratio to baseline"
        cells = [["case", f"min {self.unit}", f"p50 {self.unit}", f"max {self.unit}", ratio, *extra]]
        for row in self.rows:
            numbers = (min(row.samples), row.p50, max(row.samples))
            times = [three_digits(value * _UNITS[self.unit]) for value in numbers]
            cells.append([row.case, *times, self._ratio(row), *(row.cells.get(name, "") for name in extra)])
        notes = [line for note in self.notes for line in (note, "")]
        return [f"### {self.title}", "", *aligned(cells), "", *notes]

    def _ratio(self, row: Row) -> str:
        if row.baseline is None or not row.p50 or not row.baseline.p50:
            return "-"
        return f"{row.baseline.p50 / row.p50 if self.ratio == 'speed-up' else row.p50 / row.baseline.p50:.2f}"


def three_digits(value: float) -> str:
    """Three significant digits, never an exponent: 0.0123, 1.23, 123, 1234."""
    if value == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, readable as text; the first line is its head, the first column stands on the left."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    text = [_markdown(line, widths) for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return [text[0], rule, *text[1:]]


def _markdown(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
    return "| " + " | ".join(cells) + " |"


class Report:
    """What one script found out.

    Args:
        script: the script's `__file__`; its stem names the results.
        question: what the script answers, in one line.
        args: the parsed options of `parser`.
        setup: further lines for the header, by name.
        subject: what else names the results, such as the model.
    """

    def __init__(
        self,
        script: str,
        question: str,
        args: argparse.Namespace,
        setup: Mapping[str, Any] | None = None,
        subject: str = "",
    ) -> None:
        self.name = Path(script).stem
        self._subject = re.sub(r"[^\w.-]+", "_", subject)[:_LONGEST_SUBJECT]
        self.began = datetime.now()
        note = " ".join(filter(None, [args.note, "quick run: few repetitions" if args.quick else ""]))
        self._head = [f"# {self.name}: {question}", ""]
        head = {**facts(), **(setup or {}), **({"note": note} if note else {})}
        self._head += [f"- {name}: {value}" for name, value in head.items()]
        self._body: list[str] = []
        self._folder = args.out
        print(*self._head, "", sep="\n", flush=True)

    def add(self, table: Table) -> None:
        """Prints a table and keeps it."""
        self._keep(table.lines())

    def say(self, *lines: str) -> None:
        """Prints a paragraph and keeps it: what was skipped, a finding."""
        self._keep([*lines, ""])

    def _keep(self, lines: list[str]) -> None:
        self._body += lines
        print(*lines, sep="\n", flush=True)

    def write(self, figure: Any = None) -> None:
        """Writes the Markdown file, and the matplotlib figure beside it, in the place of those of the same day."""
        stem = "-".join(filter(None, [f"{self.began:%Y-%m-%d}", self.name, self._subject]))
        path = self._folder / f"{stem}.md"
        instead = ", in the place of an earlier result" if path.exists() else ""
        lines = [*self._head, "", *self._body]
        if figure is not None:
            figure.savefig(self._folder / f"{stem}.png", dpi=120, bbox_inches="tight")
            lines.append(f"![{self.name}]({stem}.png)")
        path.write_text("\n".join(lines).rstrip() + "\n")
        print(f"written: {path}" + (f" and {stem}.png" if figure is not None else "") + instead)


def subplots(columns: int, rows: int = 1) -> tuple[Any, list[Any]]:
    """A matplotlib figure without a display, and its axes in a flat list."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 4.2 * rows), squeeze=False)
    return figure, list(axes.flat)


def bars(axis: Any, rows: Sequence[Row], title: str, label: str, scale: float) -> None:
    """Horizontal bars of the medians, with lines from minimum to maximum."""
    medians = [row.p50 * scale for row in rows]
    low = [m - min(row.samples) * scale for m, row in zip(medians, rows, strict=True)]
    high = [max(row.samples) * scale - m for m, row in zip(medians, rows, strict=True)]
    axis.barh([row.case for row in rows], medians, xerr=[low, high], color="tab:blue", ecolor="0.3", capsize=3)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.set_title(title)
    axis.grid(axis="x", alpha=0.3)


def facts() -> dict[str, Any]:
    """What a result was taken on, by name."""
    import torch

    import bagua

    return {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB, "
        f"load average {os.getloadavg()[0]:.1f} at the start",
        "versions": f"bagua {bagua.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"Linux {platform.release()}",
        "commit": _commit(),
        "command": " ".join([Path(sys.executable).name, os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]]),
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    # Results of other scripts that lie there uncommitted change nothing about what is measured.
    is_changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "HEAD") or "unknown") + (" with uncommitted changes" if is_changed else "")
