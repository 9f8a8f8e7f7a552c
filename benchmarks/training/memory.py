"""Measures the peak memory that wrapping a model costs, compared with DDP, and its growth.

Square layers with 400 MB of gradients, 2 ranks, SGD without state, a few steps with zero_grad's default; DDP has
gradient_as_bucket_view=True. The measure is PSS, in which a page shared by k processes counts 1/k for each, so that
gradients in shared memory count once. All numbers are means over ranks, beyond the memory when the model was built. The
peak is the highest reading of all ranks, which the parent takes every 20 ms or so; VmHWM, the kernel's high-water mark,
misses nothing but counts shared pages once per process. The timeline's records grow to some MB over many steps: small
operations fill them while wrapping, so that they count but do not look like a leak. "codes" is the size of all encoded
buckets. malloc is configured to return freed tensors to the system at once; otherwise autograd's gradients would hide
the difference.

    .venv/bin/python -m benchmarks.training.memory [--megabytes 400] [--steps 8] [--tcp] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

from bagua.replay.systems import destroy, initialise
from benchmarks.lib import models, ranks, report

PLAIN, DDP, FULL, CODED = "no wrapping", "DDP gloo", "gradient_allreduce", "bytegrad"
WAYS = (DDP, PLAIN, FULL, CODED)
_FILLING_OPERATIONS = 20_000  # each records 4 parts or more; the timeline keeps 65536
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc's threshold, which then also stays fixed


def measure(runs: list[dict]) -> list[dict]:
    """Runs `measure_one` with each of these arguments on a rank."""
    initialise()
    results = [measure_one(**run) for run in runs]
    destroy()
    return results


def measure_one(
    way: str,
    num_bytes: int,
    num_steps: int,
    momentum: float = 0.0,
    options: dict[str, Any] | None = None,
    fills_records: bool = False,
    **model: Any,
) -> dict:
    """Returns readings (name, time, PSS), the high-water mark since the model was built, and sizes.

    Args:
        way: DDP, PLAIN, or an algorithm.
        momentum: the momentum of SGD; None for QAdam with two steps of warm-up.
        options: the options of with_bagua.
        fills_records: fill the timeline's records while wrapping.
        model: the arguments of WideLayers.
    """
    import torch

    import bagua

    gc.collect()
    torch.manual_seed(0)
    module = models.WideLayers(num_bytes, **model)
    if momentum is None:
        groups = [{"params": [p]} for p in module.parameters()]  # a step's memory for a group is freed before a reading
        optimizer = bagua.optim.QAdam(groups, lr=1e-6, warmup_steps=2)
    else:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=momentum)
    readings = []

    def read(name: str) -> None:
        bagua.barrier()
        readings.append((name, time.monotonic(), pss_bytes("self")))
        bagua.barrier()

    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    resident = _status_bytes("VmHWM")
    read("built")
    model = module
    if way == DDP:
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    elif way != PLAIN:
        model = bagua.with_bagua(module, optimizer, algorithm=way, **(options or {}))
        if fills_records:
            _fill_records()
    read("wrapping")
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        module.loss(model, bagua.get_rank(), step, batch=8).backward()
        optimizer.step()
        read(f"step {step}")
    if way == DDP or (way != PLAIN and bagua.algorithms.get(way).exchanges == "gradients"):
        _verify_equal(module)
    result = {"readings": readings, "high_water": _status_bytes("VmHWM") - resident}
    result["gradient_bytes"] = models.gradient_bytes(module)
    result["code_bytes"] = _code_bytes(model) if way == CODED else 0
    if way not in (PLAIN, DDP):
        model.bagua.remove()
    return result


def _fill_records() -> None:
    """Fills the records of the default group."""
    import torch

    import bagua

    few = torch.zeros(2)
    for _ in range(_FILLING_OPERATIONS):
        bagua.all_reduce(few, codec="bf16")


def pss_bytes(pid: int | str) -> int:
    """Returns the proportional set size of a process without mapped files (libraries); 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def _code_bytes(model) -> int:
    import bagua

    sizes = [
        bagua.codecs.get(bucket.declaration.codec).wire_bytes(bucket.numel, bucket.dtype)
        for bucket in model.bagua.buckets
        if bucket.declaration.codec is not None
    ]
    return sum(sizes)


def _verify_equal(module) -> None:
    import torch

    import bagua

    last = list(module.parameters())[-2].detach()
    first = last.clone()
    bagua.broadcast(first, 0)
    if not torch.equal(first, last) or not bool(last.isfinite().all()):
        raise RuntimeError(f"after training the weights of rank {bagua.get_rank()} differ from those of rank 0")


class MemoryReadings:
    """The memory readings of running ranks, taken by the process that started them."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, int]] = []

    def __call__(self, pids: list[int]) -> None:
        self.readings.append((time.monotonic(), sum(pss_bytes(pid) for pid in pids)))

    def peak(self, begin: float, end: float) -> int:
        """Returns the highest reading between two times."""
        return max((total for at, total in self.readings if begin <= at <= end), default=0)


def run(args: argparse.Namespace, runs: list[dict]) -> list[dict]:
    """Runs one world; returns bytes per rank beyond the built model, for each of `runs`, arguments of `measure_one`."""
    readings = MemoryReadings()
    sizes = {"num_bytes": int(args.megabytes * 1e6), "num_steps": args.steps}
    per_rank = ranks.run(
        args.ranks,
        {"runs": [{**sizes, **run} for run in runs]},
        env={**_EXACT, **({"BAGUA_SHARED_MEMORY": "0"} if args.tcp else {})},
        on_poll=readings,
    )
    return [_summary(of_ranks, readings) for of_ranks in zip(*per_rank, strict=True)]


def _summary(of_ranks: tuple[dict, ...], readings: MemoryReadings) -> dict:
    names = [name for name, *_ in of_ranks[0]["readings"]]
    totals = [sum(of_rank["readings"][i][2] for of_rank in of_ranks) for i in range(len(names))]
    times = [max(of_rank["readings"][i][1] for of_rank in of_ranks) for i in range(len(names))]
    peaks = [
        max(readings.peak(*span), total) for span, total in zip(itertools.pairwise(times), totals[1:], strict=True)
    ]
    steady = totals[3:]  # after the second step, in which buckets are planned anew
    mean = 1 / len(of_ranks)
    return {
        "peak": (max(peaks) - totals[0]) * mean,
        "peaks": {name: (peak - totals[0]) * mean for name, peak in zip(names[1:], peaks, strict=True)},
        "wrapped": (totals[1] - totals[0]) * mean,
        "steady": (totals[-1] - totals[0]) * mean,
        "growth": (max(steady) - steady[0]) * mean,
        "high_water": max(of_rank["high_water"] for of_rank in of_ranks),
        "gradient_bytes": of_ranks[0]["gradient_bytes"],
        "code_bytes": of_ranks[0]["code_bytes"],
    }


def rows_of(runs: dict[str, list[dict]]) -> list[report.Row]:
    """Returns rows of peaks, compared with DDP's."""
    rows: list[report.Row] = []
    for way in WAYS:
        row = report.Row(way, [run["peak"] for run in runs[way]], rows[0] if rows else None)
        row.cells = {
            f"{name} MB": f"{statistics.median(run[key] for run in runs[way]) / 1e6:.1f}"
            for name, key in (
                ("wrapped", "wrapped"),
                ("steady", "steady"),
                ("growth", "growth"),
                ("VmHWM", "high_water"),
            )
        }
        rows.append(row)
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=400, help="of gradients")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tcp", action="store_true", help="TCP over loopback instead of shared memory")
    args = parser.parse_args()
    setup = {"transport": "tcp over loopback" if args.tcp else "shared memory"}
    result = report.Report(__file__, "memory of wrapping and training, compared with DDP", args, setup)
    runs: dict[str, list[dict]] = {way: [] for way in WAYS}
    for _, way in itertools.product(range(1 if args.quick else 3), WAYS):
        runs[way] += run(args, [{"way": way, "fills_records": True}])
    rows = rows_of(runs)
    gradient_bytes, code_bytes = runs[CODED][0]["gradient_bytes"], runs[CODED][0]["code_bytes"]
    title = f"Peak per rank beyond the built model, {args.ranks} ranks, {gradient_bytes / 1e6:.0f} MB of gradients"
    notes = [f"The encoded buckets take {code_bytes / 1e6:.1f} MB; a reading itself moves half a megabyte."]
    result.add(report.Table(title, rows, unit="MB", ratio="relative", notes=notes))
    figure, axes = report.subplots(1)
    report.bars(axes[0], rows, "peak beyond the built model", "MB per rank", 1e-6)
    axes[0].axvline(gradient_bytes / 1e6, color="tab:red", ls=":", label="gradient bytes")
    axes[0].legend(loc="lower right", fontsize=8)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
