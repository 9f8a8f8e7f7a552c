"""What performance.py writes: docs/performance.md, its tables and its plots."""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import report
from replay import Case, Outcome, bars_of, is_ddp
from replay_systems import ALONE

from bagua.profiles import Profile

DOCUMENT = report.ROOT / "docs" / "performance.md"
_PLOTTED = ("ddp", "ddp_fp16", "gradient_allreduce", "bytegrad", "qsgd:bits=4", "decentralized", "local_sgd", "async")
_PAYS_FROM = 1.05  # of a relaxation that sends the same steps faster
_INTRODUCTION = """\
# Performance

What would each algorithm do for a model on a network? Measured by playing models on hosts with shaped links, under
torch DDP on gloo (float32, its fp16 hook, a cast to bf16) and under every algorithm of bagua. Tensors, buckets and
communication are real, compute is a sleep that lasts as long as the model's profile says. Everything here is written
by one command:

```sh
sudo .venv/bin/python benchmarks/performance.py
```

`benchmarks/replay.py` plays one case, and your own model: `bagua bench record` measures its profile.

## How to read it

Where the scale is 0.1, tensors have a tenth of the model's size: for the wire, a link of 1 Gbit/s stands for 10 Gbit/s,
and so on. The processor's work, of codecs and copies, shrinks with the tensors too, while all hosts share the two cores
of one machine: where links are fast, what is seen is the processor more than the network, and neither a real host's.
One case is played at full size. How long compute takes is assumed: a profile names the device that its times are of.

DDP and bagua play as they come, with buckets of at most 25 MiB. Of a tenth of a model these are few, so some systems
play with a tenth of the cap too (`bucket_cap_mb=2.5`, `bucket_bytes=2621440`); "the best DDP" is the best of all that
a table has, and the bars are set beside DDP as it comes.

- **step**: median time of a training step of the slowest rank; of `async` a sample is a round of averaging.
- **spread**: largest less smallest sample, in parts of the median; the median of all systems.
- **exposed**: step less compute alone, which is the time that communication costs; of `qadam`, Adam's too.
- **wire**: bytes that a host's link carries per step, headers and acknowledgements included.
- **bound**: what no implementation can beat that sends these bytes: none leaves before its gradient is ready, the
  link is a token bucket of its rate (it was idle, so 512 KiB pass at once), compute takes what it takes. Algorithms
  that exchange weights may do so during the whole step (`decentralized`, `async`) or must wait (`local_sgd`,
  `low_precision_decentralized`).

A relaxation changes what is computed, too: [convergence](convergence.md) says what it costs in steps. `async` and
`local_sgd` exchange less often than once per step. `qadam` steps with Adam on the processor, the others with an
optimizer that does nothing, as on an accelerator.
"""


def write_document(
    outcomes: Mapping[Case, Sequence[Outcome]],
    studies: Sequence[Sequence[Outcome]],
    facts: Mapping[str, Any],
    folder: Path,
) -> None:
    """Writes the document, and the plots into ``folder``; ``studies`` are those of ablation.py."""
    folder.mkdir(parents=True, exist_ok=True)
    date = facts["date"].split()[0]
    lines = [_INTRODUCTION, *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["## The bars that this project has set itself", ""]
    lines += _command(
        "--profiles vgg16 bert_large --scale 0.1 --turns 2", "--profiles resnet50 --scale 0.1 --rates 5000 --turns 2"
    )
    lines += [line for case in outcomes for line in bars_of(outcomes[case])]
    by_profile: dict[str, list[Case]] = {}
    for case in outcomes:
        if (case.num_hosts, case.ranks_per_host) == (4, 1):
            by_profile.setdefault(case.profile, []).append(case)
    for profile, cases in by_profile.items():
        path = folder / f"{date}-performance-{profile}.png"
        plot(profile, [outcomes[case] for case in cases]).savefig(path, dpi=110, bbox_inches="tight")
        link = os.path.relpath(path, DOCUMENT.parent)
        rates = " ".join(str(case.rate_mbit) for case in cases)
        lines += ["", f"## {profile}: 4 hosts, a tenth of its size", "", f"![{profile}]({link})", ""]
        lines += _command(f"--profiles {profile} --scale 0.1 --rates {rates}")
        lines += [f"The profile: {Profile.load(cases[0].path).source}.", ""]
        lines += _table_of_rates([outcomes[case] for case in cases])
    others = [case for case in outcomes if (case.num_hosts, case.ranks_per_host) != (4, 1)]
    if others:
        lines += ["", "## Other numbers of hosts, hosts with two ranks, full size", ""]
        lines += _command(
            "--profiles vgg16 --scale 0.1 --hosts 2 8",
            "--profiles vgg16 --scale 0.1 --hosts 2 --ranks-per-host 2 --rates 1000 5000 --systems ddp ddp_fp16 "
            "bytegrad:hierarchical=True ...",
            "--profiles vgg16 --hosts 2",
        )
        for case in others:
            lines += ["", f"**{case}**", "", *_table_of_case(outcomes[case])]
    lines += ["", *_parts(studies)]
    lines += ["", *_when([outcome for cases in by_profile.values() for case in cases for outcome in [outcomes[case]]])]
    DOCUMENT.write_text("\n".join(lines).rstrip() + "\n")
    print(f"written: {DOCUMENT}, {datetime.now():%H:%M}")


def _command(*options: str) -> list[str]:
    return ["```sh", *(f"sudo .venv/bin/python benchmarks/replay.py {line}" for line in options), "```", ""]


def best_ddp(outcomes: Sequence[Outcome]) -> Outcome:
    """The fastest of DDP's variants."""
    return min((one for one in outcomes if is_ddp(one)), key=lambda one: one.p50)


def _named(outcomes: Sequence[Outcome]) -> dict[str, Outcome]:
    return {outcome.system: outcome for outcome in outcomes}


def _table_of_rates(cases: Sequence[Sequence[Outcome]]) -> list[str]:
    """Systems down, rates across: milliseconds per step, and how many times as fast as the best DDP."""
    head = [
        "step, ms (times as fast as the best DDP)",
        *(f"{one[0].case.rate_mbit} Mbit/s" for one in cases),
        "wire MB",
    ]
    rows = [head]
    for system in dict.fromkeys(one.system for outcomes in cases for one in outcomes):
        cells = []
        for outcomes in cases:
            outcome = _named(outcomes).get(system)
            if outcome is None:
                cells.append("")
                continue
            ratio = "" if system == ALONE else f" ({best_ddp(outcomes).p50 / outcome.p50:.2f})"
            cells.append(f"{report.three_digits(outcome.p50 * 1e3)}{ratio}")
        wire = next(_named(outcomes)[system].wire_bytes for outcomes in reversed(cases) if system in _named(outcomes))
        rows.append([system, *cells, "" if system == ALONE else report.three_digits(wire / 1e6)])
    rows.append(["spread", *(f"{_spread(outcomes):.1%}" for outcomes in cases), ""])
    return report.aligned(rows)


def _spread(outcomes: Sequence[Outcome]) -> float:
    return statistics.median((max(one.step_s) - min(one.step_s)) / one.p50 for one in outcomes)


def _table_of_case(outcomes: Sequence[Outcome]) -> list[str]:
    rows = [["system", "step ms", "to best DDP", "exposed ms", "wire MB", "bound ms", "of bound"]]
    for one in outcomes:
        rows.append(
            [
                one.system,
                report.three_digits(one.p50 * 1e3),
                "" if one.system == ALONE else f"{best_ddp(outcomes).p50 / one.p50:.2f}",
                report.three_digits(max(0.0, one.p50 - one.compute_s) * 1e3),
                report.three_digits(one.wire_bytes / 1e6),
                report.three_digits(one.bound_s * 1e3),
                f"{one.p50 / one.bound_s:.2f}",
            ]
        )
    return report.aligned(rows)


def _parts(studies: Sequence[Sequence[Outcome]]) -> list[str]:
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
    ]
    for outcomes in studies:
        whole = outcomes[1]
        rows = [["", "step ms", "to the whole", "exposed ms", "wire MB"]]
        for one in outcomes[1:]:
            rows.append(
                [
                    one.system,
                    report.three_digits(one.p50 * 1e3),
                    "" if one is whole else f"{one.p50 / whole.p50:.2f}",
                    report.three_digits(max(0.0, one.p50 - one.compute_s) * 1e3),
                    report.three_digits(one.wire_bytes / 1e6),
                ]
            )
        lines += ["", f"**{whole.case}**", "", *report.aligned(rows)]
    return lines


def _when(cases: Sequence[Sequence[Outcome]]) -> list[str]:
    """At which ratio of wire to compute relaxations stop paying, from the cases themselves."""
    rows = []
    for outcomes in cases:
        named = _named(outcomes)
        full = named["gradient_allreduce"]
        wire_s = full.wire_bytes * 8 / (full.case.rate_mbit * 1e6)
        gains = [full.p50 / named[system].p50 for system in ("bytegrad", "qsgd:bits=4")]
        rows.append((wire_s / full.compute_s, full.case, gains))
    rows.sort(key=lambda row: row[0])
    lines = ["## When not to use relaxations", ""]
    lines += [
        "Whether fewer bytes help is decided by one number: how long the float32 gradients take on the wire, seen from",
        "compute. Below are all cases with 4 hosts by that ratio, and how many times as fast as `gradient_allreduce` a",
        "step is with fewer bits.",
        "",
    ]
    cells = [["wire / compute", "model", "Mbit/s", "bytegrad", "qsgd:bits=4"]]
    cells += [
        [f"{ratio:.2f}", case.profile, str(case.rate_mbit), *(f"{gain:.2f}" for gain in gains)]
        for ratio, case, gains in rows
    ]
    return [*lines, *report.aligned(cells), "", *verdict([(ratio, gains[0]) for ratio, _, gains in rows])]


def verdict(gains: Sequence[tuple[float, float]]) -> list[str]:
    """Where bytegrad pays always, where never and where it depends, from pairs (wire over compute, its gain)."""
    at_least = f"`bytegrad` makes a step at least {_PAYS_FROM - 1:.0%} faster in"
    pays = {ratio: gain >= _PAYS_FROM for ratio, gain in sorted(gains)}
    if len(set(pays.values())) == 1:
        return [f"{at_least} {'all' if all(pays.values()) else 'none'} of them."]
    last_idle = max(ratio for ratio, pay in pays.items() if not pay)
    first_paying = min(ratio for ratio, pay in pays.items() if pay)
    lines = [f"{at_least} all cases above a ratio of {last_idle:.2f},", f"and in none below {first_paying:.2f}."]
    if first_paying < last_idle:
        lines.append("Between the two it depends on the model: on how much of it becomes ready late in backward.")
    lines.append("Where it does not pay, take `gradient_allreduce`, which rounds as float32 does.")
    return lines


def plot(profile: str, cases: Sequence[Sequence[Outcome]]) -> Any:
    """Step and exposed communication by bandwidth, with bounds, and bytes on the wire."""
    figure, (steps, exposed, wire) = report.subplots(3)
    rates = [outcomes[0].case.rate_mbit for outcomes in cases]
    for number, system in enumerate(_PLOTTED):
        of_rates = [_named(outcomes)[system] for outcomes in cases]
        color = f"C{number}"
        steps.plot(rates, [one.p50 * 1e3 for one in of_rates], "o-", color=color, label=system, markersize=4)
        steps.plot(rates, [one.bound_s * 1e3 for one in of_rates], ":", color=color, linewidth=1)
        waits = [max(0.1, (one.p50 - one.compute_s) * 1e3) for one in of_rates]
        exposed.plot(rates, waits, "o-", color=color, markersize=4)
        wire.barh(system, of_rates[-1].wire_bytes / 1e6, color=color)
    steps.axhline(cases[0][0].compute_s * 1e3, color="0.5", linewidth=1, label=ALONE)
    for axis, title in ((steps, f"{profile}: step, dotted: its bound"), (exposed, "of it exposed communication")):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xticks(rates, [str(rate) for rate in rates])
        axis.set_xlabel("Mbit/s of each host's link")
        axis.set_ylabel("ms")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    steps.legend(fontsize=7)
    wire.invert_yaxis()
    wire.set_title("bytes on the wire")
    wire.set_xlabel("MB per step and host")
    figure.tight_layout()
    return figure
