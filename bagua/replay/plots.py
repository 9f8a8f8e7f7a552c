"""Plots of replayed models: lines over the link's rate if there are several rates, bars if there is one.

matplotlib is imported when something is drawn, and not needed before.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagua.errors import InvalidArgument
from bagua.replay.cases import Case, Outcome
from bagua.replay.systems import ALONE

PLOTTED = (
    "ddp",
    "ddp_fp16",
    "ddp_bf16",
    "gradient_allreduce",
    "bytegrad",
    "qsgd:bits=4",
    "decentralized",
    "local_sgd",
    "async_averaging",
)
_TITLE_WIDTH = 60  # characters above one of three plots
_LEAST_MS = 0.1  # drawn in place of 0, which has no logarithm


def plot(cases: Sequence[Sequence[Outcome]], systems: Sequence[str]) -> Any:
    """Draws these systems over the link's rate if a model was played at several, else bars of all systems."""
    rows: dict[Case, list[Sequence[Outcome]]] = {}
    for outcomes in cases:
        rows.setdefault(replace(outcomes[0].case, rate_mbit=None), []).append(outcomes)
    return _by_rate(rows, systems) if len(cases) > len(rows) else _by_case(cases)


def _by_rate(rows: Mapping[Case, Sequence[Sequence[Outcome]]], systems: Sequence[str]) -> Any:
    """Draws a row for each case: step and exposed communication by bandwidth, with bounds, and bytes on the wire."""
    figure, axes = subplots(3, len(rows))
    for row, (title, cases) in enumerate(rows.items()):
        _row(axes[3 * row : 3 * row + 3], title, sorted(cases, key=_rate), systems)
    figure.tight_layout()
    return figure


def _row(axes: Sequence[Any], title: Case, cases: Sequence[Sequence[Outcome]], systems: Sequence[str]) -> None:
    steps, exposed, wire = axes
    rates = [_rate(outcomes) for outcomes in cases]
    for number, system in enumerate(systems):
        of_rates = [next(one for one in outcomes if one.system == system) for outcomes in cases]
        color, line = f"C{number}", "os^D"[number // 10 % 4] + "-"  # there are ten colors
        steps.plot(rates, [one.p50 * 1e3 for one in of_rates], line, color=color, label=system, markersize=4)
        steps.plot(rates, [one.bound_s * 1e3 for one in of_rates], ":", color=color, linewidth=1)
        waits = [max(_LEAST_MS, one.exposed_s * 1e3) for one in of_rates]
        exposed.plot(rates, waits, line, color=color, markersize=4)
        wire.barh(system, of_rates[-1].wire_bytes / 1e6, color=color)
    steps.axhline(cases[0][0].compute_s * 1e3, color="0.5", linewidth=1, label=ALONE)
    heading = textwrap.fill(f"{title}: step, dotted: its bound", _TITLE_WIDTH)
    for axis, text in ((steps, heading), (exposed, "of it exposed communication")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(rates, [str(rate) for rate in rates])
        axis.set_xlabel("Mbit/s of each host's link")
        axis.set_ylabel("ms")
        axis.set_title(text)
        axis.grid(alpha=0.3)
    steps.legend(fontsize=7)
    wire.invert_yaxis()
    wire.set_title(f"bytes on the wire, {rates[-1]} Mbit/s")
    wire.set_xlabel("MB per step and host")


def _rate(outcomes: Sequence[Outcome]) -> float:
    return outcomes[0].case.rate_mbit


def _by_case(cases: Sequence[Sequence[Outcome]]) -> Any:
    """Draws the steps of every case, and their bounds if the link's rate is known."""
    figure, axes = subplots(len(cases))
    for axis, outcomes in zip(axes, cases, strict=True):
        bars(axis, [(one.system, one.step_s) for one in outcomes], str(outcomes[0].case), "ms per step", 1e3)
        bounds = [one.bound_s * 1e3 for one in outcomes if one.bound_s is not None]
        for row, bound_ms in enumerate(bounds):
            label = None if row else "bound"
            axis.plot([bound_ms] * 2, [row - 0.4, row + 0.4], color="tab:red", label=label)
        if bounds:
            axis.legend(fontsize=8)
    figure.tight_layout()
    return figure


def check_format(path: Path) -> None:
    """Raises InvalidArgument for a file whose extension is no format of matplotlib's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    kind = path.suffix[1:].lower()
    if kind and kind not in known:
        raise InvalidArgument(f"--plot is {path}; expected a name that ends in .{', .'.join(sorted(known))}")


def subplots(columns: int, rows: int = 1) -> tuple[Any, list[Any]]:
    """Returns a matplotlib figure that needs no display, and its axes in a flat list."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(5.5 * columns, 4.2 * rows), squeeze=False)
    return figure, list(axes.flat)


def bars(axis: Any, samples: Sequence[tuple[str, Sequence[float]]], title: str, label: str, scale: float) -> None:
    """Draws horizontal bars of the medians, by name, with lines from minimum to maximum."""
    medians = [statistics.median(values) * scale for _, values in samples]
    low = [m - min(values) * scale for m, (_, values) in zip(medians, samples, strict=True)]
    high = [max(values) * scale - m for m, (_, values) in zip(medians, samples, strict=True)]
    axis.barh([name for name, _ in samples], medians, xerr=[low, high], color="tab:blue", ecolor="0.3", capsize=3)
    axis.invert_yaxis()
    axis.set_xlabel(label)
    axis.set_title(title)
    axis.grid(axis="x", alpha=0.3)
