"""Compares the convergence of bagua's algorithms with that of torch DDP.

Every algorithm and its variants of interest train the CNN of examples/digits.py and the transformer of
examples/byte_lm.py on 4 ranks of this host, with 3 seeds, and DDP over gloo does the same in the same processes.
docs/convergence.md explains the tables, and the rows that are outside the range of DDP's seeds.

    .venv/bin/python -m benchmarks.training.convergence                                   # all of it
    .venv/bin/python -m benchmarks.training.convergence --tasks digits --algorithms qsgd  # a part: writes nothing

New algorithms are included automatically, with their defaults. Finished trainings are kept in the file of `--keep`; the
same command resumes from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.lib import ranks, report
from benchmarks.training import convergence_tasks
from benchmarks.training.convergence_report import Result, plot, table
from benchmarks.training.convergence_tasks import DDP, TASKS, Setup

RANKS = 4
SEEDS = (0, 1, 2)
_OPTIMIZERS = {
    "qadam": "qadam",
    "zero_one_adam": "qadam",
}  # optimizers of algorithms that need their own; the others step with SGD
_ONEBIT = {"codec": "onebit", "error_feedback": True}
# Variants by algorithm, in addition to its defaults: its options, and those of Setup. Unknown codecs are skipped.
_VARIANTS: Mapping[str, Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {
    "bytegrad": [
        (_ONEBIT, {}),
        (_ONEBIT, {"warmup": 0.2, "length": 2}),
        ({"codec": "topk", "error_feedback": True}, {}),
        ({"codec": "topk:k=256", "error_feedback": True}, {"warmup": 0.2}),
    ],
    "qsgd": [
        ({"bits": 4}, {}),
        ({"bits": 4, "error_feedback": True}, {}),
        ({"bits": 2}, {}),
        ({"bits": 2}, {"warmup": 0.2}),
    ],
    "powersgd": [({"rank": 1}, {}), ({"error_feedback": False}, {})],
    "qadam": [
        ({}, {"warmup": 0.2}),
        ({"codec": "onebit"}, {"warmup": 0.2}),
        ({"codec": "onebit"}, {"warmup": 0.5}),
        ({"codec": "onebit", "variance_floor": 0.0}, {"warmup": 0.2}),
    ],
    "zero_one_adam": [
        ({"max_interval": 1}, {"warmup": 0.2}),
        ({"interval_doubling": 20}, {"warmup": 0.2}),
        ({"refresh_doubling": 16, "max_interval": 1}, {"warmup": 0.5}),
    ],
    "decentralized": [
        ({"topology": "ring"}, {}),
        ({"topology": "shift_one"}, {}),
        ({"topology": "exponential"}, {}),
    ],
    "low_precision_decentralized": [({"codec": "qsgd:bits=4"}, {})],
    "async_averaging": [({"sync_interval": 0.02}, {})],
    "local_sgd": [
        ({"sync_every": 16}, {}),
        ({"sync_every": 16}, {"warmup": 0.2}),
    ],
}


def cases() -> dict[str, Setup]:
    """Returns every way of training by the name of its row."""
    import bagua

    setups = [Setup(DDP, "sgd", {}), Setup(DDP, "adam", {})]
    for name in bagua.algorithms.available():
        optimizer = _OPTIMIZERS.get(name, "sgd")
        for options, more in [({}, {}), *_VARIANTS.get(name, ())]:
            setups.append(Setup(name, optimizer, options, **more))
    known = {*bagua.codecs.available(), ""}
    return {_name(one): one for one in setups if one.options.get("codec", "").split(":")[0] in known}


def _name(setup: Setup) -> str:
    """Returns a row's name, such as "qsgd bits=4, warm-up 20 %, lr x 0.5"; DDP's has the optimizer."""
    words = [f"{option}={value}" for option, value in setup.options.items()]
    words += [f"warm-up {100 * setup.warmup:.0f} %"] if setup.warmup is not None else []
    words += [f"lr x {setup.lr_factor:g}"] if setup.lr_factor != 1 else []
    words += [f"epochs x {setup.length}"] if setup.length != 1 else []
    if setup.algorithm == DDP:
        words.insert(0, {"sgd": "SGD", "adam": "Adam"}[setup.optimizer])
    return f"{setup.algorithm} {', '.join(words)}".rstrip()


def measure(jobs: list[list[Any]], path: str) -> None:
    """Trains every (task, case, seed) on a rank; rank 0 appends a line for each to the file at `path`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    data: dict[str, convergence_tasks.Data] = {}
    for task_name, case, seed in jobs:
        task = TASKS[task_name]
        if task_name not in data:
            data[task_name] = task.load(task)
        mine = convergence_tasks.train(task, data[task_name], cases()[case], seed)
        of_all: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_all, mine)
        if dist.get_rank() == 0:
            with open(path, "a") as file:
                file.write(json.dumps([task_name, case, seed, _merged(of_all, task.is_loss)]) + "\n")
    dist.destroy_process_group()


def _merged(of_ranks: list[dict[str, Any]], is_loss: bool) -> dict[str, Any]:
    """Merges one training's results of all ranks: the mean of the bytes, the worst of values that differ."""
    error = next((one["error"] for one in of_ranks if "error" in one), None)
    if error is not None:
        return {"error": error}
    worst = max if is_loss else min
    return {
        "curve": of_ranks[0]["curve"],
        "bytes": sum(one["bytes"] for one in of_ranks) / len(of_ranks),
        "distance": max(one["distance"] for one in of_ranks),
        "alone": worst(one["alone"] for one in of_ranks),
    }


class _Kept:
    """The file of finished trainings: a line of facts, then one line each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists() or not path.read_text():
            path.write_text(json.dumps(report.facts()) + "\n")
        self.num_shown, self.size = 0, 0

    def facts(self) -> dict[str, Any]:
        return json.loads(self.path.read_text().splitlines()[0])

    def trainings(self) -> dict[tuple[str, str, int], dict[str, Any]]:
        lines = self.path.read_text().splitlines()[1:]
        return {(task, case, seed): result for task, case, seed, result in map(json.loads, lines)}

    def show_new(self, _pids: list[int]) -> None:
        if self.path.stat().st_size == self.size:
            return
        self.size = self.path.stat().st_size
        trainings = list(self.trainings().items())
        for (task, case, seed), result in trainings[self.num_shown :]:
            end = result.get("error") or f"{result['curve'][-1]:.4g}"
            print(f"{task}, {case}, seed {seed}: {end}", flush=True)
        self.num_shown = len(trainings)


def results(kept: _Kept, task: str, seeds: Sequence[int], names: Sequence[str]) -> list[Result]:
    """Returns the rows of a task's table, DDP's first; a training that failed or is not finite counts as failed."""
    trainings = kept.trainings()
    setups = cases()
    rows: dict[str, Result] = {}
    for case in names:
        setup = setups[case]
        baseline = rows.get(f"{DDP} SGD" if setup.optimizer == "sgd" else f"{DDP} Adam")
        of_seeds = [trainings[task, case, seed] for seed in seeds]
        errors = [one["error"] for one in of_seeds if "error" in one]
        if not errors and not all(math.isfinite(value) for one in of_seeds for value in one["curve"]):
            errors = ["the metric became NaN or Inf"]
        rows[case] = Result(TASKS[task], case, setup, of_seeds, errors, baseline)
    return list(rows.values())


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--algorithms", nargs="+", help="or names of rows; DDP comes with them")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--keep", type=Path, help="a file of finished trainings, from which to resume")
    args = parser.parse_args()
    if args.quick:
        args.tasks, args.seeds = ["digits"], [0]
    names = _chosen(parser, args.algorithms)
    is_whole = names == list(cases()) and args.tasks == list(TASKS) and args.seeds == list(SEEDS)
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        kept = _Kept(args.keep or Path(folder) / "trainings.jsonl")
        done = kept.trainings()
        jobs = [
            (task, case, seed)
            for case in names
            for task in args.tasks
            for seed in args.seeds
            if (task, case, seed) not in done
        ]
        if jobs:
            options = {"jobs": jobs, "path": os.path.abspath(kept.path)}
            ranks.run(RANKS, options, timeout_s=4 * 3600, on_poll=kept.show_new)
        rows = {task: results(kept, task, args.seeds, names) for task in args.tasks}
        begun = kept.facts()
        trained = f"from {begun['date']} on, commit {begun['commit']}"
        setup = {"ranks": RANKS, "seeds": " ".join(map(str, args.seeds)), "trained": trained}
        result = report.Report(__file__, "every algorithm, and DDP, from start to end", args, setup)
        for task in args.tasks:
            result.say(f"### {task}: {TASKS[task].metric}", "", *table(rows[task]))
        if is_whole:
            result.write(plot(rows))


def _chosen(parser: argparse.ArgumentParser, algorithms: Sequence[str] | None) -> list[str]:
    """Returns the names of rows, in the order of the table."""
    setups = cases()
    if algorithms is None:
        return list(setups)
    known = {*setups, *(setup.algorithm for setup in setups.values())}
    unknown = [name for name in algorithms if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [name for name, setup in setups.items() if {name, setup.algorithm} & {*algorithms, DDP}]


if __name__ == "__main__":
    ranks.main(measure, main)
