"""The tables of docs/performance.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import report
from replay_bars import OVERHEAD, hidden
from replay_cases import Case, Outcome, cells_of, is_ddp
from replay_systems import ALONE

WITH, WITHOUT = "hierarchical=True", "hierarchical=False"
_SAME_BYTES = 1.05  # the most that they may differ by, acknowledgements and headers


def best_ddp(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of DDP's variants."""
    return min((one for one in outcomes if is_ddp(one)), key=lambda one: one.p50)


def named(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    """By system."""
    return {outcome.system: outcome for outcome in outcomes}


def stolen(outcomes: Sequence[Outcome]) -> str:
    """The most that the hypervisor took during one of them."""
    shares = [one.stolen for one in outcomes]
    return "not known" if None in shares else f"{max(shares):.1%}"


# --- systems down, rates across -----------------------------------------------------------------


def tables_of_rates(of_rates: Sequence[Sequence[Outcome]]) -> list[str]:
    """Three: steps, what of them is exposed, the processor's work; all cases differ in their rate only."""
    of_all = [
        ["compute alone", *(f"{report.three_digits(one[0].compute_s * 1e3)} ms" for one in of_rates), ""],
        ["spread of samples", *(f"{_spread(one):.1%}" for one in of_rates), ""],
        ["stolen, at most", *(stolen(one) for one in of_rates), ""],
    ]
    alone = ["compute alone", *(_processor_cell(one[0]) for one in of_rates), ""]
    steps = _table_of_rates("step, ms (times as fast as the best DDP)", of_rates, _step_cell)
    exposed = _table_of_rates("exposed, ms (step over bound)", of_rates, _exposed_cell)
    processor = _table_of_rates("processor, ms", of_rates, _processor_cell)
    lines = [*report.aligned([*steps, *of_all]), "", *report.aligned(exposed)]
    return [*lines, "", *report.aligned([*processor, alone])]


def _table_of_rates(
    title: str, cases: Sequence[Sequence[Outcome]], cell: Callable[[Outcome, Sequence[Outcome]], str]
) -> list[list[str]]:
    """With the bytes on the wire, from the first rate to the last where they differ."""
    rows = [[title, *(f"{one[0].case.rate_mbit} Mbit/s" for one in cases), "wire MB"]]
    for system in dict.fromkeys(one.system for outcomes in cases for one in outcomes if one.system != ALONE):
        of_rates = [(named(outcomes).get(system), outcomes) for outcomes in cases]
        wire = [one.wire_bytes / 1e6 for one, _ in of_rates if one is not None]
        ends = [wire[0], wire[-1]] if max(wire) > _SAME_BYTES * min(wire) else [wire[-1]]
        cells = ["" if one is None else cell(one, outcomes) for one, outcomes in of_rates]
        rows.append([system, *cells, " to ".join(map(report.three_digits, ends))])
    return rows


def _step_cell(one: Outcome, outcomes: Sequence[Outcome]) -> str:
    return f"{report.three_digits(one.p50 * 1e3)} ({best_ddp(outcomes).p50 / one.p50:.2f})"


def _exposed_cell(one: Outcome, _: Sequence[Outcome]) -> str:
    return f"{report.three_digits(one.exposed_s * 1e3)} ({one.p50 / one.bound_s:.2f})"


def _processor_cell(one: Outcome, _: Sequence[Outcome] = ()) -> str:
    return report.three_digits(one.processor_s * 1e3)


def _spread(outcomes: Sequence[Outcome]) -> float:
    return statistics.median((max(one.step_s) - min(one.step_s)) / one.p50 for one in outcomes)


# --- one case -----------------------------------------------------------------------------------


def table_of_case(outcomes: Sequence[Outcome]) -> list[str]:
    """Systems down, beside the best DDP."""
    best_s = best_ddp(outcomes).p50
    return _systems_down(outcomes, "to best DDP", lambda one: "" if one.system == ALONE else f"{best_s / one.p50:.2f}")


def table_of_parts(outcomes: Sequence[Outcome]) -> list[str]:
    """Of an ablation: the whole, and without one part at a time."""
    whole = outcomes[1]
    return _systems_down(outcomes[1:], "to the whole", lambda one: "" if one is whole else f"{one.p50 / whole.p50:.2f}")


def _systems_down(outcomes: Sequence[Outcome], ratio: str, ratio_of: Callable[[Outcome], str]) -> list[str]:
    cells = [cells_of(one) for one in outcomes]
    columns = list(dict.fromkeys(column for of_one in cells for column in of_one))
    rows = [["system", "step ms", ratio, *columns]]
    for one, of_one in zip(outcomes, cells, strict=True):
        step = report.three_digits(one.p50 * 1e3)
        rows.append([one.system, step, ratio_of(one), *(of_one.get(column, "") for column in columns)])
    return report.aligned(rows)


# --- where compute can hide the communication ---------------------------------------------------


def table_of_overheads(outcomes: Mapping[Case, Sequence[Outcome]]) -> list[str]:
    """Steps over compute alone: cases down; systems, as they come, across."""
    cells = {case: {_plain_name(one): _overhead_cell(one) for one in hidden(outcomes[case])} for case in outcomes}
    systems = sorted({name for of_case in cells.values() for name in of_case if name})
    rows = [["", *systems]]
    for case, of_case in cells.items():
        if any(of_case):
            rows.append([str(case), *(of_case.get(name, "") for name in systems)])
    return report.aligned(rows)


def _plain_name(one: Outcome) -> str:
    """Of a system as it comes; empty for others, which are in the tables of their cases."""
    is_plain = WITH not in one.system and "bucket_bytes" not in one.system
    return one.system.replace(WITHOUT, "").rstrip(":,") if is_plain else ""


def _overhead_cell(one: Outcome) -> str:
    ratio = f"{one.p50 / one.compute_s:.3f}"
    return f"{ratio if one.p50 <= OVERHEAD * one.compute_s else f'**{ratio}**'} ({_processor_cell(one)})"
