"""The output of `bagua bench replay`: a table for people, rows of a CSV file for programs.

Figures have three significant digits in both.
"""

from __future__ import annotations

import csv
import errno
import math
import os
import platform
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.replay.cases import Outcome, best_ddp
from bagua.replay.systems import ALONE

CSV_COLUMNS = (
    *("date", "profile", "scale", "hosts", "ranks_per_host", "rate_mbit", "congestion", "system"),
    *("step_ms", "min_ms", "max_ms", "compute_ms", "exposed_ms", "of_bound"),
    *("processor_ms", "waiting_ms", "wire_mb", "stolen"),
)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns a Markdown table of the systems of one case, each compared with the best DDP."""
    best = best_ddp(outcomes)
    has_bound = outcomes[0].bound_s is not None
    head = ["system", "step ms", "min", "max", "ratio", "processor ms", "exposed ms", "waiting ms", "wire MB"]
    rows = [[*head, *(["bound ms", "of bound"] if has_bound else []), "stolen %"]]
    for one in outcomes:
        is_alone = one.system == ALONE
        cells = [one.system, *map(_ms, (one.p50, min(one.step_s), max(one.step_s)))]
        cells += ["" if is_alone or best is None or one is best else f"{best.p50 / one.p50:.2f}", _ms(one.processor_s)]
        cells += ["", "", ""] if is_alone else [_ms(one.exposed_s), _ms(one.waiting_s), _mb(one.wire_bytes)]
        if has_bound:
            cells += ["", ""] if is_alone else [_ms(one.bound_s), _of_bound(one)]
        rows.append([*cells, "" if one.stolen is None else f"{100 * one.stolen:.1f}"])
    return aligned(rows)


def append_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Adds a row per system to the file; a new file gets a header first."""
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, lineterminator="\n")
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(_csv_row(one) for one in outcomes)


def check_csv(path: Path) -> None:
    """Raises InvalidArgument for a file whose columns differ from those of ``append_csv``."""
    try:
        with path.open(newline="") as file:
            head = next(csv.reader(file), None)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgument(f"--csv is {path}, which cannot be read ({error}); name another file") from error
    if head is not None and tuple(head) != CSV_COLUMNS:
        raise InvalidArgument(
            f"--csv is {path}, whose first line is {','.join(head)[:80]!r}, expected {','.join(CSV_COLUMNS)!r}; name a "
            "new file, or one of this command's"
        )


def _csv_row(one: Outcome) -> dict[str, Any]:
    case = one.case
    row = {
        "date": f"{datetime.now():%Y-%m-%d}",
        "profile": Path(case.profile).stem,
        "scale": f"{case.scale:g}",
        "hosts": case.num_hosts,
        "ranks_per_host": case.ranks_per_host,
        "rate_mbit": case.rate_mbit,
        "congestion": case.congestion,
        "system": one.system,
        "step_ms": _ms(one.p50),
        "min_ms": _ms(min(one.step_s)),
        "max_ms": _ms(max(one.step_s)),
        "compute_ms": _ms(one.compute_s),
        "processor_ms": _ms(one.processor_s),
        "waiting_ms": _ms(one.waiting_s),
        "stolen": "" if one.stolen is None else f"{one.stolen:.3f}",
    }
    if one.system != ALONE:
        row |= {"exposed_ms": _ms(one.exposed_s), "wire_mb": _mb(one.wire_bytes), "of_bound": _of_bound(one)}
    return row


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else three_digits(seconds * 1e3)


def _mb(num_bytes: float) -> str:
    return three_digits(num_bytes / 1e6)


def _of_bound(one: Outcome) -> str:
    return "" if one.bound_s is None else f"{one.p50 / one.bound_s:.2f}"


def three_digits(value: float) -> str:
    """Returns three significant digits, never an exponent: 0.0123, 1.23, 123, 1234."""
    if value == 0 or math.isinf(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Returns a Markdown table, readable as text; the first row is its header, the first column is left-aligned."""
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    text = [_markdown(line, widths) for line in cells]
    rule = "|" + "|".join("-" * (w + 1) + (":" if i else "-") for i, w in enumerate(widths)) + "|"
    return [text[0], rule, *text[1:]]


def _markdown(line: Sequence[str], widths: Sequence[int]) -> str:
    cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]
    return "| " + " | ".join(cells) + " |"


def taken_on() -> dict[str, str]:
    """Returns the date, machine and versions of a measurement, by name."""
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    return {
        "date": f"{datetime.now():%Y-%m-%d %H:%M}",
        "machine": f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores, {_memory_gib():.0f} GiB, {load}",
        "versions": f"bagua {bagua.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"Linux {platform.release()}",
    }


def _cpu_model() -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":", 1)[1].strip() for line in file if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def check_file(option: str, path: Path, example: str) -> None:
    """Raises InvalidArgument if the file cannot be written; called before measuring."""
    try:
        if path.is_dir():
            raise InvalidArgument(f"{option} is the folder {path}, expected a file, such as {path / example}")
        if not path.parent.is_dir():
            raise InvalidArgument(
                f"{option} is {path}, but there is no folder {path.parent}; make it, or name another one"
            )
        if not path.exists():
            tempfile.TemporaryFile(dir=path.parent).close()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InvalidArgument(
            f"{option} is {path}, which cannot be written ({error.strerror}); name a file in a folder of your own"
        ) from error
