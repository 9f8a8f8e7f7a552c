"""Measures the gain of each part of the design: overlap, buckets, the hierarchy of nodes.

As in section 4.4 of the paper, one part at a time is switched off, on replayed models (`bagua bench replay`). Without
overlap, gradients are copied into their buckets, which are sent when backward has ended; without buckets, every tensor
is a message; without hierarchy, every rank exchanges with every other, on its host or not. Needs root.

    sudo .venv/bin/python -m benchmarks.replay.ablation [--quick]
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bagua.replay.cases import Case, Outcome
from bagua.replay.command import play
from bagua.replay.systems import ALONE
from benchmarks.lib import report

# Names of rows -> options; the first row is the whole design.
_PARTS = {"": "", ", without overlap": "overlap=False", ", without buckets": "bucket_bytes=1"}
_NODES = {", hierarchical": "hierarchical=True", ", without hierarchy": "hierarchical=False"}


@dataclass(frozen=True)
class Study:
    """A case with variants in which a part of the design is switched off."""

    case: Case
    algorithm: str
    has_nodes: bool = False

    def __str__(self) -> str:
        return f"{self.case}, {self.algorithm}"

    def systems(self) -> dict[str, str]:
        """Returns the names of rows by system."""
        parts = _NODES if self.has_nodes else _PARTS
        return {f"{self.algorithm}:{options}".rstrip(":"): self.algorithm + name for name, options in parts.items()}

    def run(self, samples: int) -> list[Outcome]:
        """Returns outcomes by row name: compute alone first, then the whole design."""
        names = self.systems()
        return [replace(one, system=names.get(one.system, one.system)) for one in play(self.case, list(names), samples)]


# Three cases: the wire takes longer than compute; tensors are many and small; two ranks share a link.
STUDIES = (
    Study(Case("vgg16", 0.1, 4, 1, 1000), "bytegrad"),
    Study(Case("bert_large", 0.1, 4, 1, 2500), "bytegrad"),
    Study(Case("resnet50", 0.1, 4, 1, 2500), "bytegrad"),
    Study(Case("vgg16", 0.1, 2, 2, 1000), "gradient_allreduce", has_nodes=True),
    Study(Case("vgg16", 0.1, 2, 2, 1000), "bytegrad", has_nodes=True),
)


def rows_of(outcomes: list[Outcome]) -> list[report.Row]:
    """Returns rows of the variants, compared with the whole design."""
    alone, whole, *others = outcomes
    baseline = report.Row(whole.system, whole.step_s, cells=_cells(whole))
    rows = [report.Row(alone.system, alone.step_s, cells=_cells(alone)), baseline]
    return rows + [report.Row(one.system, one.step_s, baseline, _cells(one)) for one in others]


def _cells(one: Outcome) -> dict[str, str]:
    cells = {"processor ms": report.three_digits(one.processor_s * 1e3)}
    if one.system != ALONE:
        cells["exposed ms"] = report.three_digits(one.exposed_s * 1e3)
        cells["wire MB"] = report.three_digits(one.wire_bytes / 1e6)
        cells["of bound"] = f"{one.p50 / one.bound_s:.2f}"
    return cells


def main() -> None:
    args = report.parser(__doc__).parse_args()
    report.need_hosts("ablation")
    result = report.Report(__file__, "overlap, buckets and hierarchy, each switched off", args)
    figure, axes = report.subplots(len(STUDIES))
    for axis, study in zip(axes, STUDIES, strict=True):
        rows = rows_of(study.run(3 if args.quick else 7))
        notes = ["ratio to baseline: how many times as long a step takes without that part."]
        result.add(report.Table(str(study), rows, ratio="relative", notes=notes))
        report.bars(axis, rows, str(study), "ms per step", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    main()
