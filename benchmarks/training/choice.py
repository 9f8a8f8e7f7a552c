"""Judges `algorithm="auto"` with real compute: one host per core, each pinned to its own, links of several rates.

A byte-level transformer trains under torch's DDP on gloo, under the candidates by name, and under "auto", in the same
ranks one after the other. Printed are the steps, what "auto" has chosen, and its regret: how much longer its step takes
than under the best of the candidates of its class.

    sudo .venv/bin/python -m benchmarks.training.choice [--rates 50 200 1000] [--width 128] [--quick]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from bagua.replay import hosts
from benchmarks.lib import ranks, report

_CANDIDATES = ("gradient_allreduce", "bytegrad:codec=bf16", "bytegrad", "qsgd:bits=4")
_CLASSES = {"R1": _CANDIDATES[:2], "R2": _CANDIDATES}
_DDP = ("ddp", "ddp_fp16")
_WARM_UP, _STEPS = 5, 30


def measure(width: int, steps: int) -> dict[str, Any]:
    """Returns seconds per step by system, and under "choice" what "auto" has chosen."""
    import torch

    import bagua
    from bagua.replay.systems import HOOKS, destroy, initialise, parse
    from benchmarks.lib.models import ByteTransformer

    initialise()
    found: dict[str, Any] = {"choice": {}}
    for system in (*_DDP, *_CANDIDATES, *(f"auto:risk={risk}" for risk in _CLASSES)):
        name, options = parse(system)
        torch.manual_seed(0)
        model = ByteTransformer(width, num_layers=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        wrapped: torch.nn.Module = model
        if name in HOOKS:
            wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            if HOOKS[name] is not None:
                wrapped.register_comm_hook(None, HOOKS[name]())
        else:
            bagua.with_bagua(model, optimizer, algorithm=name, **options)
        step, taken = 0, []
        while len(taken) < _WARM_UP + steps:
            begin = time.perf_counter()
            optimizer.zero_grad()
            model.loss(wrapped, bagua.get_rank(), step, batch=4).backward()
            optimizer.step()
            step += 1
            if name != "auto" or model.bagua.choice is not None:
                taken.append(time.perf_counter() - begin)
        found[system] = statistics.median(taken[_WARM_UP:])
        if name == "auto":
            found["choice"][system] = str(model.bagua.choice)
        bagua.barrier()
    destroy()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[50, 200, 1000], help="Mbit/s of every host's link")
    parser.add_argument("--width", type=int, default=128, help="of the transformer")
    parser.add_argument("--quick", action="store_true", help="few steps: to see that it works")
    args = parser.parse_args()
    report.need_hosts("choice")
    num_hosts = len(os.sched_getaffinity(0))
    rows = [["Mbit/s", *_DDP, *_CANDIDATES, *(f"auto {risk}, regret" for risk in _CLASSES)]]
    choices = []
    for rate in args.rates:
        with hosts.hosts(num_hosts, rate) as prefixes:
            per_rank = ranks.run(
                num_hosts,
                {"width": args.width, "steps": 10 if args.quick else _STEPS},
                env={"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                prefixes=[[*prefix, "taskset", "-c", str(core)] for core, prefix in enumerate(prefixes)],
                master_addr=hosts.address(0),
                timeout_s=900,
            )
        step_s = {system: max(of_rank[system] for of_rank in per_rank) for system in per_rank[0] if system != "choice"}
        row = [str(rate), *(f"{1e3 * step_s[system]:.1f}" for system in (*_DDP, *_CANDIDATES))]
        for risk, members in _CLASSES.items():
            chosen_s = step_s[f"auto:risk={risk}"]
            row.append(f"{1e3 * chosen_s:.1f}, {100 * (chosen_s / min(step_s[one] for one in members) - 1):+.1f}%")
        rows.append(row)
        choices += [f"{rate} Mbit/s, {text}" for text in per_rank[0]["choice"].values()]
    print("\n".join([*report.aligned(rows), "", *choices]))


if __name__ == "__main__":
    ranks.main(measure, main)
