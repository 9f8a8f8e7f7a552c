"""What performance.py writes: docs/performance.md, its tables and its plots."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import report
from ablation import Study
from performance_tables import (
    WITH,
    WITHOUT,
    best_ddp,
    named,
    stolen,
    table_of_case,
    table_of_overheads,
    table_of_parts,
    tables_of_rates,
)
from replay import systems_of
from replay_bars import OVERHEAD, ratio_bars
from replay_cases import Case, Outcome
from replay_plots import by_rate
from replay_systems import ALONE

from bagua.replay.profiles import Profile

DOCUMENT = report.ROOT / "docs" / "performance.md"
_RELAXATIONS = ("bytegrad", "qsgd:bits=4", "decentralized", "local_sgd")
_PAYS_FROM = 1.05  # times as fast
_HIDDEN = Case("resnet50", 0.1, 4, 1, 5000)  # of those in which compute can hide the communication
_INTRODUCTION = """\
# Performance

What would each algorithm do for a model on a network? Measured by playing models on hosts with shaped links, under
torch DDP on gloo (float32, its fp16 hook, a cast to bf16) and under every algorithm of bagua. Tensors, buckets and
communication are real, compute is a sleep that lasts as long as the model's profile says. Everything here is written
by one command:

```sh
sudo .venv/bin/python benchmarks/performance.py
```

`benchmarks/replay.py` plays one case, and your own model, with the same plots: `bagua bench record` measures its
profile.

## How to read it

Where the scale is 0.1, tensors have a tenth of the model's size: for the wire, a link of 1 Gbit/s stands for 10 Gbit/s,
and so on. The processor's work, of codecs and copies, shrinks with the tensors too: on a host whose link has ten times
the rate it is ten times what a table says, which is some cores' work where a step is short. Here all hosts share the
two cores of one machine instead: where links are fast, what is seen is the processor more than the network, and neither
a real host's. VGG16 is played at full size too, among the other cases. How long compute takes is assumed: a profile
names the device that its times are of. Gradients are CPU tensors; copies from an accelerator and back are not in it.

DDP and bagua play as they come, with buckets of at most 25 MiB. Of a tenth of a model these are few, so DDP with its
fp16 hook plays with a tenth of the cap too (`bucket_cap_mb=2.5`), and from 1 Gbit/s on more systems do
(`bucket_bytes=2621440`). "The best DDP" is the best of all that a table has.

TCP's congestion control is as it comes, too: DDP's is the system's, which is named below, and where that is BBR, whose
pauses hold all ranks up, bagua's is [cubic](collectives.md#connections-between-hosts). Most systems have cubic: how DDP
does with it is among the [other cases](#other-cases).

- **step**: median time of a training step of the slowest rank; of `async` a sample is a round of averaging.
- **spread**: largest less smallest sample, in parts of the median; the median of all systems.
- **stolen**: the most that the hypervisor took of this machine's processors during one of the systems, where it says
  so. A system of which that is more than 10% is measured again, at most twice, and so is compute alone where it takes
  5% longer than the profile says; the least disturbed try counts.
- **exposed**: step less compute alone, which is the time that communication costs; of `qadam`, Adam's too.
- **processor**: how long the threads of a rank ran per step, in the kernel too, a mean of the ranks. Of compute alone
  it is what playing the model costs. All ranks share two cores here: for four of them a step has to last at least twice
  as long, and most of this work begins with backward.
- **wire**: bytes that a host's link carries per step, headers and acknowledgements included; from the slowest link to
  the fastest where they differ (`async` has a round per half a second, or as often as the link allows).
- **bound**: what no implementation can beat that sends these bytes: none leaves before its gradient is ready, the
  link is a token bucket of its rate (it was idle, so 512 KiB pass at once), compute takes what it takes. Algorithms
  that exchange weights may do so during the whole step (`decentralized`, `async`) or must wait (`local_sgd`,
  `low_precision_decentralized`).

A relaxation changes what is computed, too: [convergence](convergence.md) says what it costs in steps. `async` and
`local_sgd` exchange less often than once per step. `qadam` steps with Adam on the processor, the others with an
optimizer that does nothing, as on an accelerator.
"""


_AT_A_GLANCE_TEXT = (
    "One number places a model on a network, roughly: how long its float32 gradients take on the wire, over how long",
    "a step computes. With P parameters on n hosts whose links carry R bit/s, and a step that computes for T seconds,",
    "it is 64 P (n-1)/n / (R T). Find it on the lower axis; the points are all cases with 4 hosts. Two models of one",
    "ratio differ in what backward hides and in what codecs cost. On a slow network the best DDP casts to 16 bits,",
    "which sends half the bytes of `gradient_allreduce`.",
)


def write_document(
    outcomes: Mapping[Case, Sequence[Outcome]],
    studies: Mapping[Study, Sequence[Outcome]],
    facts: Mapping[str, Any],
    document: Path,
    folder: Path,
) -> None:
    """Writes the document, and the plots into ``folder``."""

    def image(name: str, plotted: Any) -> str:
        path = folder / (f"{date}-performance" + (f"-{name}.png" if name in by_profile else ".png"))
        plotted.savefig(path, dpi=110, bbox_inches="tight")
        return f"![{name}]({os.path.relpath(path, document.parent)})"

    folder.mkdir(parents=True, exist_ok=True)
    date = facts["date"].split()[0]
    by_profile: dict[str, list[Case]] = {}
    for case in outcomes:
        if _is_plain(case):
            by_profile.setdefault(case.profile, []).append(case)
    on_four_hosts = [outcomes[case] for cases in by_profile.values() for case in cases]
    lines = [_INTRODUCTION, *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["## At a glance", "", image("speed-up by wire over compute", plot_at_a_glance(on_four_hosts))]
    lines += ["", *_AT_A_GLANCE_TEXT, "", "## The bars that this project has set itself", ""]
    lines += _bars(outcomes)
    for profile, cases in by_profile.items():
        of_rates = [outcomes[case] for case in cases]
        lines += [
            "",
            f"## {profile}: 4 hosts, a tenth of its size",
            "",
            image(profile, by_rate({profile: of_rates})),
            "",
        ]
        lines += _commands(cases, outcomes)
        lines += [f"The profile: {Profile.load(cases[0].path).source}.", ""]
        lines += tables_of_rates(of_rates)
    others = [case for case in outcomes if not _is_plain(case)]
    if others:
        lines += ["", "## Other cases", ""]
        lines += ["Other numbers of hosts, hosts with two ranks, cubic for all, full size.", ""]
        lines += _commands(others, outcomes)[:-1]
        for case in others:
            lines += [
                "",
                f"**{case}** (stolen: at most {stolen(outcomes[case])})",
                "",
                *table_of_case(outcomes[case]),
            ]
    lines += ["", *_parts(studies), "", *_hierarchy(outcomes)]
    lines += ["", *_when(on_four_hosts)]
    document.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written: {document}, {datetime.now():%H:%M}")


def _is_plain(case: Case) -> bool:
    return (case.num_hosts, case.ranks_per_host, case.congestion) == (4, 1, "")


def _bars(outcomes: Mapping[Case, Sequence[Outcome]]) -> list[str]:
    """All bars, and what plays those beside DDP and the one that stands for those of the overhead."""
    of_ratios = [case for case in outcomes if ratio_bars(outcomes[case])]
    lines = _commands([*of_ratios, *(case for case in outcomes if case == _HIDDEN)], outcomes)
    lines += [line for case in of_ratios for line in ratio_bars(outcomes[case])]
    lines += [
        "",
        f"Where compute can hide all communication, a step may take {OVERHEAD} of compute alone; more is bold.",
        "Of every system but `qadam`, whose step has Adam in it. In parentheses: `processor` as above, in ms; ranks of",
        "all hosts take theirs from this machine's two cores.",
        "",
    ]
    return lines + table_of_overheads(outcomes)


def _commands(cases: Sequence[Case], outcomes: Mapping[Case, Sequence[Outcome]]) -> list[str]:
    """What plays the cases anew: a line for those that differ in their rates only."""
    rates: dict[str, list[int]] = {}
    for case in cases:
        systems = tuple(one.system for one in outcomes[case] if one.system != ALONE)
        options = f"--profiles {case.profile} --scale {case.scale:g} --hosts {case.num_hosts}"
        if case.ranks_per_host > 1:
            options += f" --ranks-per-host {case.ranks_per_host}"
        if case.congestion:
            options += f" --congestion {case.congestion}"
        if systems != systems_of(case.scale):
            options += f" --systems {' '.join(systems)}"
        rates.setdefault(options, []).append(case.rate_mbit)
    lines = [f"{options} --rates {' '.join(map(str, of_case))}" for options, of_case in rates.items()]
    return ["```sh", *(f"sudo .venv/bin/python benchmarks/replay.py {line}" for line in lines), "```", ""]


def _parts(studies: Mapping[Study, Sequence[Outcome]]) -> list[str]:
    """What each part of the design gives: rows of ablation.py."""
    lines = ["## What overlap, buckets and the hierarchy of nodes give", ""]
    lines += [
        "One of them switched off at a time, as in section 4.4 of the paper: gradients are copied into buckets, which",
        "leave when backward has ended; every tensor is a message; every rank exchanges with every other, on its own",
        "host or not.",
        "",
        "```sh",
        "sudo .venv/bin/python benchmarks/ablation.py",
        "```",
        "",
    ]
    for study, outcomes in studies.items():
        lines += study.findings(outcomes)
    for study, outcomes in studies.items():
        lines += ["", f"**{study}** (stolen: at most {stolen(outcomes)})", "", *table_of_parts(outcomes)]
    return lines


def _hierarchy(outcomes: Mapping[Case, Sequence[Outcome]]) -> list[str]:
    """What the hierarchy of nodes gives and costs, where systems were played with it and without."""
    lines = [
        "The hierarchy sends fewer bytes between hosts, and works more on each: it pays where the wire is what a step",
        "waits for. Steps with it, over steps without:",
        "",
    ]
    for case, of_case in outcomes.items():
        by_name = named(of_case)
        ratios = [
            f"`{system.replace(WITH, '').rstrip(':,')}` {one.p50 / by_name[system.replace(WITH, WITHOUT)].p50:.2f}"
            for system, one in by_name.items()
            if WITH in system
        ]
        lines += [f"- {case}: {', '.join(ratios)}"] if ratios else []
    return lines


def _wire_over_compute(outcomes: Sequence[Outcome]) -> float:
    full = named(outcomes)["gradient_allreduce"]
    return full.wire_bytes * 8 / (full.case.rate_mbit * 1e6) / full.compute_s


def plot_at_a_glance(cases: Sequence[Sequence[Outcome]]) -> Any:
    """How many times as fast as the best DDP a step is, by the ratio of wire to compute."""
    figure, (axis,) = report.subplots(1)
    figure.set_size_inches(9, 5)
    ordered = sorted(cases, key=_wire_over_compute)
    ratios = [_wire_over_compute(outcomes) for outcomes in ordered]
    for system in ("gradient_allreduce", *_RELAXATIONS):
        gains = [best_ddp(outcomes).p50 / named(outcomes)[system].p50 for outcomes in ordered]
        axis.plot(ratios, gains, "o-", label=system, markersize=4, linewidth=0.5)
    axis.axhline(1, color="0.5", linewidth=1, label="the best DDP")
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = [0.5, 1, 2, 3, 5, 10, 20]
    axis.set_yticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    places = [0.1, 0.3, 1, 3, 10, 30]
    axis.set_xticks(places, [str(place) for place in places])
    axis.set_xlabel("float32 gradients on the wire, over compute")
    axis.set_ylabel("times as fast as the best DDP")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure


def _when(cases: Sequence[Sequence[Outcome]]) -> list[str]:
    """At which ratio of wire to compute relaxations stop paying, from the cases themselves."""
    rows = []
    for outcomes in cases:
        by_name = named(outcomes)
        without_s = min(by_name["gradient_allreduce"].p50, best_ddp(outcomes).p50)
        gains = [without_s / by_name[system].p50 for system in _RELAXATIONS]
        rows.append((_wire_over_compute(outcomes), outcomes[0].case, gains))
    rows.sort(key=lambda row: row[0])
    lines = ["## When not to use relaxations", ""]
    lines += [
        "Where compute hides the wire there is nothing to gain. Below are all cases with 4 hosts by how long float32",
        "gradients take on the wire, over compute, and how many times as fast a step is as under the best of",
        "`gradient_allreduce` and DDP, which may have cast to 16 bits. Models have a tenth of their size here, and so",
        "has the work of codecs: at full size and the same ratio a link is ten times as fast, and where a host cannot",
        "spare ten times `processor`, codecs stop paying at a higher ratio.",
        "",
    ]
    cells = [["wire / compute", "model", "Mbit/s", *_RELAXATIONS]]
    cells += [
        [f"{ratio:.2f}", case.profile, str(case.rate_mbit), *(f"{gain:.2f}" for gain in gains)]
        for ratio, case, gains in rows
    ]
    lines += [*report.aligned(cells), ""]
    for place, system in enumerate(_RELAXATIONS):
        lines.append(verdict(system, [(ratio, gains[place]) for ratio, _, gains in rows]))
    return [*lines, "", "Where none of them pays, take `gradient_allreduce`, which rounds as float32 does."]


def verdict(system: str, gains: Sequence[tuple[float, float]]) -> str:
    """Where it pays always, where never and where it depends, from pairs (wire over compute, its gain)."""
    at_least = f"- `{system}` makes a step at least {_PAYS_FROM - 1:.0%} faster in"
    pays = {ratio: gain >= _PAYS_FROM for ratio, gain in sorted(gains)}
    if len(set(pays.values())) == 1:
        return f"{at_least} {'all' if all(pays.values()) else 'none'} of them."
    last_idle = max(ratio for ratio, pay in pays.items() if not pay)
    first_paying = min(ratio for ratio, pay in pays.items() if pay)
    if last_idle == max(pays):
        return f"{at_least} none below a ratio of {first_paying:.2f}; from there on it depends on the model."
    if last_idle < first_paying:
        return f"{at_least} all cases from a ratio of {first_paying:.2f} on and in none up to {last_idle:.2f}."
    between = "between the two it depends on the model"
    return f"{at_least} all cases above a ratio of {last_idle:.2f} and in none below {first_paying:.2f}; {between}."
