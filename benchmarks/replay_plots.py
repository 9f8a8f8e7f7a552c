"""Plots of replayed models: by the rate of the links, as docs/performance.md has them, or bars where there is one."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import report
from replay_cases import Case, Outcome
from replay_systems import ALONE

PLOTTED = (
    "ddp",
    "ddp_fp16",
    "ddp_bf16",
    "gradient_allreduce",
    "bytegrad",
    "qsgd:bits=4",
    "decentralized",
    "local_sgd",
    "async",
)
_TITLE_WIDTH = 60  # characters above one of three plots
_LEAST_MS = 0.1  # where nothing is exposed, for the logarithm


def plot(cases: Sequence[Sequence[Outcome]], systems: Sequence[str]) -> Any:
    """What replay.py leaves behind: by rate, of those systems, where a model was played at several, else bars."""
    rows: dict[Case, list[Sequence[Outcome]]] = {}
    for outcomes in cases:
        rows.setdefault(replace(outcomes[0].case, rate_mbit=None), []).append(outcomes)
    return by_rate(rows, systems) if len(cases) > len(rows) else bars(cases)


def by_rate(rows: Mapping[str | Case, Sequence[Sequence[Outcome]]], systems: Sequence[str] = PLOTTED) -> Any:
    """A row for each title: step and exposed communication by bandwidth, with bounds, and bytes on the wire."""
    figure, axes = report.subplots(3, len(rows))
    for row, (title, cases) in enumerate(rows.items()):
        _row(axes[3 * row : 3 * row + 3], title, sorted(cases, key=_rate), systems)
    figure.tight_layout()
    return figure


def _row(axes: Sequence[Any], title: str | Case, cases: Sequence[Sequence[Outcome]], systems: Sequence[str]) -> None:
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


def bars(cases: Sequence[Sequence[Outcome]]) -> Any:
    """Steps of every case, and their bounds where the link's rate is known."""
    figure, axes = report.subplots(len(cases))
    for axis, outcomes in zip(axes, cases, strict=True):
        rows = [report.Row(one.system, one.step_s) for one in outcomes]
        report.bars(axis, rows, str(outcomes[0].case), "ms per step", 1e3)
        bounds = [one.bound_s * 1e3 for one in outcomes if one.bound_s is not None]
        for place, bound_ms in enumerate(bounds):
            label = None if place else "bound"
            axis.plot([bound_ms] * 2, [place - 0.4, place + 0.4], color="tab:red", label=label)
        if bounds:
            axis.legend(fontsize=8)
    figure.tight_layout()
    return figure
