"""Measures the cost of more ranks, more leaves and more clients in a federated program.

Ranks: the gradient of a mean loss and a round of FedAvg of the transformer of federated_round.py, with equally many
clients on each rank, compared with independent programs of the same clients on the same processes at the same time.
Leaves: the mean of a pytree of a hundred leaves, as one value and leaf by leaf, compared with one all_reduce of as many
bytes; with the number of collectives. Clients: the additional peak of resident memory in the gradient of a mean loss
through a local step, by map_reduce and by map_fn with reduce_mean, of a model of 10 MB. Values are verified before.

    .venv/bin/python -m benchmarks.federated.federated_scaling [--ranks 2] [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bagua.replay.systems import destroy, initialise
from benchmarks.federated.contenders import client_function
from benchmarks.federated.tasks import TASKS, tensors
from benchmarks.lib import ranks, report, timing

CLIENTS_PER_RANK = 32
LEAVES, LEAF = 100, (64, 64)
MEMORY = ((2048, 16, True), (256, 16, True), (64, 16, True), (64, 16, False))  # clients, chunk_size, by map_reduce
_WIDTH, _EXAMPLES = 1120, 2  # two layers: 10 MB
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # makes glibc return freed memory at once


def measure(what: str, **options: Any) -> Any:
    return {"ranks": measure_ranks, "leaves": measure_leaves, "memory": measure_memory}[what](**options)


def measure_ranks(repetitions: int) -> dict[str, list[float]]:
    """Measures on a rank; returns seconds by case."""
    initialise()
    import bagua
    from bagua import federated

    task = TASKS["transformer"]
    train = client_function(task)
    rank, world_size = bagua.get_rank(), bagua.get_world_size()
    model = tensors(task.parameters())
    inputs, labels = tensors(task.data(CLIENTS_PER_RANK * world_size))
    mine = slice(rank * CLIENTS_PER_RANK, (rank + 1) * CLIENTS_PER_RANK)
    inputs, labels = inputs[mine], labels[mine]
    alone = [bagua.new_group([member]) for member in range(world_size)][rank]

    def mean_loss(model: Any, inputs: Any, labels: Any) -> Any:
        def of_client(model: Any, inputs: Any, labels: Any) -> Any:
            return task.loss(model, inputs.flatten(0, 1), labels.flatten(0, 1))

        return federated.reduce_mean(federated.map_fn(of_client, (federated.broadcast(model), inputs, labels)))

    def fedavg(model: Any, inputs: Any, labels: Any) -> Any:
        return federated.reduce_mean(federated.map_fn(train, (federated.broadcast(model), inputs, labels)))

    contenders: dict[str, timing.Contender] = {}
    for what, function, derive in (
        ("gradient of a mean loss", mean_loss, _gradient),
        ("round of FedAvg", fedavg, lambda program: program),
    ):
        together = derive(federated.program(function, clients=CLIENTS_PER_RANK * world_size))
        apart = derive(federated.program(function, clients=CLIENTS_PER_RANK, group=alone))
        _verify_mean(together(model, inputs, labels), apart(model, inputs, labels))
        for how, run in (("apart", apart), ("together", together)):
            contenders[f"{what}, {how}"] = timing.Contender(lambda run=run: run(model, inputs, labels))
    samples = timing.interleaved(contenders, repetitions=repetitions, barrier=bagua.barrier)
    destroy()
    return {name: of_one["wall"] for name, of_one in samples.items()}


def _gradient(program: Callable) -> Callable:
    import torch

    return torch.func.grad(program)


def _verify_mean(together: dict[str, Any], apart: dict[str, Any]) -> None:
    """Checks that the result together is the mean of the separate ones over the ranks."""
    import torch

    import bagua

    for name, value in together.items():
        mean = apart[name].clone()
        bagua.all_reduce(mean, op=bagua.ReduceOp.AVG)
        torch.testing.assert_close(value, mean, rtol=1e-4, atol=1e-5)


def measure_leaves(repetitions: int) -> dict[str, Any]:
    """Measures on a rank; returns seconds and the number of collectives by case."""
    initialise()
    import torch

    import bagua
    from bagua import federated

    rank, world_size = bagua.get_rank(), bagua.get_world_size()
    tree = {f"leaf {i}": torch.full((1, *LEAF), float(rank + i)) for i in range(LEAVES)}
    flat = torch.zeros(LEAVES * LEAF[0] * LEAF[1])
    as_one = federated.program(federated.reduce_mean, clients=world_size)
    of_leaf = federated.program(federated.reduce_mean, clients=world_size)
    runs = {
        "an all_reduce of as many bytes": lambda: bagua.all_reduce(flat),
        "as one value": lambda: as_one(tree),
        "leaf by leaf": lambda: {name: of_leaf(leaf) for name, leaf in tree.items()},
    }
    for name, value in runs["as one value"]().items():
        torch.testing.assert_close(value, runs["leaf by leaf"]()[name])
    counts = {}
    for name, run in runs.items():
        run()
        bagua.get_default_group().events(clear=True)
        run()
        events = bagua.get_default_group().events(clear=True, parts=False)
        counts[name] = sum(event.kind == "operation" for event in events)
    contenders = {name: timing.Contender(run) for name, run in runs.items()}
    samples = timing.interleaved(contenders, repetitions=repetitions, barrier=bagua.barrier)
    destroy()
    return {"wall": {name: of_one["wall"] for name, of_one in samples.items()}, "counts": counts}


def measure_memory(clients: int, chunk_size: int, by_map_reduce: bool) -> dict[str, float]:
    """Measures in one process; returns the additional bytes at the peak, and seconds."""
    import time

    import torch

    from bagua import federated

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {"up": torch.randn(_WIDTH, _WIDTH) / _WIDTH, "down": torch.randn(_WIDTH, _WIDTH) / _WIDTH}
    inputs = torch.randn(clients, _EXAMPLES, _WIDTH)

    def of_client(model: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return ((x @ model["up"]).relu() @ model["down"] - x).square().mean()

    @federated.program(clients=clients)
    def mean_loss(model: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
        # After local steps each client has a different model.
        def stepped(model: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            gradient = torch.func.grad(of_client)(model, x)
            return of_client({name: value - 0.1 * gradient[name] for name, value in model.items()}, x)

        arguments = (federated.broadcast(model), inputs)
        if by_map_reduce:
            return federated.map_reduce(stepped, arguments, chunk_size=chunk_size)
        return federated.reduce_mean(federated.map_fn(stepped, arguments))

    run = torch.func.grad(mean_loss)
    few = federated.program(lambda x: federated.map_reduce(lambda x: x.sum(), (x,)), clients=clients)
    few(inputs)  # loads code and libraries
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = _status_bytes("VmHWM")
    began = time.perf_counter()
    gradient = run(model, inputs)
    seconds = time.perf_counter() - began
    model_bytes = sum(value.numel() * value.element_size() for value in model.values())
    if not all(bool(value.isfinite().all()) for value in gradient.values()):
        raise RuntimeError("the gradient is not finite")
    return {"peak": _status_bytes("VmHWM") - before, "model": model_bytes, "seconds": seconds}


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def rows_of_ranks(per_rank: list[dict[str, list[float]]]) -> list[report.Row]:
    rows: list[report.Row] = []
    for name in per_rank[0]:
        row = report.Row(name, timing.slowest([of_rank[name] for of_rank in per_rank]))
        row.baseline = rows[-1] if name.endswith("together") else None
        rows.append(row)
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    result = report.Report(__file__, "what ranks, leaves and clients cost a federated program", args)
    repetitions = 3 if args.quick else 40

    per_rank = ranks.run(args.ranks, {"what": "ranks", "repetitions": repetitions})
    of_ranks = rows_of_ranks(per_rank)
    title = f"{args.ranks} ranks of {CLIENTS_PER_RANK} clients, and as many programs by themselves at the same time"
    result.add(report.Table(title, of_ranks, ratio="relative"))

    per_rank = ranks.run(args.ranks, {"what": "leaves", "repetitions": repetitions})
    of_leaves: list[report.Row] = []
    for name, count in per_rank[0]["counts"].items():
        samples = timing.slowest([of_rank["wall"][name] for of_rank in per_rank])
        of_leaves.append(report.Row(name, samples, of_leaves[0] if of_leaves else None, {"collectives": str(count)}))
    title = f"The mean of {LEAVES} leaves of {LEAF[0]} x {LEAF[1]} float32, {args.ranks} ranks"
    result.add(report.Table(title, of_leaves, ratio="relative"))

    of_memory = []
    for clients, chunk_size, by_map_reduce in MEMORY[1:] if args.quick else MEMORY:
        options = {"clients": clients, "chunk_size": chunk_size, "by_map_reduce": by_map_reduce}
        (found,) = ranks.run(1, {"what": "memory", **options}, env=_EXACT)
        how = f"map_reduce, chunk_size={chunk_size}" if by_map_reduce else "map_fn and reduce_mean"
        cells = {"models": f"{found['peak'] / found['model']:.1f}", "s": report.three_digits(found["seconds"])}
        of_memory.append(report.Row(f"{clients} clients, {how}", [found["peak"]], None, cells))
    title = f"Peak of the gradient through a local step, a model of {found['model'] / 1e6:.1f} MB, one process"
    result.add(report.Table(title, of_memory, unit="MB"))

    figure, axes = report.subplots(3)
    report.bars(axes[0], of_ranks, "ranks", "ms", 1e3)
    report.bars(axes[1], of_leaves, "leaves", "ms", 1e3)
    report.bars(axes[2], of_memory, "peak memory", "MB", 1e-6)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
