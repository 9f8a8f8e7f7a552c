"""What does each part of the design give: overlap, buckets, the hierarchy of nodes?

As in section 4.4 of the paper one of them is switched off at a time, on replayed models (replay.py). Without overlap
gradients are copied into their buckets, which leave when backward has ended; without buckets every tensor is a message;
without hierarchy every rank exchanges with every other, on its own host or not.

    sudo .venv/bin/python benchmarks/ablation.py [--quick]
"""

from __future__ import annotations

from dataclasses import replace

import hosts
import ranks
import report
from replay import Case, Outcome, run
from replay_systems import ALONE, measure

# What a row is called -> the system; the first row of a study is the whole design.
_PARTS = {
    "{0}": "{0}",
    "{0}, without overlap": "{0}:overlap=False",
    "{0}, without buckets": "{0}:bucket_bytes=1",
}
_NODES = {"{0}, hierarchical": "{0}:hierarchical=True", "{0}, without hierarchy": "{0}:hierarchical=False"}
# Where compute and wire take about as long; where tensors are many and small; where two ranks share a link.
STUDIES = (
    (Case("vgg16", 0.1, 4, 1, 1000), "bytegrad", _PARTS),
    (Case("bert_large", 0.1, 4, 1, 2500), "bytegrad", _PARTS),
    (Case("resnet50", 0.1, 4, 1, 2500), "bytegrad", _PARTS),
    (Case("vgg16", 0.1, 2, 2, 1000), "gradient_allreduce", _NODES),
    (Case("vgg16", 0.1, 2, 2, 1000), "bytegrad", _NODES),
)


def study(case: Case, algorithm: str, parts: dict[str, str], samples: int) -> list[Outcome]:
    """Outcomes by the names of the rows; compute alone first."""
    rows = {system.format(algorithm): name.format(algorithm) for name, system in parts.items()}
    outcomes = run(case, list(rows), samples)
    return [replace(outcome, system=rows.get(outcome.system, outcome.system)) for outcome in outcomes]


def rows_of(outcomes: list[Outcome]) -> list[report.Row]:
    """Each part's absence compared to the whole."""
    whole = next(outcome for outcome in outcomes if outcome.system != ALONE)
    rows = []
    for outcome in outcomes:
        cells = {
            "exposed ms": report.three_digits(max(0.0, outcome.p50 - outcome.compute_s) * 1e3),
            "wire MB": report.three_digits(outcome.wire_bytes / 1e6),
        }
        rows.append(report.Row(outcome.system, outcome.step_s, cells={} if outcome.system == ALONE else cells))
        if outcome.system not in (ALONE, whole.system):
            rows[-1].baseline = report.Row(whole.system, whole.step_s)
    return rows


def main() -> None:
    args = report.parser(__doc__).parse_args()
    reason = hosts.why_not()
    if reason is not None:
        print(f"ablation SKIPPED: {reason}.")
        return
    result = report.Report(__file__, "overlap, buckets and hierarchy, each switched off", args)
    studies = []
    for case, algorithm, parts in STUDIES:
        outcomes = study(case, algorithm, parts, 3 if args.quick else 7)
        rows = rows_of(outcomes)
        notes = ["ratio to baseline: how many times as long a step takes without that part."]
        result.add(report.Table(f"{case}, {algorithm}", rows, ratio="relative", notes=notes))
        studies.append((case, rows))
    figure, axes = report.subplots(len(studies))
    for axis, (case, rows) in zip(axes, studies, strict=True):
        report.bars(axis, rows, str(case), "ms per step", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
