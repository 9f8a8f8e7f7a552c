"""The measurements of a rank: one model under every system, torch's and ours, and the times when gradients are ready.

A system is written as on the command line: `ddp`, `ddp_fp16`, `ddp_bf16`, `ddp_minmax_uint8` (bagua.ddp.comm_hook), or
an algorithm, with options: `qsgd:bits=4`, `ddp:bucket_cap_mb=2.5`, `auto:risk=R2`. Compute is a sleep, so the optimizer
does nothing, as a device would run it; only `qadam` and `zero_one_adam` have their own, whose time counts. With
`overlap=False` an algorithm that exchanges gradients copies them into its buckets and begins when backward has ended.
"""

from __future__ import annotations

import ast
import gc
import inspect
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import bagua
from bagua import config
from bagua.replay.disturbance import Stolen, least_disturbed
from bagua.replay.profiles import Profile, SleepingModel
from bagua.replay.sent_bytes import sent_bytes
from bagua.replay.verification import Verification

ALONE = "compute alone"
AUTO = "auto"  # which trains until it has chosen, before it is measured


def _bf16_hook(state, bucket):
    """Does what torch's bf16_compress_hook does, which refuses gloo. torch would check annotations, so it has none."""
    gradients = bucket.buffer()
    cast = gradients.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(cast, async_op=True)
    return work.get_future().then(lambda done: gradients.copy_(done.value()[0]))


# Functions that make the communication hook: of torch's own systems, the baselines, and of all under DDP.
DDP_HOOKS: dict[str, Callable | None] = {
    "ddp": None,
    "ddp_fp16": lambda: default_hooks.fp16_compress_hook,
    "ddp_bf16": lambda: _bf16_hook,
}
HOOKS = {**DDP_HOOKS, "ddp_minmax_uint8": bagua.ddp.comm_hook}
# The options of with_bagua, and those of DDP that can be used alone, with their expected values.
_ON, _POSITIVE, _POSITIVE_INTEGER = "True or False", "a number of more than 0", "an integer of at least 1"
_WRAP_OPTIONS = {"bucket_bytes": _POSITIVE_INTEGER, "find_unused_parameters": _ON, "broadcast_buffers": _ON}
_DDP_PARAMETERS = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters.values()
_DDP_OPTIONS = {p.name: _ON for p in _DDP_PARAMETERS if type(p.default) is bool}
_DDP_OPTIONS |= {"bucket_cap_mb": _POSITIVE, "broadcast_buffers": _ON}
# These algorithms exchange weights while compute continues; other weight algorithms wait for the whole exchange.
_UNDER_COMPUTE = ("decentralized", "async_averaging")
_ENOUGH_S = 8.0  # seconds of samples, if steps are slow
_LONG_STEP_S = 0.5  # a sample is one such step; shorter ones are timed together, because ranks begin at different times
_SHORT_STEPS = 4
_CHOSEN_AFTER = 1000  # steps at most
_WARM_FROM_S = 3.0  # steps that take this long need only one warm-up step
_ROUNDS = 3  # rounds of async, one sample each
# A measurement is repeated above these shares.
_MOST_STOLEN = 0.1  # of processor time, taken by the hypervisor
_WITH_QADAM = ("qadam", "zero_one_adam")
_MOST_SLEPT = 0.05  # of the profile's step, by which compute alone (sleeping) took longer


class NoOptimizer(torch.optim.Optimizer):
    """An optimizer whose step does nothing, as if an accelerator ran it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})  # of which `slowmo` asks

    def step(self, closure: None = None) -> None:
        """Does nothing."""


@dataclass
class Result:
    """The measurements of one system on one rank.

    Attributes:
        system: the system's name, with options.
        step_s: seconds per step, one sample per block of steps.
        wire_bytes: bytes per step that this rank's host has sent.
        processor_s: seconds per step of processor time of this rank's threads, including the kernel's.
        waiting_s: mean seconds that a step waited, from bagua's timeline; None for DDP.
        ready: for gradients, in the order in which they become ready: seconds from the beginning of a step without
            communication, and the gradient's share of all bytes.
        overlap: the part of a step that may overlap with an exchange: "backward", as gradients become ready, "step",
            or "nothing".
        period: steps from one exchange to the next; `wire_bytes` and `step_s` are means over them. 1 if it is not a
            number of steps, as for async.
        stolen: the share of this machine's processor time that the hypervisor took, between 0 and 1.
        chose: under `auto`: the choice as text, and the steps and seconds until it was made.
    """

    system: str
    step_s: list[float]
    wire_bytes: float
    processor_s: float = 0.0
    waiting_s: float | None = None
    ready: list[tuple[float, float]] = field(default_factory=list)
    overlap: str = "backward"
    period: int = 1
    stolen: float = 0.0
    chose: str = ""


def parse(system: str) -> tuple[str, dict[str, Any]]:
    """Splits a system such as `qsgd:bits=4,error_feedback=True` into its name and options."""
    name, _, text = system.partition(":")
    options = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value
    return name, options


def check(system: str) -> None:
    """Raises InvalidArgument for a system that no rank can play: an unknown name or option, or a value out of range."""
    name, options = parse(system)
    if name in HOOKS:
        for option in options:
            if option not in _DDP_OPTIONS:
                known = ", ".join(sorted(_DDP_OPTIONS))
                raise bagua.InvalidArgument(f"unknown option {option!r} for torch's DDP; its options here: {known}")
        _check_values(options, _DDP_OPTIONS)
        return
    _check_values(options, {**_WRAP_OPTIONS, "overlap": _ON})
    if name == AUTO:
        if unknown := options.keys() - {"risk", *_WRAP_OPTIONS}:
            raise bagua.InvalidArgument(f"unknown option {min(unknown)!r} for auto; its option is risk")
        if options.get("risk", "R1") not in ("R0", "R1", "R2", "R3"):
            raise bagua.InvalidArgument(f"risk is {options['risk']!r}, expected R0, R1, R2 or R3")
        return
    algorithm = _algorithm_of(name, options)
    goes_on = inspect.isgeneratorfunction(algorithm.communicate)
    if "overlap" in options and (algorithm.exchanges != "gradients" or name in _WITH_QADAM or goes_on):
        raise bagua.InvalidArgument(
            "option overlap is for algorithms that exchange gradients, each bucket in one go, and leave the step to "
            "any optimizer; drop it"
        )
    if options.get("broadcast_buffers") and not algorithm.is_lockstep:
        raise bagua.InvalidArgument("broadcast_buffers=True is for algorithms whose ranks step together; drop it")
    algorithm.check([optimizer_of(name, [torch.nn.Parameter(torch.zeros(1))])])


def check_scaled(system: str, profile: Profile, scale: float) -> None:
    """Raises InvalidArgument if an algorithm sends the scaled parameters in another way than the original ones.

    The times would be wrong: powersgd, for one, has no thin factors of a matrix of a single column.
    """
    name, options = parse(system)
    if name in HOOKS or name == AUTO:  # that one chooses for the scaled model
        return
    algorithm = _algorithm_of(name, options)
    for layer, scaled in zip(profile.layers, profile.scaled(scale).layers, strict=True):
        dtype = getattr(torch, layer.dtype)
        for shapes in zip(layer.parameters, scaled.parameters, strict=True):
            kinds = [
                algorithm.bucket_class(torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
                for shape in shapes
            ]
            if kinds[0] != kinds[1]:
                raise bagua.InvalidArgument(
                    f"at scale {scale:g} it would not play what {name} does: parameters of {shapes[0]} in layer "
                    f"{layer.name!r} become {shapes[1]}, which it sends in another way; play it at scale 1"
                )


def _algorithm_of(name: str, options: dict[str, Any]) -> bagua.algorithms.Algorithm:
    own = {option: value for option, value in options.items() if option not in (*_WRAP_OPTIONS, "overlap")}
    return bagua.algorithms.create(name, own)


def _check_values(options: dict[str, Any], known: dict[str, str]) -> None:
    """Raises InvalidArgument for a value that differs from the expectation in `known`."""
    for option, value in options.items():
        expected = known.get(option)
        is_good = {
            None: True,
            _ON: type(value) is bool,
            _POSITIVE_INTEGER: type(value) is int and value >= 1,
            _POSITIVE: type(value) in (int, float) and 0 < value < math.inf,
        }[expected]
        if not is_good:
            raise bagua.InvalidArgument(f"option {option} is {value!r}, expected {expected}")


@dataclass(frozen=True)
class Position:
    """The position of this rank among those of a launcher."""

    rank: int
    num_hosts: int
    ranks_per_host: int


@dataclass(frozen=True)
class Task:
    """The measurements that every rank takes.

    Attributes:
        profile: the path of a profile.
        scale: the scale of the parameters.
        rate_mbit: the rate of every host's link; None if unknown.
        systems: systems to measure, after compute alone.
        samples: the maximum number of samples of each.
        turns: the number of times that all are measured.
    """

    profile: str
    scale: float
    rate_mbit: float | None
    systems: Sequence[str]
    samples: int
    turns: int = 1


def initialise(timeout_s: float = 120.0) -> None:
    """Initialises gloo and bagua in this process, from the environment that a launcher sets."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", timeout=timeout)
    bagua.init_process_group(timeout=timeout)


def destroy() -> None:
    """Destroys the groups of gloo and bagua."""
    bagua.barrier()
    bagua.destroy_process_group()
    dist.destroy_process_group()


def measure(**task: Any) -> list[dict]:
    """Measures a `Task` on a rank; returns `Result`s as dicts, compute alone first."""
    initialise(timeout_s=300)
    results = _measure_all(Task(**task))
    destroy()
    return results


def measure_here(tasks: Sequence[Task]) -> tuple[Position, list[list[list[dict]]]]:
    """Measures tasks on a rank of a launcher; returns the results of all ranks, by task and rank."""
    initialise(timeout_s=300)
    local = bagua.get_local_world_size()
    position = Position(bagua.get_rank(), bagua.get_world_size() // local, local)
    if position.num_hosts > 1 and config.settings().interface is None:
        raise bagua.InvalidArgument(
            "BAGUA_SOCKET_IFNAME is not set; name the interface between the hosts, whose bytes are counted "
            "(bagua run --interface eth0)"
        )
    per_task = [bagua.get_default_group().all_gather_plain(_measure_all(task)) for task in tasks]
    destroy()
    return position, per_task


def _measure_all(task: Task) -> list[dict]:
    torch.manual_seed(bagua.get_rank())
    model = SleepingModel(Profile.load(task.profile).scaled(task.scale))
    profile_s = (model.profile.forward_ms + model.profile.backward_ms) / 1e3

    def disturbance(slept_s: float, stolen: float = 0.0) -> float:
        here = max((slept_s - profile_s) / max(_MOST_SLEPT * profile_s, 1e-3), stolen / _MOST_STOLEN)
        return max(bagua.get_default_group().all_gather_plain(here))

    def disturbance_of(result: Result) -> float:
        return disturbance(statistics.median(result.step_s) if result.system == ALONE else 0.0, result.stolen)

    ready = least_disturbed(lambda: _ready_times(model), lambda times: disturbance(max(times.values())))
    results: dict[str, list[Result]] = {}
    for _ in range(task.turns):
        for system in (ALONE, *task.systems):
            taken = least_disturbed(lambda system=system: _measure(system, model, ready, task), disturbance_of)
            results.setdefault(system, []).append(taken)
    return [asdict(_merged(of_turns)) for of_turns in results.values()]


def _merged(of_turns: Sequence[Result]) -> Result:
    waiting = [result.waiting_s for result in of_turns if result.waiting_s is not None]
    return replace(
        of_turns[0],
        step_s=[sample for result in of_turns for sample in result.step_s],
        wire_bytes=statistics.mean(result.wire_bytes for result in of_turns),
        processor_s=statistics.mean(result.processor_s for result in of_turns),
        waiting_s=statistics.mean(waiting) if waiting else None,
        stolen=max(result.stolen for result in of_turns),
    )


def _measure(system: str, model: SleepingModel, ready: dict[int, float], task: Task) -> Result:
    step = _step_of(system, model)
    chose = _choose(step, model) if parse(system)[0] == AUTO else ""
    handle = getattr(model, "bagua", None)
    options = handle.algorithm.options() if handle is not None else {}
    name = handle.algorithm.name if handle is not None else parse(system)[0]  # not an abbreviation of it
    exchanges = handle.algorithm.exchanges if handle is not None else "gradients"
    verification = Verification(name, options, model, exchanges) if system != ALONE else None
    period = 1
    if name == "async_averaging":
        round_bytes = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        link_s = round_bytes * 8 / (task.rate_mbit * 1e6) if task.rate_mbit is not None else 0.0
        round_s = max(options["sync_interval"], link_s)
        taken = _time_rounds(step, math.ceil(round_s / max(ready.values())))
    else:
        # A sample is a whole number of periods, each of which has one exchange.
        period = max(options.get("sync_every", 1), options.get("interval", 1))
        taken = _time(step, period, task.samples)
    if verification is not None:
        verification.end()
    result = Result(
        system, taken.step_s, taken.wire_bytes, taken.processor_s, period=period, stolen=taken.stolen, chose=chose
    )
    if exchanges == "gradients":
        result.ready = _ready_parts(model, ready)
    else:
        result.overlap = "step" if name in _UNDER_COMPUTE else "nothing"
    if handle is not None:
        records = handle.timeline().steps[-taken.num_steps :]
        if records:
            result.waiting_s = statistics.mean(record.exposed_ns / 1e9 for record in records)
        handle.remove()
    del step  # removes DDP's hooks
    gc.collect()
    model.zero_grad()
    return result


def _step_of(system: str, model: SleepingModel) -> Callable[[], None]:
    """Returns a training step under a system."""
    name, options = parse(system)
    overlaps = options.pop("overlap", True)
    parameters = list(model.parameters())
    optimizer = optimizer_of(name, parameters)
    forward: torch.nn.Module = model
    if name in HOOKS:
        defaults = {"gradient_as_bucket_view": True, "init_sync": False}  # torch 2.4 has no init_sync
        options = {name: value for name, value in defaults.items() if name in _DDP_OPTIONS} | options
        forward = torch.nn.parallel.DistributedDataParallel(model, **options)
        if HOOKS[name] is not None:
            forward.register_comm_hook(None, HOOKS[name]())
    elif name != ALONE:
        bagua.with_bagua(model, optimizer, algorithm=name, **options)

    def step() -> None:
        optimizer.zero_grad()
        forward().backward()
        optimizer.step()

    group = None if overlaps else bagua.algorithms.BucketGroup(bagua.get_default_group(), lambda *_: None)

    def step_in_turn() -> None:
        optimizer.zero_grad()
        with model.bagua.no_sync():
            forward().backward()
        for bucket in model.bagua.buckets:
            bucket.begin(None, lambda: None)
            group.begin(bucket)
            model.bagua.algorithm.communicate(bucket, group)
            group.pause()
        for work in (work for bucket in model.bagua.buckets for work in bucket.works):
            work.wait()  # no optimizer step follows: it would be refused, and NoOptimizer's does nothing

    return step if overlaps else step_in_turn


def _choose(step: Callable[[], None], model: SleepingModel) -> str:
    """Trains until `auto` has chosen."""
    begin = time.perf_counter()
    for num_steps in range(1, _CHOSEN_AFTER + 1):
        step()
        if model.bagua.choice is not None:
            return f"after {num_steps} steps and {time.perf_counter() - begin:.2f} s: {model.bagua.choice}"
    raise RuntimeError(f"auto has not chosen after {_CHOSEN_AFTER} steps")


def optimizer_of(name: str, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer for the system of that name."""
    if name in _WITH_QADAM:
        return bagua.optim.QAdam(parameters, lr=1e-6, eps=1.0, warmup_steps=1)
    return NoOptimizer(parameters)


@dataclass(frozen=True)
class _Taken:
    """The part of a `Result` that samples measure, and the number of their steps."""

    step_s: list[float]
    wire_bytes: float
    processor_s: float
    stolen: float
    num_steps: int


def _time(step: Callable[[], None], period: int, samples: int) -> _Taken:
    """Takes samples of one or more periods, after warming up."""
    took_s = bagua.get_default_group().broadcast_plain(_seconds_of(step, period), 0)
    if took_s < _WARM_FROM_S:  # the first period opens connections, and buckets are planned anew after the first step
        took_s = bagua.get_default_group().broadcast_plain(_seconds_of(step, period), 0)
    block = period if took_s >= _LONG_STEP_S else period * math.ceil(_SHORT_STEPS / period)
    samples = min(samples, max(3, round(_ENOUGH_S / (took_s * block / period))))
    return _samples(step, block, samples)


def _time_rounds(step: Callable[[], None], block: int) -> _Taken:
    """Takes samples of steps with rounds in the background: a sample has as many steps as a round takes at least."""
    _seconds_of(step, block)
    return _samples(step, block, _ROUNDS)


def _samples(step: Callable[[], None], block: int, samples: int) -> _Taken:
    bagua.barrier()
    sent_before, worked_before, stolen = sent_bytes(), time.process_time(), Stolen()
    step_s = [_seconds_of(step, block) / block for _ in range(samples)]
    bagua.barrier()
    num_steps = block * samples
    wire_bytes = (sent_bytes() - sent_before) / num_steps
    processor_s = (time.process_time() - worked_before) / num_steps
    return _Taken(step_s, wire_bytes, processor_s, stolen.share(), num_steps)


def _seconds_of(step: Callable[[], None], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        step()
    return time.perf_counter() - begin


def _ready_times(model: SleepingModel) -> dict[int, float]:
    """Returns the seconds after which each gradient is ready, by parameter id, in medians of five local steps."""
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


def _ready_parts(model: torch.nn.Module, ready: dict[int, float]) -> list[tuple[float, float]]:
    """Returns `Result.ready`, given the seconds at which gradients become ready, by parameter id."""
    num_bytes = sum(p.nbytes for p in model.parameters())
    in_order = sorted(model.parameters(), key=lambda p: ready[id(p)])
    return [(ready[id(p)], p.nbytes / num_bytes) for p in in_order]
