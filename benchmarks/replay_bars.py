"""What this project has set itself for replayed models, beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from replay_cases import Outcome, is_ddp
from replay_systems import DDP_HOOKS

# Profile and system at 4 hosts, 1 Gbit/s, scale 0.1: the time of the best DDP as it comes over ours, and ours over the
# bound.
BARS = {
    ("vgg16", "gradient_allreduce"): (1.0, 1.08),
    ("vgg16", "bytegrad"): (2.1, 1.15),
    ("vgg16", "qsgd:bits=4"): (2.6, 1.15),
    ("bert_large", "gradient_allreduce"): (1.0, 1.08),
    ("bert_large", "bytegrad"): (1.9, 1.15),
    ("bert_large", "qsgd:bits=4"): (3.0, 1.15),
}
# Where compute hides all communication: profile, rate, and the step over compute alone.
HIDDEN = ("resnet50", 5000, 1.05)


def bars_of(outcomes: Sequence[Outcome]) -> list[str]:
    """What this project has set itself, beside what was measured; one line each."""
    case = outcomes[0].case
    if (case.scale, case.num_hosts, case.ranks_per_host) != (0.1, 4, 1):
        return []
    terms = f"with {case.congestion} for all: " if case.congestion else ""
    by_name = {outcome.system: outcome for outcome in outcomes}
    lines = []
    profile, rate_mbit, overhead = HIDDEN
    if (case.profile, case.rate_mbit) == (profile, rate_mbit):
        for system in ("gradient_allreduce", "bytegrad", "qsgd:bits=4"):
            if system in by_name:
                reached = by_name[system].p50 / by_name[system].compute_s
                lines.append(
                    f"- {profile} at {rate_mbit} Mbit/s, {system}: compute hides the communication; the step takes "
                    f"{reached:.3f} of compute alone (bar {overhead}): {'met' if reached <= overhead else 'MISSED'}"
                )
    if case.rate_mbit != 1000:
        return lines
    for (profile, system), (ratio, of_bound) in BARS.items():
        is_full = system == "gradient_allreduce"
        baselines = [by_name[name].p50 for name in (("ddp",) if is_full else DDP_HOOKS) if name in by_name]
        if profile != case.profile or system not in by_name or not baselines:
            continue
        ours = by_name[system]
        best_s = min(baselines)
        reached = (best_s / ours.p50, ours.p50 / ours.bound_s)
        is_met = reached[0] >= ratio and reached[1] <= of_bound
        missed = "MISSED" if best_s / ours.bound_s >= ratio else "MISSED, and beyond its bound on this machine"
        beside = "DDP" if is_full else "the best DDP as it comes"
        tuned_s = min(one.p50 for one in outcomes if is_ddp(one))
        also = "" if is_full or tuned_s == best_s else f"; {tuned_s / ours.p50:.2f} beside one with smaller buckets"
        lines.append(
            f"- {terms}{profile}, {system}: {reached[0]:.3f} times as fast as {beside} (bar {ratio}, at its bound it would be "
            f"{best_s / ours.bound_s:.2f}{also}), {reached[1]:.2f} of its bound (bar {of_bound}): "
            f"{'met' if is_met else missed}"
        )
    return lines
