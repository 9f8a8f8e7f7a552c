"""Measures a round of FedAvg over clients whose models are narrow or wide: all clients at once, some, or in a loop.

Each client trains an MLP by SGD. The loop calls the client function of the program for one client after the other, by
torch.func.grad, and takes the mean. On one core, in one process. glibc gives memory back to the kernel after a step of
a wide model, and gets it again page by page: the second table of each model is without that, by keep_memory().

    .venv/bin/python -m benchmarks.federated.widths [--quick]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from benchmarks.lib import ranks, report, timing

# Sizes of the layers, clients, steps and batch.
MODELS = {
    "4,810 parameters": ((64, 64, 10), 256, 2, 10),
    "135,000 parameters": ((256, 256, 256, 10), 32, 2, 16),
    "1.9 M parameters": ((784, 1024, 1024, 10), 16, 5, 10),
    "1.9 M parameters, one step": ((784, 1024, 1024, 10), 48, 1, 10),
}
LOOP = "loop over clients"


def measure(model: str, is_kept: bool, repetitions: int) -> dict[str, list[float]]:
    """Measures in one process; returns seconds by case."""
    import torch
    from torch.utils import _pytree as pytree

    from bagua import federated

    if is_kept:
        federated.keep_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes, clients, steps, batch = MODELS[model]
    weights = [torch.randn(pair) / pair[0] ** 0.5 for pair in itertools.pairwise(sizes)]
    inputs = torch.randn(clients, steps, batch, sizes[0])
    labels = torch.randint(sizes[-1], (clients, steps, batch))

    def loss(weights: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for weight in weights[:-1]:
            x = torch.relu(x @ weight)
        return torch.nn.functional.cross_entropy(x @ weights[-1], y)

    def train(weights: list[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        for x, y in zip(inputs, labels, strict=True):
            slopes = torch.func.grad(loss)(weights, x, y)
            weights = [weight - 0.1 * slope for weight, slope in zip(weights, slopes, strict=True)]
        return weights

    def as_it_is(weights: list[torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD([weight.requires_grad_() for weight in weights], lr=0.1)
        for x, y in zip(inputs, labels, strict=True):
            optimizer.zero_grad()
            loss(weights, x, y).backward()
            optimizer.step()
        return weights

    def loop() -> list[torch.Tensor]:
        trained = [train(weights, *mine) for mine in zip(inputs, labels, strict=True)]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves).mean(0), *trained)

    def program(reduce: Callable[..., Any]) -> Callable[[], Any]:
        of_all = federated.program(lambda w, x, y: reduce((federated.broadcast(w), x, y)), clients=clients)
        return lambda: of_all(weights, inputs, labels)

    runs = {
        LOOP: loop,
        "map_fn, all at once": program(
            lambda xs: federated.reduce_mean(federated.map_fn(train, xs, chunk_size=clients))
        ),
        "map_fn": program(lambda xs: federated.reduce_mean(federated.map_fn(train, xs))),
        "map_reduce, all at once": program(lambda xs: federated.map_reduce(train, xs, chunk_size=clients)),
        "map_reduce": program(lambda xs: federated.map_reduce(train, xs)),
        "map_reduce, torch.optim, vectorize=False": program(
            lambda xs: federated.map_reduce(as_it_is, xs, vectorize=False)
        ),
    }
    for run in runs.values():
        torch.testing.assert_close(run(), loop(), rtol=1e-3, atol=1e-5)
    samples = timing.interleaved({name: timing.Contender(run) for name, run in runs.items()}, repetitions=repetitions)
    return {name: of_one["wall"] for name, of_one in samples.items()}


def main() -> None:
    args = report.parser(__doc__).parse_args()
    result = report.Report(__file__, "how many clients to compute at a time, by the width of their models", args)
    figure, axes = report.subplots(len(MODELS))
    for axis, (model, (_, clients, steps, batch)) in zip(axes, MODELS.items(), strict=True):
        for is_kept, where in ((False, ""), (True, ", keep_memory()")):
            repetitions = 3 if args.quick else 8
            (found,) = ranks.run(1, {"model": model, "is_kept": is_kept, "repetitions": repetitions})
            rows = [report.Row(LOOP, found.pop(LOOP))]
            rows += [report.Row(name, samples, rows[0]) for name, samples in found.items()]
            title = f"{model}{where}: {clients} clients, {steps} steps of {batch}"
            result.add(report.Table(title, rows, ratio="relative"))
        report.bars(axis, rows, model, "ms", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
