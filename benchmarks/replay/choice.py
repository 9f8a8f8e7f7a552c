"""Judges `algorithm="auto"` over a grid of models, links and numbers of hosts: what it loses, and what it costs.

In each cell of the grid `bagua bench replay` measures torch's DDP, the candidates, and what "auto" has chosen, in the
same run; and the simulator predicts them, knowing the rate of the links and nothing else. Printed are, per cell, the
choice; its regret, which is how much longer a step takes than under the best of the measured candidates; how much
longer than under the best DDP; and the time that choosing has taken, as a share of the first 500 steps. Over all cells:
regrets, the simulator's errors, and Kendall's tau of its rankings.

Links have a latency of a few tens of microseconds; the kernels that this was written on cannot add any. A model is in
a part of its size, on links of that part of the rate, so steps take as long as at full size.

    sudo .venv/bin/python -m benchmarks.replay.choice [--quick] [--csv build/choice.csv] [--plot build/choice.png]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.replay.simulated import simulated_s

_MODELS = ("resnet50", "vgg16", "gpt_124m")
_LINKS = ((200, 0.04), (300, 0.1), (1000, 0.1))  # Mbit/s, and the models' scale
_HOSTS = (2, 4, 8)
_DDP = ("ddp", "ddp_fp16")
_CANDIDATES = ("gradient_allreduce", "bytegrad:codec=bf16", "bytegrad", "qsgd:bits=4")
_CLASSES = {"R1": _CANDIDATES[:2], "R2": _CANDIDATES}
_LATENCY = "0.05ms"
_STEPS = 500
_CHOSE = re.compile(r"after (\d+) steps and ([\d.]+) s: (\S+) of R.*; to choose took ([\d.]+) s")


def kendall_tau(first: Sequence[float], second: Sequence[float], alike: float) -> float | None:
    """Returns Kendall's tau of two rankings; pairs of which the first's values are closer than ``alike`` do not count.

    None: no pair counts.
    """
    score = num = 0
    for i in range(len(first)):
        for j in range(i):
            if abs(first[i] / first[j] - 1) > alike:
                score += 1 if (first[i] > first[j]) == (second[i] > second[j]) else -1
                num += 1
    return score / num if num else None


def main() -> None:
    from bagua.replay.cases import Case
    from bagua.replay.command import play
    from bagua.replay.report import aligned, append_csv, taken_on
    from benchmarks.lib import report

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, the fastest link, four hosts: that it works")
    parser.add_argument("--csv", type=Path, help="add the measured rows to this file")
    parser.add_argument("--plot", type=Path, help="draw regrets, and predictions by measurements, with matplotlib")
    args = parser.parse_args()
    report.need_hosts("choice")
    cells = [(model, *link, hosts) for link in _LINKS for model in _MODELS for hosts in _HOSTS]
    if args.quick:
        cells = [("resnet50", *_LINKS[-1], 4)]
    rows = [["cell", "auto R1", "regret %", "to DDP %", "auto R2", "regret %", "to DDP %", "cost % of 500 steps"]]
    regrets: dict[str, list[float]] = {risk: [] for risk in _CLASSES}
    to_ddp: dict[str, list[float]] = {risk: [] for risk in _CLASSES}
    taus, pairs, costs = [], [], []
    begin = time.monotonic()
    for model, rate, scale, hosts in cells:
        case = Case(model, scale, hosts, 1, rate)
        print(f"playing {case} ...", file=sys.stderr, flush=True)
        outcomes = play(case, [*_DDP, *_CANDIDATES, *(f"auto:risk={risk}" for risk in _CLASSES)], samples=3)
        if args.csv is not None:
            append_csv(args.csv, outcomes)
        step_s = {one.system: one.p50 for one in outcomes}
        best_ddp = min(step_s[one] for one in _DDP)
        row = [f"{model}, {hosts} hosts, {rate} Mbit/s, scale {scale:g}"]
        cost = 0.0
        for risk, members in _CLASSES.items():
            chosen = next(one for one in outcomes if one.system == f"auto:risk={risk}")
            regrets[risk].append(chosen.p50 / min(step_s[one] for one in members) - 1)
            to_ddp[risk].append(chosen.p50 / best_ddp - 1)
            num, until_s, name, took_s = _CHOSE.match(chosen.chose).groups()
            # The time that stood still, or all that the steps until then took beyond those of the base.
            beyond_s = max(float(took_s), float(until_s) - int(num) * step_s["gradient_allreduce"])
            cost = max(cost, beyond_s / (_STEPS * step_s["gradient_allreduce"]))
            row += [name, f"{100 * regrets[risk][-1]:+.1f}", f"{100 * to_ddp[risk][-1]:+.1f}"]
        costs.append(cost)
        rows.append([*row, f"{100 * cost:.2f}"])
        rehearsed: dict = {}
        slowdown = max(1.0, hosts / 2)  # ranks of the two cores that this was written on
        simulated = [simulated_s(case, one, _LATENCY, slowdown, rehearsed) for one in _CANDIDATES]
        measured = [step_s[one] for one in _CANDIDATES]
        pairs += [(case, one, *times) for one, *times in zip(_CANDIDATES, measured, simulated, strict=True)]
        taus.append(kendall_tau(measured, simulated, 0.02))
        print(*aligned([rows[0], rows[-1]])[2:], flush=True)
    print("\n" + "\n".join(f"- {name}: {value}" for name, value in taken_on().items()))
    print(f"- took: {(time.monotonic() - begin) / 60:.0f} minutes\n")
    print("\n".join(aligned(rows)))
    for risk in _CLASSES:
        ordered = sorted(regrets[risk])
        print(
            f"\n{risk}: regret {_percent(ordered)} in the median, "
            f"{100 * ordered[int(0.95 * len(ordered))]:.1f}% at 95 of 100, {100 * ordered[-1]:.1f}% at worst; "
            f"{100 * max(to_ddp[risk]):+.1f}% to the best DDP at worst"
        )
    errors = sorted(abs(simulated / measured - 1) for _, _, measured, simulated in pairs)
    counted = [tau for tau in taus if tau is not None]
    print(
        f"\nsimulator: {len(errors)} steps, off by {_percent(errors)} in the median, {100 * errors[-1]:.1f}% at worst"
    )
    for case, system, measured, simulated in sorted(pairs, key=lambda one: -abs(one[3] / one[2] - 1))[:5]:
        print(f"  {case}, {system}: {1e3 * measured:.1f} ms measured, {1e3 * simulated:.1f} ms simulated")
    if counted:
        print(f"Kendall's tau of the ranking: {statistics.mean(counted):.2f}, a mean over {len(counted)} cells")
    print(
        f"\nchoosing took {_percent(costs)} of the first {_STEPS} steps in the median, {100 * max(costs):.2f}% at most"
    )
    if args.plot is not None:
        _draw(args.plot, regrets, pairs)


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.median(values):.2g}%"


def _draw(path: Path, regrets: dict[str, list[float]], pairs: Sequence[tuple]) -> None:
    from bagua.replay.plots import subplots

    figure, (left, right) = subplots(2)
    for risk, values in regrets.items():
        left.plot(
            sorted(100 * value for value in values), range(1, len(values) + 1), drawstyle="steps-post", label=risk
        )
    left.set(xlabel="regret to the best measured candidate, %", ylabel="cells")
    left.legend()
    for index, system in enumerate(_CANDIDATES):
        points = [(1e3 * measured, 1e3 * simulated) for _, one, measured, simulated in pairs if one == system]
        right.plot(*zip(*points, strict=True), f"C{index}o", markersize=4, label=system)
    ends = [f(1e3 * one[2] for one in pairs) for f in (min, max)]
    right.plot(ends, ends, "k-", linewidth=0.5)
    right.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="simulated, ms")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
