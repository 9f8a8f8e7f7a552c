"""What replay.py measures on a rank: one model under every system, torch's and ours, and the bound for each.

A system is named as it is chosen: `ddp`, `ddp_fp16`, `ddp_bf16`, or an algorithm with options, `qsgd:bits=4`. Compute
is a sleep, so the optimizer is one that does nothing (a device's); `qadam` alone brings its own, whose time counts.
With `overlap=False` among the options an algorithm that exchanges gradients begins when backward has ended.
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


def _bf16_hook(state, bucket):
    """torch's bf16_compress_hook, which refuses gloo; without annotations, which torch compares to its own."""
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
_ENOUGH_S = 8.0  # of blocks, where a link is slow


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


@dataclass(frozen=True)
class Place:
    """Where this rank is among those that a launcher has started."""

    rank: int
    num_hosts: int
    ranks_per_host: int


def is_launched() -> bool:
    """Whether a launcher such as torchrun has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def measure(profile: str, scale: float, systems: Sequence[str], blocks: int, turns: int) -> list[dict]:
    """On a rank: `Result`s as dicts, compute alone first."""
    initialise(timeout_s=300)
    results = _measure_all(profile, scale, systems, blocks, turns)
    destroy()
    return results


def measure_here(
    profile: str, scale: float, systems: Sequence[str], blocks: int, turns: int
) -> tuple[Place, list[list[dict]]]:
    """On a rank of a launcher: what all ranks have measured, by rank."""
    initialise(timeout_s=300)
    local = bagua.get_local_world_size()
    place = Place(bagua.get_rank(), bagua.get_world_size() // local, local)
    per_rank = bagua.all_gather_object(_measure_all(profile, scale, systems, blocks, turns))
    destroy()
    return place, per_rank


def _measure_all(profile: str, scale: float, systems: Sequence[str], blocks: int, turns: int) -> list[dict]:
    torch.manual_seed(bagua.get_rank())
    model = SleepingModel(Profile.load(profile).scaled(scale))
    ready = _ready_times(model)
    results: dict[str, Result] = {}
    for _ in range(turns):
        for system in (ALONE, *systems):
            result = _measure(system, model, ready, blocks)
            earlier = results.setdefault(system, result)
            if earlier is not result:
                earlier.step_s += result.step_s
    return [asdict(result) for result in results.values()]


def _measure(system: str, model: SleepingModel, ready: dict[int, float], blocks: int) -> Result:
    step = _step_of(system, model)
    handle = getattr(model, "bagua", None)
    options = handle.algorithm.options() if handle is not None else {}
    # What is not done in every step is done once in a block.
    block = max(2, options.get("sync_every", 1), options.get("interval", 1))
    samples, wire_bytes = _time(step, block, blocks)
    result = Result(system, samples, wire_bytes)
    if handle is None:
        in_order = sorted(model.parameters(), key=lambda p: ready[id(p)])
        result.buckets = _parts([([p], p.numel()) for p in in_order], ready)
    else:
        if handle.algorithm.exchanges == "gradients":
            result.buckets = _parts([([m.parameter for m in b.members], b.num_bytes) for b in handle.buckets], ready)
        else:
            result.overlap = "step" if handle.algorithm.name in _UNDER_COMPUTE else "nothing"
        records = handle.timeline().steps[-block * len(samples) :]
        if records:
            result.waiting_s = statistics.median(record.exposed_ns / 1e9 for record in records)
        handle.remove()
    del step  # DDP's hooks go with it
    gc.collect()
    model.zero_grad()
    return result


def _step_of(system: str, model: SleepingModel) -> Callable[[], None]:
    """A training step under a system."""
    name, options = parse(system)
    overlaps = options.pop("overlap", True)
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = NoOptimizer(parameters)
    forward: torch.nn.Module = model
    if name in DDP_HOOKS:
        forward = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, init_sync=False)
        if DDP_HOOKS[name] is not None:
            forward.register_comm_hook(None, DDP_HOOKS[name])
    elif name != ALONE:
        if name == "qadam":
            optimizer = bagua.optim.QAdam(parameters, lr=1e-6, eps=1.0, warmup_steps=1)
        bagua.with_bagua(model, optimizer, algorithm=name, **options)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    def step_in_turn() -> None:
        optimizer.zero_grad()
        with model.bagua.no_sync():
            forward().backward()
        algorithm, group = model.bagua.algorithm, bagua.get_default_group()
        works = [algorithm.communicate(bucket, group) for bucket in model.bagua.buckets]
        for work in works:
            work.wait()
        optimizer.step()

    return step if overlaps else step_in_turn


def _time(step: Callable[[], None], block: int, blocks: int) -> tuple[list[float], float]:
    """Seconds per step, a sample per block of steps, and the bytes per step that this host has sent."""

    def run_block() -> float:
        begin = time.perf_counter()
        for _ in range(block):
            step()
        return time.perf_counter() - begin

    run_block()  # connections; buckets are laid out anew after the first step
    bagua.barrier()
    sent_before = _interface_bytes()
    samples = [run_block() / block]
    took_s = bagua.broadcast_object(samples[0] * block, 0)
    blocks = min(blocks, max(2, round(_ENOUGH_S / took_s)))
    samples += [run_block() / block for _ in range(blocks - 1)]
    bagua.barrier()
    return samples, (_interface_bytes() - sent_before) / (block * blocks)


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

    A byte of a bucket leaves when the bucket's gradients are ready, not before; the link carries `rate_mbit`; compute
    takes what it takes.
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
