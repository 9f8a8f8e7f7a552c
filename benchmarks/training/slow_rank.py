"""Measures the steps per second, and the accuracy reached, when one rank is three times slower than the others.

Four ranks train a small network on scikit-learn's digits for the same time; compute is a sleep, 10 ms on a fast rank
and 30 ms on a slow one. Either the last rank is always slow, or a random rank in each step. Synchronous training has
the pace of the slowest rank of each step, so torch DDP on gloo is the baseline. A second column has the accuracy of the
mean of the ranks' weights on held-out images.

    .venv/bin/python -m benchmarks.training.slow_rank [--seconds 6] [--repetitions 3] [--quick]
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

from benchmarks.lib import ranks, report

RANKS, FAST_S, SLOW_S = 4, 0.010, 0.030
DDP = "DDP gloo"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    DDP: ("", {}),
    "gradient_allreduce": ("gradient_allreduce", {}),
    "decentralized, shift_one": ("decentralized", {"topology": "shift_one"}),
    "local_sgd, every 8 steps": ("local_sgd", {"sync_every": 8}),
    "async, every 0.05 s": ("async_averaging", {"sync_interval": 0.05}),
}
SLOW = ("always the same", "another one at each step")


def measure(way: str, slow: str, seconds: float, seed: int) -> dict:
    """Trains on a rank; returns its steps per second, and the accuracy of the mean of all ranks' weights."""
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    import bagua

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rank = int(os.environ["RANK"])
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, held_out = shuffled[300:], shuffled[:300]
    module = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    algorithm, options = WAYS[way]
    bagua.init_process_group()
    if way == DDP:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(module)
    else:
        model = bagua.with_bagua(module, optimizer, algorithm=algorithm, **options)
    draw, order = random.Random(seed), torch.Generator().manual_seed(100 * seed + rank)
    bagua.barrier()
    begin = time.monotonic()
    # Ranks that step together make equally many steps, as the slowest rank of each step allows.
    num_steps = int(seconds / SLOW_S) if algorithm != "async_averaging" else None
    count = 0
    while time.monotonic() - begin < seconds if num_steps is None else count < num_steps:
        slow_rank = RANKS - 1 if slow == SLOW[0] else draw.randrange(RANKS)
        time.sleep(SLOW_S if slow_rank == rank else FAST_S)
        batch = train[torch.randint(len(train), (16,), generator=order)]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
        count += 1
    took_s = time.monotonic() - begin
    if algorithm == "async_averaging":
        model.bagua.pause()
    for parameter in module.parameters():
        bagua.all_reduce(parameter.data, bagua.ReduceOp.AVG)
    with torch.no_grad():
        accuracy = float((module(x[held_out]).argmax(1) == y[held_out]).float().mean())
    if way == DDP:
        dist.destroy_process_group()
    bagua.destroy_process_group()
    return {"per_s": count / took_s, "accuracy": accuracy}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    seconds, repetitions = (1.5, 1) if args.quick else (args.seconds, args.repetitions)
    result = report.Report(__file__, "one rank is three times slower", args, {"ranks": str(RANKS)})
    tables = []
    for slow in SLOW:
        rows: list[report.Row] = []
        for way in WAYS:
            seen = [
                ranks.run(RANKS, {"way": way, "slow": slow, "seconds": seconds, "seed": seed})
                for seed in range(repetitions)
            ]
            # The mean time of a step over all ranks: less time means more data.
            samples = [RANKS / sum(rank["per_s"] for rank in run) for run in seen]
            row = report.Row(way, samples, rows[0] if rows else None)
            row.cells = {
                "steps/s of the slowest and the fastest rank": " to ".join(
                    f"{pick(rank['per_s'] for run in seen for rank in run):.0f}" for pick in (min, max)
                ),
                "accuracy": " ".join(f"{100 * run[0]['accuracy']:.1f}" for run in seen),
            }
            rows.append(row)
        tables.append((slow, rows))
        notes = ["Time per step, over all ranks; ratio: DDP's median over the case's. Accuracy in percent, run by run."]
        result.add(report.Table(f"Slow: {slow}", rows, notes=notes))
    figure, axes = report.subplots(len(tables))
    for axis, (slow, rows) in zip(axes, tables, strict=True):
        report.bars(axis, rows, f"slow: {slow}", "ms per step", 1e3)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
