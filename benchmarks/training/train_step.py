"""Measures the exposed communication of a training step, compared with torch DDP on gloo.

One step (zero_grad, forward, backward, SGD with momentum) of a byte-level transformer of 25.6 million parameters, on
ranks of one host. The same model runs four ways in the same processes, alternating after each step: alone (no
communication), with DDP, and with bagua's algorithms. Exposed communication is a step's time minus that of the step
alone in the same round; the column "waiting" is the time after backward's computation from bagua's timeline.

    .venv/bin/python -m benchmarks.training.train_step [--ranks 2] [--batch 4] [--tcp] [--quick]
"""

from __future__ import annotations

import statistics

from bagua.replay.systems import destroy, initialise
from benchmarks.lib import models, ranks, report, timing

ALONE, DDP = "compute alone", "DDP gloo"
ALGORITHMS = ("gradient_allreduce", "bytegrad")
WAYS = (ALONE, DDP, *ALGORITHMS)


def measure(batch: int, repetitions: int) -> dict:
    """Measures on a rank; returns samples by way of training, and waiting times from bagua's timelines."""
    import bagua

    initialise()
    ways = {name: _Way(name, batch) for name in WAYS}
    _verify(ways)
    samples = timing.interleaved(
        {name: timing.Contender(way.step) for name, way in ways.items()},
        repetitions=repetitions,
        barrier=bagua.barrier,
    )
    result = {
        "samples": samples,
        "waiting": {name: ways[name].waiting(repetitions) for name in ALGORITHMS},
        "gradient_bytes": models.gradient_bytes(ways[ALONE].module),
    }
    destroy()
    return result


class _Way:
    """A model that trains in one of WAYS, with the same first weights as the others."""

    def __init__(self, name: str, batch: int) -> None:
        import torch

        import bagua

        torch.manual_seed(0)
        self.name, self.batch = name, batch
        self.module = models.ByteTransformer()
        self.model: torch.nn.Module = self.module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01, momentum=0.9)
        self.num_steps = 0
        if name == DDP:
            self.model = torch.nn.parallel.DistributedDataParallel(self.module, gradient_as_bucket_view=True)
        elif name in ALGORITHMS:
            self.model = bagua.with_bagua(self.module, self.optimizer, algorithm=name)

    def step(self) -> None:
        import bagua

        self.optimizer.zero_grad()
        self.module.loss(self.model, bagua.get_rank(), self.num_steps, self.batch).backward()
        self.optimizer.step()
        self.num_steps += 1

    def waiting(self, num_steps: int) -> list[float]:
        """Returns the seconds of exposed communication of the last steps, from the timeline."""
        return [step.exposed_ns / 1e9 for step in self.model.bagua.timeline().steps[-num_steps:]]

    def flat(self):
        """Returns all parameters in one tensor."""
        import torch

        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


def _verify(ways: dict[str, _Way]) -> None:
    """Checks after two steps (the second with replanned buckets) that weights moved, are equal, and close to DDP's."""
    import torch

    import bagua

    start = ways[DDP].flat()
    for name in (DDP, *ALGORITHMS):
        for _ in range(2):
            ways[name].step()
    reference = ways[DDP].flat()
    moved = float((reference - start).norm())
    for name in ALGORITHMS:
        flat = ways[name].flat()
        allowed = {"gradient_allreduce": 1e-3, "bytegrad": 5e-2}[name] * moved
        error = float((flat - reference).norm())
        if not 0 <= error <= allowed or moved == 0:
            raise RuntimeError(f"{name}: weights are {error} from DDP's after two steps, allowed {allowed}")
        first = flat.clone()
        bagua.broadcast(first, 0)
        if not torch.equal(first, flat):
            raise RuntimeError(f"{name}: the weights of rank {bagua.get_rank()} differ from those of rank 0")


def rows_of(per_rank: list[dict]) -> tuple[list[report.Row], list[report.Row]]:
    """Returns rows of the step's time and of its exposed communication, compared with DDP."""
    steps = {
        name: report.Row(name, timing.slowest([of_rank["samples"][name]["wall"] for of_rank in per_rank]))
        for name in WAYS
    }
    for name, row in steps.items():
        cpu = timing.total([of_rank["samples"][name]["cpu"] for of_rank in per_rank])
        row.cells = {"CPU ms": report.three_digits(statistics.median(cpu) * 1e3)}
    exposed = {}
    for name in (DDP, *ALGORITHMS):
        pairs = zip(steps[name].samples, steps[ALONE].samples, strict=True)
        exposed[name] = report.Row(name, [step - alone for step, alone in pairs])
    for name in ALGORITHMS:
        steps[name].baseline, exposed[name].baseline = steps[DDP], exposed[DDP]
        waiting = [statistics.median(of_rank["waiting"][name]) for of_rank in per_rank]
        exposed[name].cells = {"waiting ms": report.three_digits(max(waiting) * 1e3)}
    return list(steps.values()), list(exposed.values())


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="sequences of 64 bytes per rank")
    parser.add_argument("--tcp", action="store_true", help="TCP over loopback instead of shared memory")
    args = parser.parse_args()
    setup = {"transport": "tcp over loopback" if args.tcp else "shared memory", "batch": f"{args.batch} x 64 bytes"}
    result = report.Report(__file__, "one training step, compared with DDP", args, setup)
    per_rank = ranks.run(
        args.ranks,
        {"batch": args.batch, "repetitions": 4 if args.quick else 25},
        env={"BAGUA_SHARED_MEMORY": "0"} if args.tcp else {},
        timeout_s=1800,
    )
    steps, exposed = rows_of(per_rank)
    size = f"{args.ranks} ranks, {per_rank[0]['gradient_bytes'] / 1e6:.0f} MB of gradients"
    notes = ["ratio: DDP's median over the case's. CPU ms: user and system time of all ranks together."]
    result.add(report.Table(f"Step, {size}", steps, notes=notes))
    result.add(report.Table(f"Exposed communication, {size}", exposed, notes=["ratio: DDP's median over the case's."]))
    figure, axes = report.subplots(2)
    report.bars(axes[0], steps, "one training step", "ms", 1e3)
    report.bars(axes[1], exposed, "of it exposed communication", "ms", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
