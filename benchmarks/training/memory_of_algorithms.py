"""Measures the memory that each algorithm adds to plain training, and compares it with the declared amount.

Every registered algorithm runs with its defaults, and with error feedback if it has that, and is compared with the same
steps without bagua; the optimizer is SGD with momentum, or QAdam with two steps of warm-up. All run in one world, one
after the other, so that memory of the process and the group exists before the first. The layers are used last to first,
which a wrapper does not expect, so that buckets are planned anew after the first step. Buckets are small, because an
algorithm's memory per bucket is negligible in a large model. Numbers are in units of the gradient bytes G, measured as
in memory.py; a peak shorter than 20 ms or so may be missed.

    .venv/bin/python -m benchmarks.training.memory_of_algorithms [--ranks 4] [--megabytes 34] [--steps 6] [--quick]

docs/memory.md has the table and explains its columns.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

from benchmarks.lib import ranks, report
from benchmarks.training.memory import CODED, PLAIN, measure, run

_BUCKET_BYTES = 2 * 1024 * 1024
_NOTEWORTHY = 0.1  # in G; a peak is reported if it is this much above the kept memory


@dataclass(frozen=True)
class Case:
    """A case: an algorithm with options, compared with the same training without it."""

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def unnamed_options(self) -> dict[str, Any]:
        """Options without which a few steps would not show its memory: an exchange in each, and a codec that loses."""
        import bagua

        fields = {one.name: one.default for one in fields_of(bagua.algorithms.get(self.algorithm))}
        needs_codec = self.options.get("error_feedback") and fields.get("codec") == ""
        return ({"sync_every": 1} if "sync_every" in fields else {}) | (
            {"codec": "minmax_uint8"} if needs_codec else {}
        )

    @property
    def momentum(self) -> float | None:
        """The argument of `measure_one` that selects the optimizer."""
        import bagua

        return None if bagua.algorithms.get(self.algorithm).optimizer_class is bagua.optim.QAdam else 0.9

    def __str__(self) -> str:
        return ", ".join([f"`{self.algorithm}`", *(f"`{name}={value!r}`" for name, value in self.options.items())])


@dataclass(frozen=True)
class Extra:
    """The memory of a case beyond plain training, in units of G.

    Attributes:
        kept: the memory at the end of the last step.
        peak: the memory at the highest reading.
        peak_in: the phase of the peak, "" if it equals the kept memory.
    """

    case: Case
    kept: float
    peak: float
    peak_in: str

    @property
    def declared(self) -> str:
        import bagua

        about = bagua.algorithms.get(self.case.algorithm).about
        return about.memory if about is not None else ""


def cases(is_quick: bool) -> list[Case]:
    """Returns every algorithm with its defaults, and with error feedback if it has that."""
    import bagua

    found = []
    for name in bagua.algorithms.available():
        found.append(Case(name))
        cls = bagua.algorithms.get(name)
        if hasattr(cls, "error_feedback") and not is_quick:
            states = ("bfloat16",) if cls.error_feedback else ("float32", "bfloat16")  # float32 is its default then
            found += [Case(name, {"error_feedback": True, "state_dtype": state}) for state in states]
    return found


def measure_all(args: argparse.Namespace) -> list[Extra]:
    """Measures all cases in one world."""
    model = {"width": 512, "is_reversed": True}
    chosen = cases(args.quick)
    first = {"way": CODED, "options": {"error_feedback": True}, **model}  # not counted
    plain = [{"way": PLAIN, "momentum": momentum, **model} for momentum in (0.9, None)]
    wrapped = [
        {
            "way": case.algorithm,
            "momentum": case.momentum,
            "options": {"bucket_bytes": _BUCKET_BYTES, **case.unnamed_options, **case.options},
            **model,
        }
        for case in chosen
    ]
    _, with_sgd, with_qadam, *results = run(args, [first, *plain, *wrapped])
    extras = []
    for case, result in zip(chosen, results, strict=True):
        plainly = with_qadam if case.momentum is None else with_sgd
        kept, peak = ((result[key] - plainly[key]) / result["gradient_bytes"] for key in ("steady", "peak"))
        is_higher = peak > kept + _NOTEWORTHY
        extras.append(Extra(case, kept, peak, max(result["peaks"], key=result["peaks"].get) if is_higher else ""))
    return extras


def lines_of(extras: list[Extra], args: argparse.Namespace) -> list[str]:
    """Returns the table, with notes."""
    lines = ["| algorithm | declared | kept | peak | peak in |", "| --- | --- | ---: | ---: | --- |"]
    for extra in extras:
        kept, peak = (f"{value + 0.0:.2f} G".replace("-0.00", "0.00") for value in (extra.kept, extra.peak))
        lines.append(f"| {extra.case} | {extra.declared} | {kept} | {peak} | {extra.peak_in} |")
    residuals, bucket = 2 * (1 + 1 / args.ranks), _BUCKET_BYTES / (args.megabytes * 1e6)
    lines += ["", f"n is {args.ranks}: 2 (1 + 1/n) G is {residuals:.2f} G, half of it {residuals / 2:.2f} G."]
    lines += [f"G is {args.megabytes:g} MB, and a bucket at most {bucket:.2f} G."]
    return lines


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megabytes", type=float, default=34, help="of gradients")
    parser.add_argument("--steps", type=int, default=6)
    parser.set_defaults(tcp=False)
    args = parser.parse_args()
    result = report.Report(__file__, "what each algorithm adds to plain training", args)
    extras = measure_all(args)
    lines = lines_of(extras, args)
    result.say(*lines)
    figure, axes = report.subplots(1)
    rows = [report.Row(str(extra.case).replace("`", ""), [extra.peak]) for extra in extras]
    report.bars(axes[0], rows, "peak beyond plain training", "G", 1.0)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
