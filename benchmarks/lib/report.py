"""Turns measurements into the result of a benchmark: tables, a plot, and a description of the machine.

`Report` prints, and writes `<folder>/<date>-<script>.md` and `.png`. Every row holds its samples, so that minimum,
median and maximum are of the same samples, and its baseline row.
"""

from __future__ import annotations

import argparse
import importlib.util
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

from bagua.replay import hosts, plots
from bagua.replay.plots import subplots
from bagua.replay.report import aligned, taken_on, three_digits

__all__ = [
    "ROOT",
    "Report",
    "SKIPPED",
    "Row",
    "Table",
    "aligned",
    "bars",
    "facts",
    "need_hosts",
    "parser",
    "subplots",
    "three_digits",
]

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # the exit status of a script that was skipped, as automake has it
_LONGEST_SUBJECT = 100  # maximum number of characters in a file's name
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6}


class _Parser(argparse.ArgumentParser):
    """A parser that refuses a folder of results that cannot be written, before anything is measured."""

    def parse_args(self, *args: Any, **kwargs: Any) -> argparse.Namespace:
        """Returns the options; makes the folder."""
        options = super().parse_args(*args, **kwargs)
        if importlib.util.find_spec("matplotlib") is None:
            self.error("results are drawn with matplotlib, which is not installed: pip install matplotlib")
        try:
            options.out.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=options.out).close()
        except OSError as error:
            self.error(f"--out is {options.out}, which is no folder to write to ({error.strerror}); name another one")
        return options


def parser(description: str | None) -> _Parser:
    """Returns a parser with the options that all scripts share; `description` is the script's docstring."""
    options = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help="few repetitions: to see that it works")
    options.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the results")
    options.add_argument("--note", default="", help="a line for the header, such as what else ran on the machine")
    return options


@dataclass
class Row:
    """A row of one case: samples in seconds (or bytes), its baseline, and cells for further columns."""

    case: str
    samples: Sequence[float]
    baseline: Row | None = None
    cells: Mapping[str, str] = field(default_factory=dict)

    @property
    def p50(self) -> float:
        return statistics.median(self.samples)


@dataclass
class Table:
    """A table of rows under one title.

    Attributes:
        unit: the unit of min, p50 and max: "ms", "us", "s", or "MB" (10^6) if the samples are bytes.
        ratio: the ratio column is "speed-up" (baseline / case, more is better) or "relative" (case / baseline).
        notes: the lines below the table.
    """

    title: str
    rows: Sequence[Row]
    unit: str = "ms"
    ratio: str = "speed-up"
    notes: Sequence[str] = ()

    def lines(self) -> list[str]:
        """Returns the table in Markdown, readable as text."""
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


class Report:
    """The result of one script.

    Args:
        script: the script's `__file__`; its stem names the results.
        question: the question that the script answers, in one line.
        args: the parsed options of `parser`.
        setup: further facts for the header, by name.
        subject: a further part of the files' names, such as the model.
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
        """Prints a paragraph, such as a finding or a skipped case, and keeps it."""
        self._keep([*lines, ""])

    def _keep(self, lines: list[str]) -> None:
        self._body += lines
        print(*lines, sep="\n", flush=True)

    def write(self, figure: Any = None) -> None:
        """Writes the Markdown file, and the matplotlib figure beside it, replacing those of the same day."""
        stem = "-".join(filter(None, [f"{self.began:%Y-%m-%d}", self.name, self._subject]))
        path = self._folder / f"{stem}.md"
        instead = ", instead of an earlier result" if path.exists() else ""
        lines = [*self._head, "", *self._body]
        if figure is not None:
            figure.savefig(self._folder / f"{stem}.png", dpi=120, bbox_inches="tight")
            lines.append(f"![{self.name}]({stem}.png)")
        path.write_text("\n".join(lines).rstrip() + "\n")
        print(f"written: {path}" + (f" and {stem}.png" if figure is not None else "") + instead)


def bars(axis: Any, rows: Sequence[Row], title: str, label: str, scale: float) -> None:
    """Draws horizontal bars of the medians, with lines from minimum to maximum."""
    plots.bars(axis, [(row.case, row.samples) for row in rows], title, label, scale)


def need_hosts(script: str) -> None:
    """Ends a script as skipped if no hosts can be made from network namespaces."""
    reason = hosts.why_not()
    if reason is not None:
        print(f"{script} SKIPPED: {reason}.")
        sys.exit(SKIPPED)


def facts() -> dict[str, Any]:
    """Returns the machine, versions and commit of a result, by name."""
    script = getattr(sys.modules["__main__"].__spec__, "name", "")
    return {**taken_on(), "commit": _commit(), "command": " ".join(["python -m", script, *sys.argv[1:]])}


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    # Uncommitted results of other scripts do not affect measurements.
    is_changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return (git("rev-parse", "HEAD") or "unknown") + (" with uncommitted changes" if is_changed else "")
