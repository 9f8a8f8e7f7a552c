"""Measures the cost of wrapping a model on one GPU, without other ranks.

A step (zero_grad, forward, backward, SGD with momentum) of ResNet-50 and of a transformer of GPT-2's size (114 million
parameters) is timed alone, wrapped with each of two algorithms, and with DDP over NCCL, in one process in turns. A
wrapper adds hooks, buckets and work of the host; the script ends with 1 unless bagua adds less than 2% of the step.

    .venv/bin/python -m benchmarks.cuda.gpu_step [--batch 32] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from benchmarks.lib import gpus, models, ranks, report, timing

ALONE = "alone"
ALGORITHMS = ("gradient_allreduce", "bytegrad")
DDP = "DDP"
ALLOWED_SHARE = 0.02
MODELS = {
    "ResNet-50": {"make": "resnet", "width": 64, "depths": [3, 4, 6, 3], "side": 224},
    "GPT": {"make": "transformer", "width": 768, "num_layers": 16, "context": 512},
}


def measure(device: str, chosen: dict[str, dict], batch: int, repetitions: int) -> dict[str, dict]:
    """Measures on the only rank; returns the seconds per step of each way, and the number of parameters, by model."""
    import torch.distributed as dist

    import bagua

    where = gpus.use(device)
    bagua.init_process_group()
    if device == gpus.CUDA:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    results = {name: _measure_one(where, options, batch, repetitions) for name, options in chosen.items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    bagua.destroy_process_group()
    return results


def _measure_one(where: Any, options: dict[str, Any], batch: int, repetitions: int) -> dict:
    import torch

    steps: dict[str, Callable[[], None]] = {}
    modules: dict[str, torch.nn.Module] = {}
    for name in (ALONE, *ALGORITHMS, *([DDP] if where.type == gpus.CUDA else [])):
        steps[name], modules[name] = _way(name, where, options, batch)
        for _ in range(2):  # buckets are planned anew in the second
            steps[name]()
    _verify(modules)
    samples = timing.interleaved(
        {name: timing.Contender(step) for name, step in steps.items()}, repetitions=repetitions
    )
    num_parameters = sum(p.numel() for p in modules[ALONE].parameters())
    return {"seconds": {name: of["wall"] for name, of in samples.items()}, "parameters": num_parameters}


def _way(name: str, where: Any, options: dict[str, Any], batch: int) -> tuple[Callable[[], None], Any]:
    """Returns a function that runs one step to its end on the device, and the model."""
    import torch

    import bagua

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if options["make"] == "resnet":
        module = models.ResNet(options["width"], tuple(options["depths"])).to(where)
        x = torch.randn(batch, 3, options["side"], options["side"], generator=generator).to(where)
        y = torch.randint(1000, (batch,), generator=generator).to(where)
    else:
        shape = {key: options[key] for key in ("width", "num_layers", "context")}
        module = models.ByteTransformer(**shape).to(where)
        tokens = torch.randint(models.VOCABULARY, (batch, options["context"] + 1), generator=generator).to(where)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    if name == ALONE:
        model = module
    elif name == DDP:
        model = torch.nn.parallel.DistributedDataParallel(module, device_ids=[where.index])
    else:
        model = bagua.with_bagua(module, optimizer, algorithm=name)

    def step() -> None:
        optimizer.zero_grad()
        outputs = model(x)
        torch.nn.functional.cross_entropy(outputs.reshape(len(y), -1), y).backward()
        optimizer.step()
        torch.accelerator.synchronize()

    return step, module


def _verify(modules: dict[str, Any]) -> None:
    """Checks that all ways train alike on one rank, up to the order in which GPU kernels add."""
    import torch

    expected = torch.cat([p.detach().flatten() for p in modules[ALONE].parameters()])
    for name in ALGORITHMS:
        found = torch.cat([p.detach().flatten() for p in modules[name].parameters()])
        error = float((found - expected).norm() / expected.norm())
        if not error <= 1e-4:
            raise RuntimeError(f"{name}: the weights are off by {error} of their norm after two steps on one rank")


def main() -> None:
    parser = gpus.parser(__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tiny", action="store_true", help="models of some layers, to see that the script works")
    args = parser.parse_args()
    gpus.need(__file__, args.device)
    result = gpus.Report(__file__, "what wrapping a model costs on one GPU", args, {"batch": args.batch})
    chosen = MODELS
    if args.tiny:
        chosen = {
            "ResNet, tiny": {**MODELS["ResNet-50"], "width": 4, "depths": [1, 1], "side": 16},
            "GPT, tiny": {**MODELS["GPT"], "width": 16, "num_layers": 1, "context": 8},
        }
    options = {"device": args.device, "chosen": chosen, "batch": args.batch}
    (measured,) = ranks.run(1, {**options, "repetitions": 3 if args.quick else 51}, timeout_s=1800)
    figure, axes = report.subplots(len(chosen))
    missed = []
    for axis, (model, found) in zip(axes, measured.items(), strict=True):
        alone = report.Row(ALONE, found["seconds"][ALONE])
        wrapped = [report.Row(name, of_way, alone) for name, of_way in found["seconds"].items() if name != ALONE]
        missed += [
            f"{model} {row.case}"
            for row in wrapped
            if row.case in ALGORITHMS and row.p50 > (1 + ALLOWED_SHARE) * alone.p50
        ]
        title = f"{model}, {found['parameters'] / 1e6:.1f} million parameters"
        result.add(report.Table(title, [alone, *wrapped], ratio="relative"))
        report.bars(axis, [alone, *wrapped], title, "ms", 1e3)
    status = gpus.verdict(result, missed, f"a cost of less than {100 * ALLOWED_SHARE:.0f}% of the step")
    figure.tight_layout()
    result.write(figure)
    sys.exit(status)


if __name__ == "__main__":
    ranks.main(measure, main)
