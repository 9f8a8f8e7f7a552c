"""Measures a round of FedAvg in a simulation, compared with loops over clients and other frameworks.

All clients take part in every round, with two steps of SGD each, on the same data. Each contender's model after its
first round is compared with that of the loop over clients. Contenders are processes that wait for their turn. Those on
one core are this library's program, the same where freed memory is kept, and under torch.compile, a loop of autograd, a
loop of the program's client function (torch.func), a loop over that function under torch.compile, DrJAX jitted, and
pfl-research; on two cores, two ranks of the program, and Flower's simulation, which starts its own processes. A last
table has the seconds until the first round is done, that is tracing and compilation, by number of clients; the time
that torch.compile needs once per machine (C++ headers) is not counted. Frameworks that cannot be imported are skipped;
each may have its own interpreter.

    .venv/bin/python -m benchmarks.federated.federated_round [--drjax PYTHON] [--pfl PYTHON] [--flower PYTHON] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.federated.contenders import Contender, Running, has
from benchmarks.federated.tasks import TASKS
from benchmarks.lib import report

LOOP = Contender("loop over clients, autograd", "loop")
LOOP_FUNC = Contender("loop over clients, torch.func", "loop_func")
BAGUA = Contender("bagua", "bagua")
BAGUA_KEPT = Contender("bagua, kept memory", "bagua", options={"keep_memory": True})
BAGUA_COMPILED = Contender("bagua, torch.compile", "bagua_compiled")
LOOP_OF_COMPILED = Contender("loop over a compiled client", "loop_of_compiled")
COMPILED_LOOP = Contender("compiled loop over clients", "compiled_loop")
DRJAX = Contender("DrJAX, jit", "drjax", "drjax")
TRACE = Contender("bagua, federated.trace", "bagua_trace")
ROUNDS = (
    LOOP,
    LOOP_FUNC,
    LOOP_OF_COMPILED,
    BAGUA,
    BAGUA_KEPT,
    BAGUA_COMPILED,
    DRJAX,
    Contender("pfl-research", "pfl", "pfl"),
    Contender("bagua, 2 ranks", "bagua_on_ranks", cores=2),
    Contender("Flower, 2 processes", "flower", "flwr", cores=2),
)
FIRST_ROUNDS = (TRACE, BAGUA, BAGUA_COMPILED, LOOP_OF_COMPILED, COMPILED_LOOP, DRJAX)
CASES = (("cnn", (16, 64, 256)), ("transformer", (16, 64, 256)), ("transformer, 4 sequences", (64,)))
FIRST_CLIENTS = (2, 4, 8, 16, 64, 256)
_PACKAGES = {"drjax": "drjax", "pfl": "pfl", "flower": "flwr"}
_LIMIT_S = 120.0
_TOLERANCE = 1e-3  # steps in float32, where another order of sums may choose another maximum of a pool


def add_interpreters(parser: argparse.ArgumentParser, frameworks: Sequence[str]) -> None:
    """Adds an option for each of the frameworks, `_PACKAGES` by name."""
    for framework in frameworks:
        parser.add_argument(f"--{framework}", default=sys.executable, help="the interpreter that has it")


def interpreters(args: argparse.Namespace) -> tuple[dict[str, str], list[str]]:
    """Returns the interpreter of each package that can be imported, and the packages that cannot."""
    of = {package: getattr(args, name) for name, package in _PACKAGES.items() if hasattr(args, name)}
    pythons = {package: python for package, python in of.items() if has(python, package)}
    return {"torch": sys.executable, **pythons}, [package for package in of if package not in pythons]


def rounds(
    contenders: Sequence[Contender],
    task: str,
    clients: int,
    repetitions: int,
    pythons: dict[str, str],
    limit_s: float = _LIMIT_S,
) -> tuple[list[report.Row], dict[str, float], list[str]]:
    """Runs the contenders in turns; the first one is the baseline, and what the models of the others must equal.

    Returns:
        Rows, seconds of the first rounds by contender, and failures.
    """
    cores = sorted(os.sched_getaffinity(0))
    firsts: dict[str, float] = {}
    failures: list[str] = []
    with contextlib.ExitStack() as stack:
        running: list[Running] = []
        expected: Any = None
        for contender in contenders:
            if contender.needs not in pythons or contender.cores > len(cores):
                continue
            one = stack.enter_context(Running(contender, pythons[contender.needs], task, clients, cores))
            try:
                firsts[contender.name] = one.turn(limit_s)
            except (RuntimeError, TimeoutError) as error:
                if contender is contenders[0]:
                    raise
                failures.append(f"{contender.name}, {task}, {clients} clients: {error}")
                continue
            running.append(one)
            if not contender.is_complete:
                continue
            model = one.model()
            expected = expected or model
            distance = _distance(model, expected, TASKS[task].parameters())
            if not distance < _TOLERANCE:
                raise RuntimeError(f"{contender.name}: the model differs from that of {contenders[0].name}: {distance}")
        samples = {one.contender: [one.turn(limit_s)] for one in running}  # one more round, discarded below
        for _ in range(repetitions):
            for one in running:
                samples[one.contender].append(one.turn(limit_s))
    baseline = report.Row(contenders[0].name, samples[contenders[0]][1:])
    rows = [
        baseline if contender is contenders[0] else report.Row(contender.name, of_one[1:], baseline)
        for contender, of_one in samples.items()
    ]
    for row, contender in zip(rows, samples, strict=True):
        row.cells = {"cores": str(contender.cores)}
    return rows, firsts, failures


def _distance(model: Any, expected: Any, initial: Any) -> float:
    """Returns the norm of the difference of two models, relative to how far the round has moved them."""

    def norm(ours: Any, theirs: Any) -> float:
        return float(np.sqrt(sum(float(np.square(ours[name] - theirs[name]).sum()) for name in theirs)))

    return norm(model, expected) / norm(expected, initial)


def add_first_rounds(
    seconds: dict[str, dict[int, float]], every_clients: Sequence[int], pythons: dict[str, str]
) -> None:
    """Adds the transformer's first rounds that `seconds`, by contender and clients, lack; infinite if too long."""
    cores = sorted(os.sched_getaffinity(0))
    for contender in FIRST_ROUNDS:
        if contender.needs not in pythons:
            continue
        of_one = seconds.setdefault(contender.name, {})
        for clients in every_clients:
            if clients in of_one:
                continue
            if contender is COMPILED_LOOP and float("inf") in of_one.values():
                break
            with Running(contender, pythons[contender.needs], "transformer", clients, cores) as one:
                try:
                    of_one[clients] = one.turn(_LIMIT_S)
                except TimeoutError:
                    of_one[clients] = float("inf")


def first_lines(seconds: dict[str, dict[int, float]], every_clients: Sequence[int]) -> list[str]:
    """Returns a table in Markdown, with a column for each number of clients."""

    def cell(value: float | None) -> str:
        if value is None:
            return "not tried"
        return f"over {_LIMIT_S:.0f}" if value == float("inf") else report.three_digits(value)

    head = ["s until the first round is done", *(f"{clients} clients" for clients in every_clients)]
    return report.aligned([head, *([name, *map(cell, map(of.get, every_clients))] for name, of in seconds.items())])


def main() -> None:
    parser = report.parser(__doc__)
    add_interpreters(parser, ("drjax", "pfl", "flower"))
    parser.add_argument("--task", choices=sorted(dict(CASES)), help="this one alone, without the table of first rounds")
    args = parser.parse_args()
    pythons, missing = interpreters(args)
    setup = {
        "tasks": "; ".join(
            f"{task.name}: {task.num_parameters()} parameters, {task.steps} steps of "
            f"{task.batch} example{'s' * (task.batch > 1)} at each client"
            for task in (TASKS[name] for name, _ in CASES)
        ),
        **({"not there": ", ".join(missing)} if missing else {}),
    }
    result = report.Report(
        __file__,
        "how long a round of FedAvg takes, compared with loops and other frameworks",
        args,
        setup,
        args.task or "",
    )
    with Running(LOOP_OF_COMPILED, sys.executable, "transformer", 1, sorted(os.sched_getaffinity(0))) as one:
        one.turn(_LIMIT_S)  # compiles the headers
    cases = [(task, clients) for task, clients in CASES if args.task in (None, task)]
    if args.quick:
        cases = [(task, (4,)) for task, _ in cases if task != "cnn" or args.task]
    every_rows: dict[tuple[str, int], list[report.Row]] = {}
    seconds: dict[str, dict[int, float]] = {}
    for task, every_clients in cases:
        for clients in every_clients:
            rows, firsts, failures = rounds(ROUNDS, task, clients, 3 if args.quick else 9, pythons)
            for name in (contender.name for contender in FIRST_ROUNDS):
                if task == "transformer" and name in firsts:
                    seconds.setdefault(name, {})[clients] = firsts[name]
            every_rows[task, clients] = rows
            result.add(report.Table(f"A round: {task}, {clients} clients", rows))
            for failure in failures:
                result.say(f"Failed: {failure}")
    if args.task:
        result.write()
        return
    every_clients = (2, 4) if args.quick else FIRST_CLIENTS
    add_first_rounds(seconds, every_clients, pythons)
    result.say("### Until the first round: transformer", "", *first_lines(seconds, every_clients))
    result.write(_figure(every_rows, seconds))


def _figure(every_rows: dict[tuple[str, int], list[report.Row]], seconds: dict[str, dict[int, float]]) -> Any:
    figure, axes = report.subplots(2)
    per_client: dict[str, dict[int, float]] = {}
    for (task, clients), rows in every_rows.items():
        for row in rows if task == "transformer" else ():
            per_client.setdefault(row.case, {})[clients] = row.p50
    titles = ("a round: transformer", "until the first round is done")
    colors = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys([*per_client, *seconds]))}
    for axis, lines, title in zip(axes, (per_client, seconds), titles, strict=True):
        for name, of_one in lines.items():
            known = {clients: of_one[clients] for clients in sorted(of_one) if of_one[clients] != float("inf")}
            axis.plot(list(known), list(known.values()), marker="o", label=name, color=colors[name])
        axis.set_xscale("log", base=2)
        axis.set(yscale="log", xlabel="clients", ylabel="s", title=title)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.18), ncols=2)
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
