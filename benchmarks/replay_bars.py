"""What this project has set itself for replayed models, beside what was measured."""

from __future__ import annotations

import os
from collections.abc import Sequence

from replay_cases import Case, Outcome, is_ddp
from replay_systems import ALONE, DDP_HOOKS, is_launched, parse

from bagua.replay.profiles import Profile

# Profile and system at 4 hosts, 1 Gbit/s, scale 0.1: the time of the best DDP over ours, and ours over the bound.
BARS = {
    ("vgg16", "gradient_allreduce"): (1.0, 1.08),
    ("vgg16", "bytegrad"): (2.1, 1.15),
    ("vgg16", "qsgd:bits=4"): (2.6, 1.15),
    ("bert_large", "gradient_allreduce"): (1.0, 1.08),
    ("bert_large", "bytegrad"): (1.9, 1.15),
    ("bert_large", "qsgd:bits=4"): (3.0, 1.15),
}
# A step over compute alone, wherever compute can hide all communication.
OVERHEAD = 1.05
_COMPUTES = "qadam"  # whose step has Adam in it
_SCALE = 0.1
_HIDES = 1.001  # a bound of so much of compute alone is compute alone


def bars_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What this project has set itself, beside what was measured; a line each."""
    return [*ratio_bars(outcomes), *overhead_bars(outcomes)]


def ratio_bars(outcomes: Sequence[Outcome]) -> list[str]:
    """Of `BARS`: beside DDP, and beside the bound; a line for each system."""
    case = outcomes[0].case
    if not _is_of_bars(case) or case.rate_mbit != 1000:
        return []
    by_name = {outcome.system: outcome for outcome in outcomes}
    lines = []
    for (profile, system), (ratio, of_bound) in BARS.items():
        is_full = system == "gradient_allreduce"
        baselines = [by_name[name].p50 for name in (("ddp",) if is_full else DDP_HOOKS) if name in by_name]
        if profile != case.profile or system not in by_name or not baselines:
            continue
        ours = by_name[system]
        best_s = min(baselines)
        reached = (best_s / ours.p50, ours.p50 / ours.bound_s)
        is_met = reached[0] >= ratio and reached[1] <= of_bound
        beside = "DDP" if is_full else "the best DDP as it comes"
        lines.append(
            f"- {_terms(case)}{profile}, {system}: {reached[0]:.3f} times as fast as {beside} (bar {ratio}, at its "
            f"bound it would be {best_s / ours.bound_s:.2f}), {reached[1]:.2f} of its bound (bar {of_bound}): "
            f"{'met' if is_met else _missed(best_s, ours, ratio) + _of_cores(ours, by_name.get(ALONE))}"
        )
        tuned = min((one for one in outcomes if is_ddp(one)), key=lambda one: one.p50)
        if not is_full and tuned.p50 < best_s:
            is_met = tuned.p50 >= ratio * ours.p50
            lines[-1] += (
                f"; beside {tuned.system} {tuned.p50 / ours.p50:.3f} times (at its bound "
                f"{tuned.p50 / ours.bound_s:.2f}): {'met' if is_met else _missed(tuned.p50, ours, ratio)}"
            )
    return lines


def _missed(rival_s: float, ours: Outcome, ratio: float) -> str:
    return "MISSED" if rival_s / ours.bound_s >= ratio else "MISSED, and beyond its bound on this machine"


def _of_cores(ours: Outcome, alone: Outcome | None) -> str:
    """What that processor time alone takes of a step: all hosts of a replay share the cores, forward is before it."""
    if alone is None or is_launched():
        return ""
    case = ours.case
    num_ranks, num_cores = case.num_hosts * case.ranks_per_host, os.cpu_count()
    ran_ms = (ours.processor_s - alone.processor_s) * 1e3
    least_ms = Profile.load(case.path).forward_ms + num_ranks * ran_ms / num_cores
    return (
        f" (step {ours.p50 * 1e3:.0f} ms, bound {ours.bound_s * 1e3:.0f} ms; each of {num_ranks} ranks ran "
        f"{ran_ms:.0f} ms more than compute alone, which after forward takes {least_ms:.0f} ms on {num_cores} cores)"
    )


def overhead_bars(outcomes: Sequence[Outcome]) -> list[str]:
    """Of `OVERHEAD`: a line for our systems whose bound is compute alone, none where there are none."""
    found = [f"{one.system} {one.p50 / one.compute_s:.3f} {_overhead_verdict(one)}" for one in hidden(outcomes)]
    where = "where compute can hide the communication, a step over compute alone"
    return [f"- {outcomes[0].case}, {where} (bar {OVERHEAD}): {', '.join(found)}"] if found else []


def hidden(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Our systems whose communication compute can hide: their bound is compute alone."""
    return [one for one in outcomes if _may_hide(one) and one.bound_s <= _HIDES * one.compute_s]


def _may_hide(one: Outcome) -> bool:
    """Of ours, as they come: what does not overlap hides nothing, and `_COMPUTES` has work of its own."""
    name, options = parse(one.system)
    return one.bound_s is not None and name not in (*DDP_HOOKS, ALONE, _COMPUTES) and "overlap" not in options


def _overhead_verdict(one: Outcome) -> str:
    """Missed, beside the processor's work: hosts of a replay share one machine's cores."""
    if one.p50 <= OVERHEAD * one.compute_s:
        return "met"
    return f"MISSED ({one.processor_s * 1e3:.1f} ms of processor per rank)"


def _is_of_bars(case: Case) -> bool:
    return (case.scale, case.num_hosts, case.ranks_per_host) == (_SCALE, 4, 1)


def _terms(case: Case) -> str:
    return f"with {case.congestion} for all: " if case.congestion else ""
