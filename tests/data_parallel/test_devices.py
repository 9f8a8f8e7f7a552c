"""Training on a device: nothing in backward or step waits for it, and what is not finite comes out late, or in time."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import threading
import weakref
from typing import NamedTuple

import pytest
import torch

import bagua
import tests.emulated_device as emulated
from bagua.data_parallel.loss_scale import LossScale
from bagua.distributed import devices
from bagua.distributed.devices import HostCopy
from bagua.distributed.work import Work
from bagua.testing import world as thread_world
from tests import accelerator
from tests.distributed.worlds import tcp
from tests.warned import warned

_seeding = threading.Lock()  # ranks that are threads share torch's generator


def _in_group(rank, world_size, check, args):
    """Ranks that share a device are processes: autograd has one thread for all that a process has on one."""
    bagua.init_process_group(timeout=20)
    try:
        return check(bagua.get_default_group(), *args)
    finally:
        bagua.destroy_process_group()


def _make(group, kind, **options):
    """A model with several buckets, and its optimizer."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    model.to(device, options.pop("dtype", None))
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, bucket_bytes=64 << 10, **options)
    assert len(model.bagua.buckets) > 1
    return model, optimizer, device


def _inputs(rank, step, device):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def _weights(model):
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def _fused_qadam(parameters, lr):
    return bagua.optim.QAdam(parameters, lr, warmup_steps=2, fused=True)


def _decaying_qadam(parameters, lr):
    return bagua.optim.QAdam(parameters, lr / 50, warmup_steps=2, weight_decay=0.1, fused=True)


ALGORITHMS = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "qsgd": {"error_feedback": True},
}
OTHERS = {
    "qadam": {"optimizer": _fused_qadam, "min_compressed_bytes": 0},
    "powersgd": {},
}
# What they remember of gradients has the scale of a GradScaler.
REMEMBERING = {
    "onebit": {"algorithm": "bytegrad", "codec": "onebit", "error_feedback": True, "min_compressed_bytes": 0},
    "bfloat16": {"algorithm": "bytegrad", "error_feedback": True, "state_dtype": "bfloat16"},
    "qsgd": {"error_feedback": True},
    "powersgd": {},
    "qadam": {"optimizer": _decaying_qadam, "codec": "onebit", "min_compressed_bytes": 0},
}
OF_WEIGHTS = {"decentralized": {}, "low_precision_decentralized": {}, "local_sgd": {"sync_every": 2}}


# ---- nothing waits


_waits_of_work = []  # by the core, which the device's own counter does not see


def _counting(is_found_finite):
    def count(work):
        _waits_of_work.append(work.label)
        return is_found_finite(work)

    return count


def _check_waits(group, nonfinite_check, algorithms):
    barrier = group.barrier
    for algorithm in algorithms:
        options = {**(ALGORITHMS | OTHERS | OF_WEIGHTS)[algorithm], "nonfinite_check": nonfinite_check}
        model, optimizer, device = _make(group, emulated.NAME, algorithm=algorithm, **options)
        for step in range(5 if algorithm == "qadam" else 3):
            loss = model(_inputs(group.rank, step, device)).square().mean()
            optimizer.zero_grad()
            barrier().wait()
            if group.rank == 0:
                emulated.reset_counters()
                _waits_of_work.clear()
            barrier().wait()
            loss.backward()
            optimizer.step()
            barrier().wait()
            waits = emulated.counters()["num_host_waits"] + len(_waits_of_work)
            assert (waits > 0) == (nonfinite_check == "sync"), (
                f"{algorithm}, step {step}: the host waited {waits} times"
            )
            barrier().wait()
        model.bagua.remove()


def test_neither_backward_nor_step_waits_for_the_device(alone_on_emulated):
    """Unless it is asked to: the same counter sees it."""
    alone_on_emulated.run(_count_waits)


def _count_waits(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "is_found_finite", _counting(Work.is_found_finite))
        thread_world(2, _check_waits, "late", (*ALGORITHMS, *OTHERS, *OF_WEIGHTS))
        thread_world(2, _check_waits, "sync", ("bytegrad", "qsgd", "low_precision_decentralized"))
    for optimizer in (torch.optim.SGD, _Fused):
        thread_world(2, _check_scaled_waits, OF_WEIGHTS, optimizer, (1, 1, 1))
    of_gradients = {name: options for name, options in REMEMBERING.items() if name != "qadam"}
    thread_world(2, _check_scaled_waits, of_gradients, torch.optim.SGD, (1, 1, 1))
    thread_world(2, _check_scaled_waits, of_gradients, _Fused, (0, 0, 0))
    with_qadam = {"qadam": REMEMBERING["qadam"]}
    thread_world(2, _check_scaled_waits, with_qadam, _fused_qadam, (0, 1, 0, 0))  # once, where the warm-up ends


def _check_scaled_waits(group, algorithms, optimizer_class, all_looks):
    """Looks in each step: torch's own unless the optimizer is fused, and one where weights are exchanged."""
    barrier = group.barrier
    for algorithm, options in algorithms.items():
        model, optimizer, device = _make(
            group, emulated.NAME, **{"algorithm": algorithm, **options, "optimizer": optimizer_class}
        )
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
        for step, num_looks in enumerate(all_looks):
            optimizer.zero_grad()
            loss = model(_inputs(group.rank, step, device)).square().mean()
            counts = []
            for part in (scaler.scale(loss).backward, functools.partial(scaler.step, optimizer)):
                barrier().wait()
                if group.rank == 0:
                    emulated.reset_counters()
                barrier().wait()
                part()
                barrier().wait()
                counts.append(emulated.counters()["num_host_waits"])
                barrier().wait()  # before another rank's update() waits
            assert counts == [0, group.size * num_looks], (algorithm, step, counts)
            scaler.update()
        model.bagua.remove()


def _count_copies(rank, world_size):
    """Gradients that are sent in full move into their bucket together, and their own memory is free from then on."""
    copied = []

    def count(views, gradients, copy=torch._foreach_copy_):
        copied.append(len(views))
        copy(views, gradients)

    bagua.init_process_group(timeout=20)
    device = accelerator.use_device_of(rank)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(24))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, algorithm="gradient_allreduce", bucket_bytes=20 << 10)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32, device=device)).square().mean()
        with pytest.MonkeyPatch.context() as patch, accelerator.delayed(0.02):
            patch.setattr(torch, "_foreach_copy_", count)
            copied.clear()
            loss.backward()
        sizes = [len(bucket.members) for bucket in model.bagua.buckets]
        assert step == 0 or (sorted(copied) == sorted(sizes) and len(sizes) > 4)
        assert not model.bagua.step._zero_copy._in_place
    bagua.destroy_process_group()


def test_all_gradients_of_a_bucket_are_copied_together(pair_on_devices):
    pair_on_devices.run(_count_copies)


def _count_reports(rank, world_size, is_scaled):
    """How often something comes to the host that it hears late: whether gradients, weights and steps were finite."""
    sent = []

    def count(device, send=devices._send_unsent):
        sent.append(len(devices._unsent[device]))
        send(device)

    of_gradients = {"gradient_allreduce": {}, "bytegrad": {}, **REMEMBERING}
    of_weights = {} if is_scaled else OF_WEIGHTS  # under a scaler they look, and wait
    for name, options in (of_gradients | of_weights).items():
        bagua.init_process_group(timeout=20)
        kinds = {"dtype": torch.float16} if name in ("bytegrad", "bfloat16") and not is_scaled else {}
        model, optimizer, device = _make(
            bagua.get_default_group(), accelerator.kind(), **{"algorithm": name, **options}, **kinds
        )
        scaler = torch.amp.GradScaler(device.type, init_scale=8.0, enabled=is_scaled)
        counts = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(devices, "_send_unsent", count)
            for step in range(5):
                sent.clear()
                optimizer.zero_grad()
                loss = model(_inputs(rank, step, device).to(next(model.parameters()).dtype)).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                counts.append(tuple(sent))
        expected = [int(name not in ("gradient_allreduce", "decentralized", "local_sgd"))] * 5
        if name == "qadam" and rank == 0:
            expected[2] += 1  # how far the first step after the warm-up has gone, for its warnings
        assert [*map(len, counts)] == expected, (name, counts)
        assert not devices._unsent, name
        bagua.destroy_process_group()


@pytest.mark.parametrize("is_scaled", [False, True])
def test_what_the_host_hears_late_is_one_copy_per_step(pair_on_devices, is_scaled):
    pair_on_devices.run(_count_reports, args=(is_scaled,))


def _travel_together(rank, world_size):
    """Numbers of several widths and shapes, made on two streams while the device is late, and one that is dropped."""
    device = accelerator.use_device_of(rank)
    expected = [
        torch.tensor(True),
        torch.tensor([1.5, -2.0], dtype=torch.float64),
        torch.tensor([[3], [5]], dtype=torch.uint8),
        torch.tensor(float("inf")),
        torch.empty(0, 3),
        torch.tensor([7, 9], dtype=torch.int64),
    ]
    side = torch.Stream(device)
    for _ in range(5):
        with accelerator.delayed(0.01):
            copies = []
            for number, values in enumerate(expected):
                side.wait_stream(devices.current_torch_stream(device))
                with devices.on_stream(side) if number % 2 else contextlib.nullcontext():
                    copies.append(HostCopy(values.to(device) + torch.zeros((), dtype=values.dtype, device=device)))
            del copies[3]
            early = HostCopy(torch.ones(2, device=device), at_once=True)
            assert HostCopy.of(copies[0]._tensor) is not copies[0]  # of nobody's
            devices.send_host_copies()
        found = [copy.get() for copy in copies]
        for values, got in zip(expected[:3] + expected[4:], found, strict=True):
            assert torch.equal(values, got) and values.dtype == got.dtype and values.shape == got.shape
        assert early.get().tolist() == [1.0, 1.0]
        shared = torch.ones((), device=device)
        first = HostCopy.of(shared)
        assert HostCopy.of(shared) is first and first.get() == 1 and HostCopy.of(shared) is first
        shared.add_(1)
        assert HostCopy.of(shared) is not first and HostCopy.of(shared).get() == 2 and first.get() == 1


def test_numbers_that_travel_together(pair_on_devices):
    pair_on_devices.run(_travel_together)


# ---- streams


class _OnTwoStreams(torch.nn.Module):
    """Computes with one layer on a stream of its own."""

    def __init__(self):
        super().__init__()
        self.here, self.there = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.side = None

    def forward(self, x):
        if x.is_cpu:
            return self.here(x) + self.there(x)
        self.side = self.side or torch.Stream(x.device)
        current = torch.accelerator.current_stream()
        self.side.wait_stream(current)
        x.record_stream(self.side)
        with self.side:
            y = self.there(x)
        y.record_stream(current)
        z = self.here(x)
        current.wait_stream(self.side)
        return z + y


def _train_on_streams(group, kind, algorithm):
    """Two layers in a bucket, and forward on another stream than backward."""
    device = torch.device("cpu")
    if kind == emulated.NAME:
        torch.accelerator.set_device_index(group.rank)
        device = torch.device(kind, group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = _OnTwoStreams()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, algorithm=algorithm)
    side = contextlib.nullcontext() if device.type == "cpu" else torch.Stream(device)
    for step in range(6):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        if device.type != "cpu":
            side.wait_stream(torch.accelerator.current_stream())
            x.record_stream(side)
        with side:
            loss = model(x).square().mean()
        if device.type != "cpu":
            torch.accelerator.current_stream().wait_stream(side)
        loss.backward()
        optimizer.step()
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_on_streams(group, algorithm):
    with emulated.delayed(0.005):
        on_cpu, on_device = (_train_on_streams(group, kind, algorithm) for kind in ("cpu", emulated.NAME))
    assert all(map(torch.equal, on_cpu, on_device))


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "powersgd"])
def test_gradients_of_a_bucket_come_from_several_streams(pair_on_emulated, algorithm):
    pair_on_emulated.run(_in_group, args=[_compare_on_streams, (algorithm,)])


class _LastLayerFirst(torch.nn.Sequential):
    """Its gradients are ready in the order of registration, so its buckets are laid out anew after the first step."""

    def forward(self, x):
        return self[0](torch.tanh(self[1](x)))


def _train_on_changing_streams(group, kind, algorithm, options):
    """Each backward but the first begins on a side stream."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = _LastLayerFirst(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, algorithm=algorithm, **options)
    side = None if device.type == "cpu" else torch.Stream(device)
    for step in range(3):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        if side is None or step == 0:
            loss = model(x).square().mean()
        else:
            side.wait_stream(torch.accelerator.current_stream())
            x.record_stream(side)
            with side:
                loss = model(x).square().mean()
            torch.accelerator.current_stream().wait_stream(side)
            loss.record_stream(torch.accelerator.current_stream())
        loss.backward()
        optimizer.step()
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_on_changing_streams(group):
    feedback = {"error_feedback": True, "min_compressed_bytes": 0}
    for algorithm, options in {"bytegrad": feedback, "powersgd": {}}.items():
        with emulated.delayed(0.001):
            of_cpu, of_device = (
                _train_on_changing_streams(group, kind, algorithm, options) for kind in ("cpu", emulated.NAME)
            )
        assert all(map(torch.equal, of_cpu, of_device)), algorithm


def test_what_an_algorithm_remembers_goes_from_stream_to_stream(pair_on_emulated):
    """What it has left in the memory of one stream is there until the other one has read it."""
    pair_on_emulated.run(_in_group, args=[_compare_on_changing_streams, ()])


# ---- nodes


def _train_in_two_nodes(rank, world_size):
    for options in ({}, {"error_feedback": True}):
        results = [thread_world(4, _train_hierarchically, kind, options, nodes=[0, 0, 1, 1]) for kind in _BOTH_KINDS]
        for on_cpu, on_device in zip(*results, strict=True):
            assert all(map(torch.equal, on_cpu, on_device)), options


_BOTH_KINDS = ("cpu", emulated.NAME)


def _train_hierarchically(group, kind, options):
    model, optimizer, device = _make(group, kind, algorithm="bytegrad", hierarchical=True, **options)
    for step in range(3):
        optimizer.zero_grad()
        model(_inputs(group.rank, step, device)).square().mean().backward()
        optimizer.step()
    weights = _weights(model)
    model.bagua.remove()
    return weights


@pytest.mark.parametrize("env", [accelerator.ON_DEVICE, {"BAGUA_THRESHOLDS": None}], ids=["on device", "by default"])
def test_nodes_of_two_ranks(alone_on_emulated, env):
    """Of which the leaders alone have residuals: all agree about who computes."""
    alone_on_emulated.run(_train_in_two_nodes, env=env)


# ---- torch.set_default_device


def _train_on_default_device(group):
    """The same weights as with the default."""
    found = []
    for is_default in (False, True):
        for algorithm, options in {**OTHERS, **OF_WEIGHTS}.items():
            torch.set_default_device(accelerator.use_device_of(group.rank) if is_default else None)
            try:
                bagua.broadcast_object({"a": 1} if group.rank == 0 else None, 0, group=group)
                model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm, **options)
                for step in range(3):
                    optimizer.zero_grad()
                    with torch.device("cpu"):
                        x = _inputs(group.rank, step, device)
                    model(x).square().mean().backward()
                    optimizer.step()
                    if step == 1:
                        model.bagua.load_state_dict(model.bagua.state_dict())
                model.bagua.remove()
            finally:
                torch.set_default_device(None)
            found.append(_weights(model))
    half = len(found) // 2
    assert all(all(map(torch.equal, *pair)) for pair in zip(found[:half], found[half:], strict=True))


def test_torchs_default_device_is_the_users(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_train_on_default_device, ()])


# ---- torch.compile


def _compile_and_train(rank, world_size, backend):
    bagua.init_process_group(timeout=20)
    try:
        group, found = bagua.get_default_group(), []
        for kind in ("cpu", accelerator.kind()):
            torch.compiler.reset()
            model, optimizer, device = _make(group, kind, algorithm="bytegrad")
            compiled = torch.compile(model, backend=backend)
            for step in range(3):
                optimizer.zero_grad()
                compiled(_inputs(rank, step, device)).square().mean().backward()
                optimizer.step()
            found.append(_weights(model))
            model.bagua.remove()
        return accelerator.agree(found[1], found[0])
    finally:
        bagua.destroy_process_group()


@pytest.mark.slow("test_over_processes")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model(pair_on_emulated, backend):
    assert pair_on_emulated.run(_compile_and_train, args=[backend], timeout=60) == [True, True]


@pytest.mark.gpu
@pytest.mark.slow("test_over_processes")
def test_a_compiled_model_on_a_gpu(device_pools):
    """By Inductor, whose kernels only a GPU has."""
    pair = device_pools(accelerator.CUDA, 2)
    assert pair.run(_compile_and_train, args=["inductor"], timeout=120) == [True, True]


# ---- models that are CUDA graphs


def _train_graphed(group, algorithm):
    """The weights after some steps of a model whose forward and backward are CUDA graphs, and of one as it is."""
    device, found = accelerator.use_device_of(group.rank), []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64)).to(device)
        if is_graphed:
            model = torch.cuda.make_graphed_callables(model, (_inputs(group.rank, 0, device),))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        bagua.with_bagua(model, optimizer, group=group, algorithm=algorithm, bucket_bytes=64 << 10)
        for step in range(4):
            optimizer.zero_grad()
            model(_inputs(group.rank, step, device)).square().mean().backward()
            optimizer.step()
        found.append(_weights(model))
        model.bagua.remove()
    assert accelerator.agree(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_a_graphed_model(device_pools, algorithm):
    device_pools(accelerator.CUDA, 2).run(_in_group, args=[_train_graphed, (algorithm,)])


# ---- NaN and infinity


def _train_through(group, kind, algorithm, options, scaled, bad_step=1, num_steps=4, **more):
    """Weights after each step; the gradient of rank 1 is infinite in one of them."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm, **options, **more)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=100) if scaled else None
    seen = []
    for step in range(num_steps):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        if step == bad_step and group.rank == 1:
            x = x * float("inf")
        loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        seen.append(_weights(model))
    model.bagua.remove()
    return seen


class _Fused(torch.optim.SGD):
    """As torch's fused optimizers: GradScaler always calls step, which looks at found_inf where the weights are."""

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None):
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for options in self.param_groups:
            for parameter in options["params"]:
                change = parameter.grad if scale is None else parameter.grad / scale
                change = options["lr"] * change
                if found_inf is not None:
                    change = torch.where(found_inf.to(parameter.device) > 0, torch.zeros_like(change), change)
                parameter.sub_(change)


def _skipped_steps(group, optimizer):
    different = []
    for algorithm, options in {**ALGORITHMS, "powersgd": {}, **OF_WEIGHTS}.items():
        of_cpu, of_device = (
            _train_through(group, kind, algorithm, options, scaled=True, optimizer=optimizer)
            for kind in ("cpu", accelerator.kind())
        )
        assert all(map(torch.equal, of_cpu[0], of_cpu[1])), "the step was not skipped on the CPU"
        assert not all(map(torch.equal, of_cpu[1], of_cpu[2]))
        if not all(map(accelerator.agree, of_device, of_cpu)):
            different.append(algorithm)
    return different


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, _Fused], ids=["plain", "fused"])
def test_a_step_that_a_scaler_skips_is_skipped_as_on_the_cpu(pair_on_devices, optimizer):
    """The states of error feedback too: the steps behind it show them."""
    assert pair_on_devices.run(_in_group, args=[_skipped_steps, [optimizer]]) == [[], []]


def _put_a_buffer_elsewhere(group):
    """On one rank a buffer is on another type of device: refused on all, who train on as they are wrapped."""
    model, optimizer, device = _make(group, accelerator.kind(), algorithm="gradient_allreduce")
    model.register_buffer("late", torch.ones(3, device="cpu" if group.rank == 0 else device))
    with pytest.raises(bagua.InvalidArgument, match="the ranks disagree about buffer 'late': rank 0 has .* on cpu"):
        bagua.with_bagua(model, optimizer, algorithm="bytegrad", group=group)
    model.late = model.late.to(device)
    model(_inputs(group.rank, 0, device)).square().mean().backward()
    optimizer.step()
    first, second = group.all_gather_plain([weight.tolist() for weight in _weights(model)])
    assert first == second


def test_a_buffer_that_one_rank_has_on_another_device(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_put_a_buffer_elsewhere, ()])


def _train_at_many_scales(group, kind, name, is_known):
    """Weights after each step, while the scale grows, falls and grows; and whether a backward's change was a tensor."""
    model, optimizer, device = _make(group, kind, **{"algorithm": name, **REMEMBERING[name]})
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    seen, are_tensors = [], []

    def noted(self, device, change=LossScale.change):
        ratio = change(self, device)
        are_tensors.append(isinstance(ratio, torch.Tensor))
        return ratio

    for step in range(9):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        losses = [model(x).square().mean() * (float("inf") if step in (4, 5) else 1)]
        if step == 6:
            losses.append(model(x + 1).square().mean())
        for loss in losses:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LossScale, "change", noted)
                if not is_known:  # as of a host far ahead of its device; the emulated one's operators wait for it
                    patch.setattr(HostCopy, "get_now", lambda _: None)
                scaled = scaler.scale(loss)
                if is_known and kind != "cpu":
                    torch.accelerator.synchronize()
                scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        seen.append(_weights(model))
    state = model.bagua.state_dict()
    model.bagua.remove()
    return seen, are_tensors, state["loss_scale"], state["state"].get("units")


def _many_scales(group, name):
    of_cpu, *of_device = (
        _train_at_many_scales(group, kind, name, is_known)
        for kind, is_known in (("cpu", True), (accelerator.kind(), True), (accelerator.kind(), False))
    )
    for (seen, are_tensors, *units), is_known in zip(of_device, (True, False), strict=True):
        assert all(map(accelerator.agree, seen, of_cpu[0])), is_known
        assert units == list(of_cpu[2:])
        assert any(are_tensors) == all(are_tensors) == (not is_known)


_SLOW = pytest.mark.slow("test_what_is_remembered_follows_a_scale_that_the_host_does_not_know")


@pytest.mark.parametrize(
    "name", [name if name in ("bfloat16", "qadam") else pytest.param(name, marks=_SLOW) for name in REMEMBERING]
)
def test_what_is_remembered_follows_a_scale_that_the_host_does_not_know(pair_on_devices, name):
    pair_on_devices.run(_in_group, args=[_many_scales, [name]])


def _know_by_rank(group, dtype):
    """The host of rank 1 is far ahead of its device, that of rank 0 is not; the scale takes no powers of two."""
    device = accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
    model.to(device, dtype)
    optimizer = bagua.optim.QAdam(model.parameters(), 1e-3, warmup_steps=2, weight_decay=0.1, fused=True)
    bagua.with_bagua(model, optimizer, group=group, algorithm="qadam", min_compressed_bytes=0)
    growth = {"init_scale": 2.0**10, "growth_factor": 1.5, "backoff_factor": 0.7, "growth_interval": 1}
    scaler = torch.amp.GradScaler(device.type, **growth)
    for step in range(8):
        optimizer.zero_grad()
        loss = model(_inputs(group.rank, step, device).to(dtype)).square().mean()
        scaled = scaler.scale(loss * float("inf") if step == 4 else loss)
        torch.accelerator.synchronize()
        with pytest.MonkeyPatch.context() as patch:
            if group.rank == 1:
                patch.setattr(HostCopy, "get_now", lambda _: None)
            scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        first, second = group.all_gather_plain([weight.tolist() for weight in _weights(model)])
        assert first == second, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_ranks_stay_equal_whichever_of_them_knows_the_scale(pair_on_devices, dtype):
    pair_on_devices.run(_in_group, args=[_know_by_rank, [dtype]])


def _backward_twice(group):
    """Of one loss, with a scale that only the device knows: the second one has nothing to multiply."""
    model, _, device = _make(group, accelerator.kind(), **{"algorithm": "qsgd", **REMEMBERING["qsgd"]})
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    ratios = []

    def noted(self, device, change=LossScale.change):
        ratios.append(change(self, device))
        return ratios[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossScale, "change", noted)
        patch.setattr(HostCopy, "get_now", lambda _: None)
        for _ in range(2):
            loss = scaler.scale(model(_inputs(group.rank, 0, device)).square().mean())
            loss.backward(retain_graph=True)
            loss.backward()
    kinds = [isinstance(ratio, torch.Tensor) for ratio in ratios]
    assert kinds == [True, False, True, False] and ratios[1] == ratios[3] == 1.0
    assert [float(ratio) for ratio in ratios] == [8.0, 1.0, 1.0, 1.0]
    assert model.bagua.state_dict()["loss_scale"] == 8.0


def test_another_backward_of_a_loss_multiplies_nothing(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_backward_twice, ()])


def _scaled_step(group, model, optimizer, scaler, device, step):
    optimizer.zero_grad()
    scaled = scaler.scale(model(_inputs(group.rank, step, device)).square().mean())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "get_now", lambda _: None)
        scaled.backward()
    scaler.step(optimizer)
    scaler.update()


def _load_from_the_host(group, name):
    """What was saved on a device and is loaded on the CPU follows a scale that only the device knows."""
    model, optimizer, device = _make(group, accelerator.kind(), **{"algorithm": name, **REMEMBERING[name]})
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    train = functools.partial(_scaled_step, group, device=device)
    for step in range(4):
        train(model, optimizer, scaler, step=step)
    parts = (model, optimizer, model.bagua, scaler)
    torch.save([part.state_dict() for part in parts], saved := io.BytesIO())
    for step in range(4, 7):
        train(model, optimizer, scaler, step=step)
    expected = _weights(model)
    model.bagua.remove()
    saved.seek(0)
    states = torch.load(saved, map_location="cpu")
    model, optimizer, _ = _make(group, accelerator.kind(), **{"algorithm": name, **REMEMBERING[name]})
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
    for part, state in zip((model, optimizer, model.bagua, scaler), states, strict=True):
        part.load_state_dict(state)
    for step in range(4, 7):
        train(model, optimizer, scaler, step=step)
    assert accelerator.agree(_weights(model), expected)


@pytest.mark.parametrize("name", ["onebit", "powersgd"])
def test_a_state_that_is_loaded_on_the_host_follows_the_scale_of_a_device(pair_on_devices, name):
    pair_on_devices.run(_in_group, args=[_load_from_the_host, [name]])


def _scale_on_two_streams(rank, world_size):
    """The last loss is scaled on a stream of its own, which is late; the backward, on another, reads its scale."""
    device = accelerator.use_device_of(rank)
    other, loss = devices.new_stream(device), torch.ones((), device=device)
    follows, scaler = LossScale(True), torch.amp.GradScaler(device.type, init_scale=2.0)
    scaler.scale(loss)
    found, expected = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "get_now", lambda _: None)
        for exponent in range(1, 11):
            scaler.update(new_scale=2.0 ** (exponent * (-1) ** exponent))
            follows.forward_begins()
            other.wait_stream(devices.current_torch_stream(device))
            with accelerator.delayed(0.02, other), devices.on_stream(other):
                scaler.scale(loss)
            before = follows.unit
            found.append(follows.change(device))
            expected.append(scaler.get_scale() / before)
    assert [float(ratio) for ratio in found] == expected
    assert all(isinstance(ratio, torch.Tensor) for ratio in found)


def test_a_scale_that_was_noted_on_another_stream(alone_on_devices):
    alone_on_devices.run(_scale_on_two_streams)


def _train_with_two_optimizers(group, kind, algorithm, options):
    """The gradient of a bias is infinite in one step; another optimizer steps what else is in its bucket."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    model.to(device)
    optimizers = [
        torch.optim.SGD(parameters, lr=0.05)
        for parameters in ([model[0].bias], [model[0].weight, *model[2].parameters()])
    ]
    bagua.with_bagua(model, optimizers, group=group, algorithm=algorithm, **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=100)
    seen = []
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(_inputs(group.rank, step, device)).square().mean()
        if step == 1 and group.rank == 1:
            loss = loss + model[0].bias[0] * float("inf")
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        seen.append(_weights(model))
    model.bagua.remove()
    return seen


def _partly_skipped_steps(group):
    different = []
    for algorithm, options in {"bytegrad": {}, "qsgd": {"error_feedback": True}, "powersgd": {}}.items():
        of_cpu, of_device = (
            _train_with_two_optimizers(group, kind, algorithm, options) for kind in ("cpu", accelerator.kind())
        )
        are_equal = [torch.equal(before, after) for before, after in zip(of_cpu[0], of_cpu[1], strict=True)]
        assert are_equal == [False, True, False, False]
        if not all(map(accelerator.agree, of_device, of_cpu)):
            different.append(algorithm)
    return different


def test_a_step_that_a_scaler_skips_for_one_optimizer_of_two(pair_on_devices):
    """The other one has used what is finite of a bucket; what the algorithm remembers is as before, on all ranks."""
    assert pair_on_devices.run(_in_group, args=[_partly_skipped_steps, ()]) == [[], []]


def _skipped_synchronous_steps(group):
    different = []
    for algorithm, options in {
        "local_sgd": {"post_local_after": 2},
        "async_averaging": {"warmup_steps": 2, "sync_interval": 5.0},
    }.items():
        of_cpu, of_device = (
            _train_through(group, kind, algorithm, options, scaled=True, num_steps=3, optimizer=_Fused)
            for kind in ("cpu", accelerator.kind())
        )
        assert all(map(torch.equal, of_cpu[0], of_cpu[1])), "the step was not skipped on the CPU"
        if not all(map(accelerator.agree, of_device, of_cpu)):
            different.append(algorithm)
    return different


def test_a_skipped_step_is_none_of_those_before_weights_are_exchanged(pair_on_devices):
    assert pair_on_devices.run(_in_group, args=[_skipped_synchronous_steps, ()]) == [[], []]


def _train_qadam(group, kind, bad_step, nonfinite_check):
    more = {"bad_step": bad_step, "num_steps": 6, "nonfinite_check": nonfinite_check, **OTHERS["qadam"]}
    return _train_through(group, kind, "qadam", {}, scaled=True, **more)


def _skipped_steps_of_qadam(rank, world_size, nonfinite_check):
    emulated.load()
    for bad_step in (1, 2, 3):
        results = [thread_world(2, _train_qadam, kind, bad_step, nonfinite_check) for kind in ("cpu", emulated.NAME)]
        for of_cpu, of_device in zip(*results, strict=True):
            assert all(map(torch.equal, of_cpu[bad_step - 1], of_cpu[bad_step])), "the step was not skipped on the CPU"
            assert all(all(map(torch.equal, *pair)) for pair in zip(of_cpu, of_device, strict=True)), bad_step


@pytest.mark.parametrize("nonfinite_check", [None, "sync"], ids=["late", "sync"])
def test_a_skipped_step_is_none_of_the_warm_up_of_qadam(alone_on_emulated, nonfinite_check):
    """Whether the host hears of it late or in time; also where it would have been the last one of the warm-up."""
    alone_on_emulated.run(_skipped_steps_of_qadam, args=[nonfinite_check])


_REMEMBERING = {"qsgd": {"error_feedback": True}, "powersgd": {}}


def _remembered_behind_skipped_step(group, kind, algorithm):
    """What a checkpoint has of it, taken before the step and right behind it."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm, optimizer=_Fused, **_REMEMBERING[algorithm])
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=100)
    states = []
    for step in range(2):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        scaler.scale(model(x * float("inf") if step and group.rank else x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        for own in model.bagua.state_dict()["parameters"]["states"].values():
            states.append([*own["parameters"].values(), *(stripe[-1] for stripe in own["stripes"].values())])
    model.bagua.remove()
    return [[value.cpu() for value in values if value.any()] for values in states]


def _compare_remembered(group):
    for algorithm in _REMEMBERING:
        of_cpu, of_device = (_remembered_behind_skipped_step(group, kind, algorithm) for kind in _BOTH_KINDS)
        half = len(of_cpu) // 2
        assert of_cpu[0]
        for before, behind, expected in zip(of_device[:half], of_device[half:], of_cpu[half:], strict=True):
            assert len(before) == len(behind) == len(expected)
            assert all(map(torch.equal, before, behind)) and all(map(torch.equal, behind, expected)), algorithm


def test_a_checkpoint_behind_a_skipped_step_has_nothing_of_it(pair_on_emulated):
    """Though the host has not heard yet that it was one."""
    pair_on_emulated.run(_in_group, args=[_compare_remembered, ()])


def _check_late(group, algorithm, options):
    with pytest.raises(bagua.InvalidArgument, match=r"in the last step a gradient was NaN or Inf .*load a checkpoint"):
        _train_through(group, accelerator.kind(), algorithm, options, scaled=False)
    x = torch.ones(3)
    group.all_reduce(x).wait()  # the group is whole
    assert x.tolist() == [2.0] * 3


def test_without_a_scaler_it_is_an_error_of_the_next_step(pair_on_devices):
    for algorithm in ("bytegrad", "qsgd", "low_precision_decentralized"):
        options = (ALGORITHMS | OF_WEIGHTS)[algorithm]
        pair_on_devices.run(_in_group, args=[_check_late, (algorithm, options)])


def _go_back(group):
    """After the error the state of the step before it goes on as if nothing had been."""
    seen = []
    for bad_step in (None, 2):
        model, optimizer, device = _make(group, accelerator.kind(), algorithm="low_precision_decentralized")
        saved, step, has_failed = None, 0, False
        while step < 5:
            try:
                if step == 2 and not has_failed:
                    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()))
                optimizer.zero_grad()
                is_bad = step == bad_step and group.rank == 0 and not has_failed
                x = _inputs(group.rank, step, device)
                model(x * float("inf") if is_bad else x).square().mean().backward()
                optimizer.step()
                step += 1
            except bagua.InvalidArgument:
                assert step == 3
                for part, state in zip((model, optimizer, model.bagua), saved, strict=True):
                    part.load_state_dict(state)
                step, has_failed = 2, True
        assert has_failed == (bad_step is not None)
        seen.append(_weights(model))
        model.bagua.remove()
    assert all(map(torch.equal, *seen)) and all(weight.isfinite().all() for weight in seen[0])


def test_a_checkpoint_is_the_way_back(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_go_back, ()])


def _load_early(group, algorithm):
    """The checkpoint is loaded before the error comes out, which is then none of the weights that there are."""
    model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()))
    x = _inputs(group.rank, 0, device)
    for bad_rank in (1, None):
        optimizer.zero_grad()
        model(x * float("inf") if group.rank == bad_rank else x).square().mean().backward()
        optimizer.step()
        if bad_rank is not None:
            for part, state in zip((model, optimizer, model.bagua), saved, strict=True):
                part.load_state_dict(state)
    model(x)
    assert all(weight.isfinite().all() for weight in _weights(model))
    model.bagua.remove()


def _load_before_step(group, kind, algorithm):
    """The gradients are still there, not finite: the step is refused in time, or is an error of the next forward."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm)
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank else x).square().mean().backward()
    model.bagua.load_state_dict(copy.deepcopy(model.bagua.state_dict()))
    with pytest.raises(bagua.InvalidArgument, match="a gradient .* NaN or Inf on some rank"):
        optimizer.step()
        model(x)
    model.bagua.remove()


def test_a_checkpoint_that_is_loaded_before_the_step_takes_nothing_away(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        for kind in _BOTH_KINDS:
            pair_on_emulated.run(_in_group, args=[_load_before_step, (kind, algorithm)])


def _wrap_before_step(group, kind, algorithm, next_algorithm):
    """The algorithm is changed while gradients are there that are not finite."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm)
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank else x).square().mean().backward()
    bagua.with_bagua(model, optimizer, group=group, algorithm=next_algorithm)
    with pytest.raises(bagua.InvalidArgument, match="a gradient .* NaN or Inf on some rank"):
        optimizer.step()
        model(x)
    assert (kind != "cpu" and algorithm == "decentralized") or all(
        weight.isfinite().all() for weight in _weights(model)
    )
    model.bagua.remove()


def test_another_algorithm_before_the_step_takes_nothing_away(pair_on_emulated):
    of_weights = "low_precision_decentralized"
    changes = (
        ("bytegrad", "bytegrad"),
        ("bytegrad", "gradient_allreduce"),
        ("bytegrad", of_weights),
        ("decentralized", of_weights),
        (of_weights, of_weights),
        (of_weights, "decentralized"),
    )
    for kind in _BOTH_KINDS:
        for change in changes:
            pair_on_emulated.run(_in_group, args=[_wrap_before_step, (kind, *change)])


def _wrap_with_good_gradients(group):
    model, optimizer, device = _make(group, accelerator.kind(), algorithm="bytegrad")
    model(_inputs(group.rank, 0, device)).square().mean().backward()
    gradients = [weakref.ref(parameter.grad) for parameter in model.parameters()]
    bagua.with_bagua(model, optimizer, group=group, algorithm="low_precision_decentralized")
    assert all(gradient() is None for gradient in gradients)
    model.bagua.remove()


def test_another_algorithm_keeps_no_gradients_of_the_one_before(pair_on_emulated):
    """Of the buckets that they lay in, as large as the model."""
    pair_on_emulated.run(_in_group, args=[_wrap_with_good_gradients, ()])


def _wrap_after_bad_step(group, algorithm):
    """What comes out in the next forward comes out of the next wrap, which changes nothing; the one behind it does."""
    model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm)
    saved = copy.deepcopy(model.state_dict())
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank else x).square().mean().backward()
    optimizer.step()
    handle = model.bagua
    with pytest.raises(bagua.InvalidArgument, match="in the last step a gradient was NaN or Inf on some rank"):
        bagua.with_bagua(model, optimizer, group=group, algorithm="gradient_allreduce")
    assert model.bagua is handle and handle.algorithm.name == algorithm
    model.load_state_dict(saved)
    bagua.with_bagua(model, optimizer, group=group, algorithm="gradient_allreduce")
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    model(x)
    assert all(weight.isfinite().all() for weight in _weights(model))
    model.bagua.remove()


def test_another_algorithm_after_a_bad_step_does_not_hide_it(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_emulated.run(_in_group, args=[_wrap_after_bad_step, (algorithm,)])


def _hooked_after_wrap(group, algorithm):
    weights = []
    for kind in _BOTH_KINDS:
        model, optimizer, device = _make(group, kind, algorithm=algorithm)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        for step in range(3):
            optimizer.zero_grad()
            model(_inputs(group.rank, step, device)).square().mean().backward()
            optimizer.step()
        weights.append(_weights(model))
        model.bagua.remove()
    assert all(map(torch.equal, *weights))


def test_what_a_hook_that_came_late_makes_of_a_gradient_is_exchanged(pair_on_emulated):
    """Which tests/data_parallel/test_gradient_hooks.py compares with definitions on the CPU."""
    for algorithm in ("gradient_allreduce", "bytegrad"):
        pair_on_emulated.run(_in_group, args=[_hooked_after_wrap, (algorithm,)])


def _close_after_bad_step(rank, world_size, algorithm):
    told = []
    for is_bad in (False, True):
        bagua.init_process_group(timeout=20)
        group = bagua.get_default_group()
        model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm)
        dropped, _, _ = _make(group, accelerator.kind(), algorithm=algorithm)
        del dropped
        x = _inputs(rank, 0, device)
        model(x * float("nan") if is_bad and rank else x).square().mean().backward()
        optimizer.step()
        with warned() as lines:
            bagua.destroy_process_group()
        told.append(lines)
        assert len(group.before_close) == 1  # of the model that is there
    good, (line,) = told
    assert good == [] and line.startswith("the group 'world' is closed: in the last step a gradient was NaN or Inf on")


def test_nor_does_the_end_of_the_group(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_emulated.run(_close_after_bad_step, args=[algorithm])


def _remove_after_bad_step(group, algorithm):
    model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm)
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank else x).square().mean().backward()
    optimizer.step()
    with warned() as told:
        handle = model.bagua
        handle.remove()
        handle.remove()  # has told
        assert not hasattr(model, "bagua")
        bagua.with_bagua(model, optimizer, group=group, algorithm=algorithm)
        model(x * float("inf") if group.rank else x).square().mean().backward()
        model.bagua.remove()  # no step has followed
    assert len(told) == 1 and "in the last step a gradient was NaN or Inf on some rank" in told[0], told


def test_the_end_after_a_bad_step_does_not_hide_it(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_emulated.run(_in_group, args=[_remove_after_bad_step, (algorithm,)])


def _skip_with_local_gradients(group, kind):
    """Gradients of each rank's own, of which an algorithm that exchanges gradients would make an error."""
    model, optimizer, device = _make(group, kind, algorithm="decentralized", optimizer=_Fused)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    for step in range(3):
        x = _inputs(group.rank, step, device)
        optimizer.zero_grad()
        scaler.scale(model(x * float("inf") if step == 0 else x).square().mean()).backward()
        if step == 0:
            bagua.with_bagua(model, optimizer, group=group, algorithm="bytegrad")
        scaler.step(optimizer)
        scaler.update()
    model(x)
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_skips_with_local_gradients(group):
    on_cpu, on_device = (_skip_with_local_gradients(group, kind) for kind in _BOTH_KINDS)
    assert all(map(torch.equal, on_cpu, on_device)) and all(weight.isfinite().all() for weight in on_cpu)


def test_a_step_that_is_skipped_uses_no_local_gradients(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_compare_skips_with_local_gradients, ()])


def test_nothing_comes_out_of_steps_that_are_given_up(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_emulated.run(_in_group, args=[_load_early, (algorithm,)])


def _change_gradients(group, kind, algorithm, by_data):
    """The program looks for itself and steps with what it has made of the gradients."""
    model, optimizer, device = _make(group, kind, algorithm=algorithm)
    for step in range(4):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        model(x * float("inf") if step and group.rank == 1 else x).square().mean().backward()
        if step == 1:
            optimizer.zero_grad()
        for parameter in model.parameters():
            if parameter.grad is not None:
                (parameter.grad.data if by_data else parameter.grad).nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()
    model(x)
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_changed_gradients(group, algorithm):
    for by_data in (False, True):
        assert all(map(torch.equal, *(_change_gradients(group, kind, algorithm, by_data) for kind in _BOTH_KINDS)))


def test_gradients_that_the_program_has_mended_are_no_error(pair_on_emulated):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_emulated.run(_in_group, args=[_compare_changed_gradients, (algorithm,)])


def _mend_between_gaps(group, kind):
    """Their bucket has elements between the gradients, where the codec leaves NaN."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, algorithm="bytegrad", min_compressed_bytes=0)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 5, device=device)).sum() * (float("inf") if group.rank else 1.0)).backward()
        for parameter in model.parameters():
            parameter.grad.nan_to_num_(1.0, 1.0, 1.0)
        optimizer.step()
    model(torch.ones(2, 5, device=device))
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_mended_between_gaps(group):
    assert all(map(torch.equal, *(_mend_between_gaps(group, kind) for kind in _BOTH_KINDS)))


def test_nor_is_what_a_codec_leaves_between_mended_gradients(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_compare_mended_between_gaps, ()])


class _Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.ones(8), torch.ones(8)])

    def forward(self, scales):
        return sum((scale * part).sum() for scale, part in zip(scales, self.parts, strict=True))


def _forward_between(group, nonfinite_at):
    """One backward for two optimizers, and a forward before each of their steps."""
    device = accelerator.use_device_of(group.rank)
    model = _Scaled().to(device)
    optimizers = [torch.optim.SGD([part], lr=0.05) for part in model.parts]
    bagua.with_bagua(model, optimizers, group=group, algorithm="low_precision_decentralized")
    scales = [1.0, 1.0]
    if group.rank == 1:
        scales[nonfinite_at] = float("inf")
    model(scales).backward()
    model(scales)
    optimizers[0].step()
    if nonfinite_at == 0:
        with pytest.raises(bagua.InvalidArgument, match="in the last step a gradient was NaN or Inf"):
            model(scales)
    else:  # of which the host knows by now
        model(scales)
        with pytest.raises(bagua.InvalidArgument, match="No rank has changed a weight"):
            optimizers[1].step()
    x = torch.ones(3)
    group.all_reduce(x).wait()  # the group is whole
    model.bagua.remove()


def test_a_forward_between_backward_and_step_takes_nothing_away(pair_on_emulated):
    for nonfinite_at in (0, 1):
        pair_on_emulated.run(_in_group, args=[_forward_between, (nonfinite_at,)])


def _look_between(group, is_closure):
    """The host knows of the gradients by then, and refuses the step in time: also one whose closure only looks."""
    model, optimizer, device = _make(group, accelerator.kind(), algorithm="bytegrad")
    before = _weights(model)
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank == 1 else x).square().mean().backward()
    if not is_closure:
        model(x)
    with pytest.raises(bagua.InvalidArgument, match="No rank has changed a weight"):
        optimizer.step((lambda: model(x).square().mean()) if is_closure else None)
    assert all(map(torch.equal, before, _weights(model)))
    optimizer.zero_grad()  # of a step that is skipped nothing comes out
    model(x).square().mean().backward()
    optimizer.step()
    model(x)
    assert all(weight.isfinite().all() for weight in _weights(model))
    model.bagua.remove()


def test_a_forward_between_backward_and_step_tells_in_time(pair_on_emulated):
    for is_closure in (False, True):
        pair_on_emulated.run(_in_group, args=[_look_between, (is_closure,)])


def _look_before_skipped_step(group, kind):
    model, optimizer, device = _make(group, kind, algorithm="bytegrad", optimizer=_Fused)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        scaler.scale(model(x * float("inf") if step == 1 and group.rank else x).square().mean()).backward()
        model(x)
        scaler.step(optimizer)
        scaler.update()
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_looks_before_skipped_step(group):
    assert all(map(torch.equal, *(_look_before_skipped_step(group, kind) for kind in _BOTH_KINDS)))


def test_what_the_host_knows_by_then_is_no_error_of_a_step_that_a_scaler_skips(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_compare_looks_before_skipped_step, ()])


def _step_elsewhere(group):
    """The optimizer of a model on the CPU steps a parameter on a device, whose gradient is infinite on rank 1."""
    device = accelerator.use_device_of(group.rank)
    model, other = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, algorithm="low_precision_decentralized")
    before = _weights(model)
    with accelerator.delayed(0.01):
        for _ in range(3):
            optimizer.zero_grad()
            scale = float("inf") if group.rank == 1 else 1.0
            (model(torch.ones(2, 8)).sum() + (scale * other).sum().cpu()).backward()
            with pytest.raises(bagua.InvalidArgument, match="No rank has changed a weight"):
                optimizer.step()
    assert all(map(torch.equal, before, _weights(model)))
    model.bagua.remove()


def test_a_model_on_the_cpu_whose_optimizer_steps_on_a_device(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_step_elsewhere, ()])


def _check_in_time(group, algorithm):
    model, optimizer, device = _make(group, accelerator.kind(), algorithm=algorithm, nonfinite_check="sync")
    before = _weights(model)
    x = _inputs(group.rank, 0, device)
    model(x * float("inf") if group.rank == 1 else x).square().mean().backward()
    with pytest.raises(bagua.InvalidArgument, match="No rank has changed a weight"):
        optimizer.step()
    assert all(map(torch.equal, before, _weights(model)))
    model.bagua.remove()


def test_or_it_is_refused_before_a_weight_has_changed(pair_on_devices):
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        pair_on_devices.run(_in_group, args=[_check_in_time, (algorithm,)])


def _lose_a_weight(rank, world_size):
    emulated.load()
    bagua.init_process_group(timeout=10)
    try:
        model, optimizer, device = _make(
            bagua.get_default_group(), emulated.NAME, algorithm="low_precision_decentralized", nonfinite_check="late"
        )
        error = bagua.RemoteError if rank == 0 else bagua.InvalidArgument
        with pytest.raises(error, match=r"weights of bucket \d .* became NaN or Inf"):
            for step in range(3):
                optimizer.zero_grad()
                model(_inputs(rank, step, device)).square().mean().backward()
                if step == 1 and rank == 1:
                    with torch.no_grad():
                        model[2].weight[0, 0] = float("nan")
                optimizer.step()
        return step
    finally:
        bagua.destroy_process_group()


def test_a_weight_that_no_codec_can_send_comes_out_in_the_next_step(pair_on_emulated):
    assert pair_on_emulated.run(_lose_a_weight, env=tcp(2).env) == [2, 2]


# ---- mistakes


def _check_mistakes(group):
    device = accelerator.use_device_of(group.rank)
    kind = device.type
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(bagua.InvalidArgument, match=r'nonfinite_check is .late.*expected "sync"'):
        bagua.with_bagua(copy.deepcopy(model), group=group, nonfinite_check="late")
    model[0].to(device)
    with pytest.raises(bagua.InvalidArgument, match=rf"parameter '0.weight' is on {kind}:\d, but parameter '1.weight'"):
        bagua.with_bagua(copy.deepcopy(model), group=group)
    model.to(device if group.rank == 0 else "cpu")
    with pytest.raises(bagua.InvalidArgument, match=rf"on {kind} .* on cpu|on cpu .* on {kind}"):
        bagua.with_bagua(copy.deepcopy(model), group=group)
    model.to(device)
    with pytest.raises(bagua.InvalidArgument, match=rf"device_ids is \[3\], but the module is on {kind}:\d"):
        bagua.DistributedDataParallel(copy.deepcopy(model), device_ids=[3], process_group=group)
    for wrong in ({"device_ids": device.index}, {"device_ids": [None]}, {"output_device": 3}):
        with pytest.raises(bagua.InvalidArgument, match=rf"but the module is on {kind}:\d; give the one device"):
            bagua.DistributedDataParallel(copy.deepcopy(model), process_group=group, **wrong)
    wrapped = bagua.DistributedDataParallel(
        model, device_ids=[device.index], output_device=device.index, process_group=group
    )
    wrapped(torch.ones(2, 4, device=device)).sum().backward()
    if not accelerator.is_emulated():  # which has devices enough
        return
    elsewhere = torch.device(kind, 2 + group.rank)
    model.to(elsewhere)
    # Whoever comes to it later may hear of the other one's first.
    either = (bagua.InvalidArgument, bagua.RemoteError)
    with pytest.raises(either, match=r"gradient of .* on emulated:[23], but .* on emulated:[01] when"):
        wrapped(torch.ones(2, 4, device=elsewhere)).sum().backward()


class _Batch(NamedTuple):
    x: torch.Tensor
    name: str


class _Takes(torch.nn.Module):
    """A model that is given tensors in every container into which torch's class looks."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, first, batches, *, named):
        assert batches[0].name == "rows" and type(named) is collections.OrderedDict
        tensors = [first, batches[0].x, batches[1][0], named["x"], named["more"][0]]
        assert all(tensor.device == self.linear.weight.device for tensor in tensors)
        assert named["packed"].data.device == first.device
        return self.linear(sum(tensors))


def _check_inputs(group):
    """device_ids: what forward is given on the CPU is moved to the model, as by torch's class, and nothing else is."""
    device = accelerator.use_device_of(group.rank)
    model = _Takes().to(device)
    leaf = torch.ones(2, 4, requires_grad=True)
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2, 4)])

    def call(wrapped):
        x = torch.ones(2, 4)
        named = collections.OrderedDict(x=x.to(device), more=[x], packed=packed)
        return wrapped(leaf, [_Batch(x, "rows"), (x, 3)], named=named)

    wrapped = bagua.DistributedDataParallel(model, device_ids=[device.index], process_group=group)
    found = call(wrapped)
    assert torch.equal(found.detach(), model.linear(torch.full((2, 4), 5.0, device=device)).detach())
    found.sum().backward()
    assert leaf.grad.device == leaf.device and leaf.grad.shape == (2, 4)
    wrapped.bagua.remove()
    with pytest.raises(AssertionError):
        call(bagua.DistributedDataParallel(model, process_group=group))


def test_inputs_are_moved_to_the_one_device(alone_on_devices):
    alone_on_devices.run(_in_group, args=[_check_inputs, ()])


def _capture(rank, world_size):
    emulated.load()
    thread_world(1, _check_capture)


def _check_capture(group):
    model, optimizer, device = _make(group, emulated.NAME)
    outputs = model(_inputs(group.rank, 0, device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "is_capturing", lambda device: device.type == emulated.NAME)
        with pytest.raises(bagua.InvalidArgument, match=r"backward .* captured on emulated:\d.*make_graphed_callables"):
            outputs.sum().backward()
        with pytest.raises(bagua.InvalidArgument, match="a forward of the wrapped model began while a CUDA graph"):
            model(_inputs(group.rank, 0, device))
    model(_inputs(group.rank, 0, device)).sum().backward()  # the group is whole
    optimizer.step()


def test_a_graph_that_is_captured(alone_on_emulated):
    alone_on_emulated.run(_capture)


def test_mistakes(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_check_mistakes, ()])
