"""Measures the time until every surviving rank raises, when one rank is killed, stops, or never produces a gradient.

Three ranks train with gradient_allreduce over shared memory and over TCP. In the middle of a backward the last one is
killed (-9), stopped (SIGSTOP), or leaves a parameter out of its loss. The time from that moment until `backward()` of
each other rank raises may be twice the group's timeout; it is compared with torch DDP on gloo with the same timeout.
"names it" counts the errors whose text names the rank, or the parameter.

    .venv/bin/python -m benchmarks.training.fault_times [--timeout 5] [--repetitions 3] [--quick]
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from benchmarks.lib import models, ranks, report

RANKS, CULPRIT, FAULT_STEP, LAYER = 3, 2, 3, 4
FAULTS = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "never ready": None}
GLOO = "DDP gloo"
WAYS = {GLOO: {}, "bagua shm": {}, "bagua tcp": {"BAGUA_SHARED_MEMORY": "0"}}


def measure(way: str, fault: str, timeout_s: float, moment: str) -> dict:
    """Trains on a rank until an error; returns its time and text. The faulty rank writes its time to `moment`."""
    import torch
    import torch.distributed as dist

    import bagua

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ["RANK"])
    module = models.WideLayers(16_000_000, width=512)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    timeout = timedelta(seconds=timeout_s)
    if way == GLOO:
        dist.init_process_group("gloo", timeout=timeout)
        model = torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    else:
        bagua.init_process_group(timeout=timeout)
        model = bagua.with_bagua(module, optimizer)
    try:
        for step in range(FAULT_STEP + 2):
            if rank == CULPRIT and step == FAULT_STEP:
                _arm(module, FAULTS[fault], Path(moment))
            optimizer.zero_grad()
            module.loss(model, rank, step, batch=8).backward()
            optimizer.step()
    except (bagua.BaguaError, RuntimeError) as error:
        raised, text = time.monotonic(), str(error)
        named = f"layers.{LAYER}." if fault == "never ready" else f"rank {CULPRIT}"
        _stay_until_all_have_seen(rank, fault, Path(moment).parent, raised + 2 * timeout_s)
        return {"at": raised, "named": named in text, "type": type(error).__name__, "text": text[:400]}
    raise RuntimeError(f"{way}: no error although rank {CULPRIT} was hit by {fault!r} at step {FAULT_STEP}")


def _stay_until_all_have_seen(rank: int, fault: str, folder: Path, deadline: float) -> None:
    """Waits until all ranks have an error, because the effect of a rank that exits is not measured here."""
    (folder / f"seen-{rank}").touch()
    expected = RANKS if FAULTS[fault] is None else RANKS - 1
    while len(list(folder.glob("seen-*"))) < expected and time.monotonic() < deadline:
        time.sleep(0.05)


def _arm(module, number: signal.Signals | None, moment: Path) -> None:
    """Makes the next backward of this rank fail half-way, and records the time."""

    def strike(grad):
        moment.write_text(repr(time.monotonic()))
        os.kill(os.getpid(), number)
        return grad

    if number is None:
        module.skipped = LAYER
        module.layers[LAYER + 1].weight.register_hook(lambda grad: moment.write_text(repr(time.monotonic())) and None)
    else:
        module.layers[LAYER].weight.register_hook(strike)


def run_once(way: str, fault: str, timeout_s: float) -> list[dict]:
    """Runs one world; returns the errors of the other ranks, with `after`, the seconds since the fault."""
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        moment = Path(folder) / "moment"
        per_rank = ranks.run(
            RANKS,
            {"way": way, "fault": fault, "timeout_s": timeout_s, "moment": str(moment)},
            env=WAYS[way],
            timeout_s=60 + 6 * timeout_s,
            lost=() if FAULTS[fault] is None else (CULPRIT,),
        )
        begin = float(moment.read_text())
    return [{**seen, "rank": rank, "after": seen["at"] - begin} for rank, seen in enumerate(per_rank[:CULPRIT])]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds, of the group")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    result = report.Report(__file__, "time until a fault is an error", args, {"timeout": f"{args.timeout:g} s"})
    seen = {(fault, way): [] for fault in FAULTS for way in WAYS}
    for _ in range(1 if args.quick else args.repetitions):
        for fault, way in seen:
            seen[fault, way] += run_once(way, fault, args.timeout)

    rows: dict[tuple[str, str], report.Row] = {}
    for (fault, way), errors in seen.items():
        row = report.Row(f"{fault}, {way}", [error["after"] for error in errors], rows.get((fault, GLOO)))
        named = sum(error["named"] for error in errors)
        slowest = max(row.samples) / args.timeout
        row.cells = {"max / timeout": f"{slowest:.2f}", "names it": f"{named} of {len(errors)}"}
        row.cells["error"] = ", ".join(sorted({error["type"] for error in errors}))
        rows[fault, way] = row
    notes = ["ratio: DDP's median over the case's."]
    result.add(report.Table("From the fault to the error", list(rows.values()), unit="s", notes=notes))
    quotes = [
        f"- {fault}, {way}, rank {errors[0]['rank']}: {errors[0]['type']}: {' '.join(errors[0]['text'].split())}"
        for (fault, way), errors in seen.items()
    ]
    result.say("Errors of the ranks:", "", *quotes)
    figure, axes = report.subplots(1)
    report.bars(axes[0], list(rows.values()), "from the fault to the error", "seconds", 1.0)
    axes[0].axvline(2 * args.timeout, color="tab:red", ls=":", label="twice the timeout")
    axes[0].legend(loc="lower right", fontsize=8)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
