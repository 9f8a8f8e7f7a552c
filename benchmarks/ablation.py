"""What does each part of the design give: overlap, buckets, the hierarchy of nodes?

As in section 4.4 of the paper one of them is switched off at a time, on replayed models (replay.py). Without overlap
gradients are copied into their buckets, which leave when backward has ended; without buckets every tensor is a message;
without hierarchy every rank exchanges with every other, on its own host or not.

    sudo .venv/bin/python benchmarks/ablation.py [--quick]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import hosts
import ranks
import report
from replay import run
from replay_cases import Case, Outcome, cells_of
from replay_systems import ALONE, measure

_MATTERS = 1.1  # times as long without a part

# What a row is called -> the system; the first row of a study is the whole design.
_PARTS = {
    "{0}": "{0}",
    "{0}, without overlap": "{0}:overlap=False",
    "{0}, without buckets": "{0}:bucket_bytes=1",
}
_NODES = {"{0}, hierarchical": "{0}:hierarchical=True", "{0}, without hierarchy": "{0}:hierarchical=False"}


@dataclass(frozen=True)
class Study:
    """A case in which parts of the design are switched off; `matter` has those that it is about, as in their rows."""

    case: Case
    algorithm: str
    matter: tuple[str, ...]
    parts: Mapping[str, str] = field(default_factory=lambda: _PARTS, hash=False)

    def __str__(self) -> str:
        return f"{self.case}, {self.algorithm}"

    def run(self, samples: int) -> list[Outcome]:
        """Outcomes by the names of the rows; compute alone first, then the whole."""
        rows = {system.format(self.algorithm): name.format(self.algorithm) for name, system in self.parts.items()}
        outcomes = run(self.case, list(rows), samples)
        return [replace(outcome, system=rows.get(outcome.system, outcome.system)) for outcome in outcomes]

    def findings(self, outcomes: Sequence[Outcome]) -> list[str]:
        """Whether the parts that it is about matter; one line each."""
        whole = outcomes[1]
        lines = []
        for part in self.matter:
            one = next(one for one in outcomes if one.system.endswith(part))
            ratio = one.p50 / whole.p50
            result = "it matters" if ratio >= _MATTERS else f"LESS THAN EXPECTED ({_MATTERS})"
            lines.append(f"- {self}, {part}: a step takes {ratio:.2f} times as long: {result}")
        return lines


# Where the wire takes longer than compute; where tensors are many and small; where two ranks share a link.
STUDIES = (
    Study(Case("vgg16", 0.1, 4, 1, 1000), "bytegrad", ("without overlap",)),
    Study(Case("bert_large", 0.1, 4, 1, 2500), "bytegrad", ("without overlap", "without buckets")),
    Study(Case("resnet50", 0.1, 4, 1, 2500), "bytegrad", ("without overlap", "without buckets")),
    Study(Case("vgg16", 0.1, 2, 2, 1000), "gradient_allreduce", ("without hierarchy",), _NODES),
    Study(Case("vgg16", 0.1, 2, 2, 1000), "bytegrad", ("without hierarchy",), _NODES),
)


def rows_of(outcomes: list[Outcome]) -> list[report.Row]:
    """Each part's absence compared to the whole."""
    whole = next(outcome for outcome in outcomes if outcome.system != ALONE)
    rows = []
    for outcome in outcomes:
        rows.append(report.Row(outcome.system, outcome.step_s, cells=cells_of(outcome)))
        if outcome.system not in (ALONE, whole.system):
            rows[-1].baseline = report.Row(whole.system, whole.step_s)
    return rows


def main() -> None:
    args = report.parser(__doc__).parse_args()
    hosts.need("ablation")
    result = report.Report(__file__, "overlap, buckets and hierarchy, each switched off", args)
    studies = []
    for study in STUDIES:
        outcomes = study.run(3 if args.quick else 7)
        rows = rows_of(outcomes)
        notes = ["ratio to baseline: how many times as long a step takes without that part."]
        result.add(report.Table(str(study), rows, ratio="relative", notes=notes))
        result.say(*study.findings(outcomes))
        studies.append((study.case, rows))
    figure, axes = report.subplots(len(studies))
    for axis, (case, rows) in zip(axes, studies, strict=True):
        report.bars(axis, rows, str(case), "ms per step", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
