"""All of docs/performance.md: every algorithm beside torch DDP, for four models, on slow and fast networks.

Runs the cases of replay.py and the studies of ablation.py that are not in `--keep` yet (about an hour; needs root),
then writes the tables and plots. Run it while nothing else does.

    sudo .venv/bin/python benchmarks/performance.py [--keep benchmarks/results/performance.jsonl] [--quick]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import ranks
import report
from ablation import STUDIES, study
from performance_report import write_document
from replay import BARS, HIDDEN, SYSTEMS, Case, Outcome, add_case, keep, run
from replay_systems import ALONE, measure

PROFILES = ("vgg16", "bert_large", "gpt_124m", "resnet50")
RATES = (100, 250, 500, 1000, 2500, 5000)  # Mbit/s
KEPT = report.ROOT / "benchmarks" / "results" / "performance.jsonl"
_SCALE = 0.1
_NODES = tuple(
    f"{system}{',' if ':' in system else ':'}hierarchical={value}"
    for system in ("gradient_allreduce", "bytegrad", "qsgd:bits=4")
    for value in (False, True)
)
CASES: dict[Case, tuple[str, ...]] = {
    **{Case(profile, _SCALE, 4, 1, rate): SYSTEMS for profile in PROFILES for rate in RATES},
    **{Case("vgg16", _SCALE, num_hosts, 1, 1000): SYSTEMS for num_hosts in (2, 8)},
    **{Case("vgg16", _SCALE, 2, 2, rate): ("ddp", "ddp_fp16", *_NODES) for rate in (1000, 5000)},
}
_OF_BARS = [*(Case(profile, _SCALE, 4, 1, 1000) for profile, _ in BARS), Case(HIDDEN[0], _SCALE, 4, 1, HIDDEN[1])]
_TURNS_OF_BARS = 3


class _Kept:
    """The file of outcomes: a line of facts, then one for each system of each case.

    Outcomes of studies follow one another, compute alone first; their case says nothing about where they begin.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_text(json.dumps({**report.facts(), "command": "python benchmarks/performance.py"}) + "\n")

    def facts(self) -> dict[str, Any]:
        return json.loads(self.path.read_text().splitlines()[0])

    def outcomes(self) -> dict[Case, list[Outcome]]:
        found: dict[Case, list[Outcome]] = {}
        for outcome in self._all():
            found.setdefault(outcome.case, []).append(outcome)
        return found

    def studies(self) -> list[list[Outcome]]:
        found: list[list[Outcome]] = []
        for outcome in self._all():
            if outcome.system == ALONE:
                found.append([])
            found[-1].append(outcome)
        return found

    def _all(self) -> Iterator[Outcome]:
        for line in self.path.read_text().splitlines()[1:]:
            content = json.loads(line)
            yield Outcome(**{**content, "case": Case(**content["case"])})


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--keep", type=Path, default=KEPT, help="a file of what has been measured, to go on from")
    args = parser.parse_args()
    reason = hosts.why_not()
    if reason is not None:
        print(f"performance SKIPPED: {reason}.")
        return
    if args.quick:
        case, systems = next(reversed(CASES.items()))
        result = report.Report(__file__, "one case of it", args)
        add_case(result, run(case, systems, 2))
        return
    kept = _Kept(args.keep)
    for case, systems in CASES.items():
        if case not in kept.outcomes():
            print(f"{case} ...", flush=True)
            keep(args.keep, run(case, systems, 7, _TURNS_OF_BARS if case in _OF_BARS else 1))
    parts = _Kept(args.keep.with_name("ablation.jsonl"))
    for case, algorithm, systems in STUDIES[len(parts.studies()) :]:
        print(f"{case}, parts of {algorithm} ...", flush=True)
        keep(parts.path, study(case, algorithm, systems, 7))
    facts = {**kept.facts(), **({"note": args.note} if args.note else {})}
    write_document(kept.outcomes(), parts.studies(), facts, args.out)


if __name__ == "__main__":
    ranks.main(measure, main)
