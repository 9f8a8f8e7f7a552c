"""All of docs/performance.md: every algorithm beside torch DDP, for four models, on slow and fast networks.

Runs the cases of replay.py and the studies of ablation.py (more than an hour; needs root), then writes the tables and
plots. Run it while nothing else does. What has been measured is kept in a file, from which a run that was cut off goes
on, of the same commit on the same machine with nothing changed in between. `--quick` plays one case, and
writes it to the folder of the results.

    sudo .venv/bin/python benchmarks/performance.py [--keep build/performance.jsonl]
    sudo .venv/bin/python benchmarks/performance.py --quick
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hosts
import ranks
import report
from ablation import STUDIES
from performance_report import DOCUMENT, write_document
from replay import SYSTEMS, add_case, run, systems_of
from replay_cases import Case, Outcome
from replay_plots import bars
from replay_systems import DDP_HOOKS, measure

PROFILES = ("vgg16", "bert_large", "gpt_124m", "resnet50")
RATES = (100, 500, 1000, 2500, 5000)  # Mbit/s
_CROSSOVER = {"resnet50": (1500, 2000)}  # where a model begins to hide its communication
_SCALE = 0.1
_FAST_MBIT = 1000  # from here on it matters to bagua, too, how many buckets there are
_DDP_SHRUNK = "ddp_fp16:bucket_cap_mb=2.5"  # where links are slower the best DDP, or close to it
_NODES = tuple(
    f"{system}{',' if ':' in system else ':'}hierarchical={value}"
    for system in ("gradient_allreduce", "bytegrad", "qsgd:bits=4")
    for value in (False, True)
)
_OF_BARS = (*DDP_HOOKS, "gradient_allreduce", "bytegrad", "qsgd:bits=4")
CASES: dict[Case, tuple[str, ...]] = {
    **{
        Case(profile, _SCALE, 4, 1, rate): systems_of(_SCALE) if rate >= _FAST_MBIT else (*SYSTEMS, _DDP_SHRUNK)
        for profile in PROFILES
        for rate in sorted({*RATES, *_CROSSOVER.get(profile, ())})
    },
    **{Case("vgg16", _SCALE, num_hosts, 1, 1000): (*SYSTEMS, _DDP_SHRUNK) for num_hosts in (2, 8)},
    **{Case(profile, _SCALE, 2, 1, 5000): _OF_BARS for profile in ("vgg16", "resnet50")},  # a core for each host
    **{Case("vgg16", _SCALE, 2, 2, rate): (*DDP_HOOKS, _DDP_SHRUNK, *_NODES) for rate in (1000, 5000)},
    Case("vgg16", 1.0, 2, 1, 1000): SYSTEMS,
    Case("vgg16", 1.0, 2, 1, 10_000): _OF_BARS,  # what a tenth of its size stands for at 1 Gbit/s
    **{Case(profile, _SCALE, 4, 1, 1000, "cubic"): _OF_BARS for profile in ("vgg16", "bert_large")},
}
_SAMPLES = 7


class _Kept:
    """A file of what has been measured: a line of JSON for each case and study, with what it was taken on."""

    _SAME = ("machine", "versions", "commit", "TCP")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        for line in self._lines:
            self._check(line["facts"], _facts())

    def _check(self, kept: dict[str, Any], here: dict[str, Any]) -> None:
        different = next((name for name in self._SAME if kept[name] != here[name]), None)
        if different is not None:
            raise SystemExit(
                f"{self._path} has figures of another {different}, {kept[different]}; here it is {here[different]}. "
                "Delete the file, or give --keep another"
            )

    def facts(self) -> dict[str, Any]:
        """What all lines have in common, from when to when they were taken, and the loads that they began at."""
        of_lines = [line["facts"] for line in self._lines]
        dates = sorted(facts["date"] for facts in of_lines)
        loads = sorted(float(facts["load average"].split()[0]) for facts in of_lines)
        load = f"{of_lines[0]['load average']}; at most {loads[-1]} when a case began, right after another"
        return {**of_lines[0], "date": " to ".join(dict.fromkeys([dates[0], dates[-1]])), "load average": load}

    def get(self, name: str, measure_it: Callable[[], list[Outcome]]) -> list[Outcome]:
        """What is kept under a name, measured now if nothing is."""
        line = next((line for line in self._lines if line["name"] == name), None)
        if line is None:
            print(f"{name} ...", flush=True)
            facts = _facts()
            line = {"name": name, "facts": facts, "outcomes": [asdict(outcome) for outcome in measure_it()]}
            self._check(facts, _facts())  # ranks read the program anew for every case
            self._check((self._lines or [line])[0]["facts"], facts)
            self._lines.append(line)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        return [Outcome(**{**fields, "case": Case(**fields["case"])}) for fields in line["outcomes"]]


def _facts() -> dict[str, Any]:
    facts = report.facts()
    facts["machine"], _, load = facts["machine"].partition(", load average ")
    congestion = f"the system's congestion control is {hosts.system_congestion()}"
    return {**facts, "load average": load, "TCP": congestion, "command": "python benchmarks/performance.py"}


def _arguments() -> argparse.Namespace:
    """The options, after what is wrong with them was said."""
    parser = report.parser(__doc__)
    parser.add_argument("--keep", type=Path, help="what has been measured, to go on from; build/performance.jsonl")
    parser.add_argument("--document", type=Path, help="what is written; docs/performance.md")
    args = parser.parse_args()
    for option, default in (("keep", report.ROOT / "build" / "performance.jsonl"), ("document", DOCUMENT)):
        path = getattr(args, option)
        if args.quick and path is not None:
            parser.error(
                f"--{option} is {path}, but --quick plays one case for the folder --out; leave out one of them"
            )
        path = path or default
        parser.check_folder(f"--{option}", path, path.parent)
        if path.is_dir():
            parser.error(f"--{option} is the folder {path}; expected a file")
        setattr(args, option, path)
    hosts.need("performance")
    missing = {case.congestion for case in CASES if case.congestion} - set(hosts.available_congestions())
    if missing:
        parser.error(f"this kernel has no congestion control {', '.join(missing)}; `modprobe tcp_NAME` may bring it")
    return args


def main() -> None:
    args = _arguments()
    if args.quick:
        case = Case("vgg16", _SCALE, 2, 2, 5000)
        result = report.Report(__file__, "one case of it", args, subject="quick")
        outcomes = run(case, CASES[case], 3)
        add_case(result, outcomes)
        result.write(bars([outcomes]))
        return
    kept = _Kept(args.keep)
    cases = {}
    for case, systems in CASES.items():
        cases[case] = kept.get(str(case), lambda case=case, systems=systems: run(case, systems, _SAMPLES))
    studies = {study: kept.get(str(study), lambda study=study: study.run(_SAMPLES)) for study in STUDIES}
    facts = {**kept.facts(), **({"note": args.note} if args.note else {})}
    write_document(cases, studies, facts, args.document, args.out)


if __name__ == "__main__":
    ranks.main(measure, main)
