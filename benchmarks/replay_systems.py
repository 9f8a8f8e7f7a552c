"""What replay.py measures on a rank: one model under every system, torch's and ours, and the bound for each.

A system is named as it is chosen: `ddp`, `ddp_fp16`, `ddp_bf16`, or an algorithm with options, `qsgd:bits=4`. Compute is a
sleep, so the optimizer is one that does nothing (a device's); `qadam` alone brings its own, whose time counts.
"""

from __future__ import annotations

import ast
import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from contenders import destroy, initialise
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import bagua
from bagua.profiles import Profile, SleepingModel

ALONE = "compute alone"


def _bf16_hook(state, bucket):  # noqa: ANN001, ANN202  torch takes no annotations that are strings
    """torch's bf16_compress_hook, which refuses gloo."""
    gradients = bucket.buffer()
    cast = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(cast, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


DDP_HOOKS: dict[str, Callable | None] = {
    "ddp": None,
    "ddp_fp16": default_hooks.fp16_compress_hook,
    "ddp_bf16": _bf16_hook,
}
# Of those that exchange weights, what may pass while compute goes on; the others' whole exchange is waited for.
_UNDER_COMPUTE = ("decentralized", "async")


class NoOptimizer(torch.optim.Optimizer):
    """Steps like one whose work an accelerator does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        """Nothing."""


@dataclass
class Result:
    """One system on one rank.

    Attributes:
        system: its name.
        step_s: seconds per step, a sample per block of steps.
        wire_bytes: bytes per step that this rank's host has sent, headers and all.
        waiting_s: what our own timeline says that a step waited, a median; None for DDP.
        buckets: of what is exchanged under backward, in the order of sending: when the last gradient of each becomes
            ready, in seconds from the begin of a step without communication, and its part of all bytes.
        overlap: what of the step an exchange may go on under: "backward" as the buckets say, "step", or "nothing".
    """

    system: str
    step_s: list[float]
    wire_bytes: float
    waiting_s: float | None = None
    buckets: list[tuple[float, float]] = field(default_factory=list)
    overlap: str = "backward"


def parse(system: str) -> tuple[str, dict[str, Any]]:
    """`qsgd:bits=4,error_feedback=True` -> the name and its options."""
    name, _, text = system.partition(":")
    options = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def measure(profile: str, scale: float, systems: Sequence[str], blocks: int) -> list[dict]:
    """On a rank: `Result`s as dicts, compute alone first."""
    initialise(timeout_s=300)
    torch.manual_seed(bagua.get_rank())
    model = SleepingModel(Profile.load(profile).scaled(scale))
    ready = _ready_times(model)
    results = [_measure(ALONE, model, ready, blocks)]
    results += [_measure(system, model, ready, blocks) for system in systems]
    destroy()
    return [asdict(result) for result in results]


def _measure(system: str, model: SleepingModel, ready: dict[int, float], blocks: int) -> Result:
    name, options = parse(system)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = NoOptimizer(parameters)
    wrapped: torch.nn.Module = model
    block = 2
    if name in DDP_HOOKS:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        if DDP_HOOKS[name] is not None:
            wrapped.register_comm_hook(None, DDP_HOOKS[name])
    elif name != ALONE:
        if name == "qadam":
            optimizer = bagua.QAdam(parameters, lr=1e-6, warmup_steps=options.pop("warmup_steps", 1))
        bagua.with_bagua(model, optimizer, algorithm=name, **options)
        chosen = model.bagua.algorithm.options()
        block = max(block, chosen.get("sync_every", 1), chosen.get("interval", 1))

    def step() -> None:
        optimizer.zero_grad()
        wrapped().backward()
        optimizer.step()

    for _ in range(3):  # connections; buckets are laid out anew after the first step
        step()
    samples = []
    bagua.barrier()
    sent_before, steps = _interface_bytes(), 0
    while len(samples) < blocks:
        begin = time.perf_counter()
        for _ in range(block):
            step()
        samples.append((time.perf_counter() - begin) / block)
        steps += block
    bagua.barrier()
    result = Result(system, samples, (_interface_bytes() - sent_before) / steps)
    if name in DDP_HOOKS or name == ALONE:
        in_order = sorted(parameters, key=lambda p: ready[id(p)])
        result.buckets = _parts([([p], p.numel()) for p in in_order], ready)
    else:
        handle = model.bagua
        if handle.algorithm.exchanges == "gradients":
            result.buckets = _parts([([m.parameter for m in b.members], b.num_bytes) for b in handle.buckets], ready)
        else:
            result.overlap = "step" if name in _UNDER_COMPUTE else "nothing"
        records = handle.timeline().steps[-steps:]
        result.waiting_s = statistics.median(record.exposed_ns / 1e9 for record in records)
        bagua.barrier()
        handle.remove()
    del wrapped, step
    model.zero_grad()
    gc.collect()
    return result


def _parts(buckets: Sequence[tuple[Sequence[torch.Tensor], int]], ready: dict[int, float]) -> list[tuple[float, float]]:
    total = sum(size for _, size in buckets)
    return [(max(ready[id(p)] for p in parameters), size / total) for parameters, size in buckets]


def _ready_times(model: SleepingModel) -> dict[int, float]:
    """When each gradient becomes ready in a step without communication, in seconds; medians of five steps."""
    seen: dict[int, list[float]] = {id(p): [] for p in model.parameters()}
    begin = 0.0
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p: seen[id(p)].append(time.perf_counter() - begin))
        for p in model.parameters()
    ]
    for _ in range(5):
        model.zero_grad()
        begin = time.perf_counter()
        model().backward()
    for hook in hooks:
        hook.remove()
    return {key: statistics.median(times) for key, times in seen.items()}


def _interface_bytes() -> int:
    """Bytes that this host has sent to others so far, by its interfaces' own count."""
    chosen = os.environ.get("BAGUA_SOCKET_IFNAME")
    total = 0
    with open("/proc/net/dev") as file:
        for line in file.readlines()[2:]:
            interface, _, counts = line.partition(":")
            if interface.strip() == chosen or (chosen is None and interface.strip() != "lo"):
                total += int(counts.split()[8])
    return total


def bound_s(result: Result, compute_s: float, rate_mbit: float) -> float:
    """What no implementation can beat that sends these bytes: seconds per step.

    A byte of a bucket leaves when the bucket's gradients are ready, not before; the link carries `rate_mbit`; compute takes
    what it takes.
    """
    wire_s = result.wire_bytes * 8 / (rate_mbit * 1e6)
    if result.overlap == "nothing":
        return compute_s + wire_s
    if result.overlap == "step":
        return max(compute_s, wire_s)
    at = 0.0
    for ready_s, part in result.buckets:
        at = max(at, ready_s) + part * wire_s
    return max(at, compute_s)
