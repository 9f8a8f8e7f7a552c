"""Training on a device: the CPU's bits, nothing in backward or step waits for it, and NaN is judged there."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import threading
from typing import NamedTuple

import pytest
import torch

import bagua
import tests.emulated_device as emulated
from bagua.distributed import devices
from bagua.testing import world as thread_world
from tests import accelerator
from tests.distributed.worlds import SAME_TEST, fast_in, tcp

_seeding = threading.Lock()  # ranks that are threads share torch's generator
_BOTH_KINDS = ("cpu", emulated.NAME)


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
    model.to(device)
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, bucket_bytes=64 << 10, **options)
    assert len(model.bagua.buckets) > 1
    return model, optimizer, device


def _inputs(rank, step, device):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def _weights(model):
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def _step(group, model, optimizer, device, step, factor=1.0, scaler=None):
    """One step; the loss of rank 1 is ``factor`` times what it is."""
    optimizer.zero_grad()
    loss = model(_inputs(group.rank, step, device)).square().mean()
    loss = loss * factor if group.rank == 1 else loss
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _qadam(parameters, lr):
    return bagua.optim.QAdam(parameters, lr / 50, warmup_steps=2, weight_decay=0.1, fused=True)


OF_GRADIENTS = {
    "gradient_allreduce": {},
    "bytegrad": {},
    "onebit": {"algorithm": "bytegrad", "codec": "onebit", "error_feedback": True, "min_compressed_bytes": 0},
    "bfloat16": {"algorithm": "bytegrad", "error_feedback": True, "state_dtype": "bfloat16"},
    "qsgd": {"error_feedback": True},
    "powersgd": {},
    "qadam": {"optimizer": _qadam, "codec": "onebit", "min_compressed_bytes": 0},
}
OF_WEIGHTS = {
    "decentralized": {},
    "low_precision_decentralized": {},
    "local_sgd": {"sync_every": 2},
    "post-local": {"algorithm": "local_sgd", "post_local_after": 2},
    "async_averaging": {"warmup_steps": 1000},  # what comes after depends on time
}
ALL = {name: {"algorithm": name, **options} for name, options in (OF_GRADIENTS | OF_WEIGHTS).items()}
# Residuals, factors, an optimizer that is fused, and weights.
SOME = {name: ALL[name] for name in ("onebit", "powersgd", "qadam", "low_precision_decentralized")}


# ---- nothing waits


def _counted(group, part):
    """Returns how often the host waits for the device in ``part``, on all ranks together."""
    group.barrier().wait()
    if group.rank == 0:
        emulated.reset_counters()
    group.barrier().wait()
    part()
    group.barrier().wait()
    num_waits = emulated.counters()["num_host_waits"]
    group.barrier().wait()
    return num_waits


def _check_waits(group, more):
    """Without check_replicas, which reads the result of an earlier step."""
    for name, options in (ALL if not more else {name: ALL[name] for name in ("bytegrad", "powersgd")}).items():
        model, optimizer, device = _make(group, emulated.NAME, **options, **more, check_replicas=False)
        for step in range(5 if name == "qadam" else 3):
            optimizer.zero_grad()
            loss = model(_inputs(group.rank, step, device)).square().mean()
            assert _counted(group, loss.backward) == 0, (name, step)
            assert _counted(group, optimizer.step) == 0, (name, step)
        assert _counted(group, loss.item) == group.size  # the counter counts
        model.bagua.remove()


def _check_scaled_waits(group):
    """Only torch's own look at its flag waits, in ``step``, and of the fused optimizers' none."""
    for name, options in SOME.items():
        for optimizer_class in {options.get("optimizer", torch.optim.SGD), options.get("optimizer", _Fused)}:
            own = {**options, "optimizer": optimizer_class, "check_replicas": False}
            model, optimizer, device = _make(group, emulated.NAME, **own)
            scaler = bagua.amp.GradScaler(device.type, init_scale=8.0, growth_interval=2)
            for step in range(4):
                optimizer.zero_grad()
                loss = scaler.scale(model(_inputs(group.rank, step, device)).square().mean())
                parts = loss.backward, functools.partial(scaler.step, optimizer), scaler.update
                num_waits = [_counted(group, part) for part in parts]
                assert num_waits == [0, group.size * (optimizer_class is not _Fused), 0], (name, step, num_waits)
            model.bagua.remove()


def _count_waits(rank, world_size):
    for more in ({}, {"nonfinite": "raise"}):
        thread_world(2, _check_waits, more)
    thread_world(2, _check_scaled_waits)


def test_neither_backward_nor_step_waits_for_the_device(alone_on_emulated):
    alone_on_emulated.run(_count_waits, timeout=60)


# ---- streams


class _OnTwoStreams(torch.nn.Module):
    """Computes with one layer on a stream of its own.

    Its gradients are ready in the order of registration, so its buckets are laid out anew after the first step.
    """

    def __init__(self):
        super().__init__()
        self.last, self.here, self.there = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        if x.is_cpu:
            return self.last(torch.tanh(self.here(x) + self.there(x)))
        with _on_another_stream(x):
            y = self.there(x)
        y.record_stream(torch.accelerator.current_stream())
        return self.last(torch.tanh(self.here(x) + y))


@contextlib.contextmanager
def _on_another_stream(x, side=None):
    if x.is_cpu:
        yield
        return
    side, current = side or torch.Stream(x.device), torch.accelerator.current_stream()
    side.wait_stream(current)
    x.record_stream(side)
    with side:
        yield
    current.wait_stream(side)


def _train_on_streams(group, kind, options):
    """Forward on another stream than backward but in the first step, and so the end of backward."""
    device = torch.device("cpu") if kind == "cpu" else accelerator.use_device_of(group.rank)
    with _seeding:
        torch.manual_seed(0)
        model = _OnTwoStreams()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    bagua.with_bagua(model, optimizer, group=group, **options)
    side = None if kind == "cpu" else torch.Stream(device)
    for step in range(6):
        optimizer.zero_grad()
        x = _inputs(group.rank, step, device)
        with _on_another_stream(x, side) if step else contextlib.nullcontext():
            loss = model(x).square().mean()
        if kind != "cpu":
            loss.record_stream(torch.accelerator.current_stream())
        loss.backward()
        optimizer.step()
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _compare_on_streams(group, options):
    with emulated.delayed(0.005):
        assert all(map(torch.equal, *(_train_on_streams(group, kind, options) for kind in _BOTH_KINDS)))


@fast_in("name", ["onebit", "powersgd"], ["gradient_allreduce", "bytegrad", "onebit", "powersgd"])
def test_gradients_and_states_of_a_bucket_come_from_several_streams(pair_on_emulated, name):
    """The memory that an algorithm has left on one stream stays until the other one has read it."""
    pair_on_emulated.run(_in_group, args=[_compare_on_streams, (ALL[name],)])


# ---- nodes


def _train(group, kind, options):
    model, optimizer, device = _make(group, kind, **options)
    for step in range(3):
        _step(group, model, optimizer, device, step)
    weights = _weights(model)
    model.bagua.remove()
    return weights


def _train_in_two_nodes(rank, world_size):
    for name in ("bytegrad", "onebit"):
        options = {**ALL[name], "hierarchical": True}
        results = [thread_world(4, _train, kind, options, nodes=[0, 0, 1, 1]) for kind in _BOTH_KINDS]
        for on_cpu, on_device in zip(*results, strict=True):
            assert all(map(torch.equal, on_cpu, on_device)), name


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(accelerator.ON_DEVICE, id="on device"),
        pytest.param({"BAGUA_THRESHOLDS": None}, id="by default", marks=SAME_TEST),
    ],
)
def test_nodes_of_two_ranks(alone_on_emulated, env):
    """The leaders alone have residuals, and all agree on which of them computes."""
    alone_on_emulated.run(_train_in_two_nodes, env=env)


# ---- torch.set_default_device


def _train_on_default_device(group):
    """The same weights as with the default."""
    found = []
    for is_default in (False, True):
        for options in SOME.values():
            torch.set_default_device(accelerator.use_device_of(group.rank) if is_default else None)
            try:
                bagua.broadcast_object({"a": 1} if group.rank == 0 else None, 0, group=group)
                model, optimizer, device = _make(group, accelerator.kind(), **options)
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


def _compile_and_train(group, backend):
    found = []
    for kind in ("cpu", accelerator.kind()):
        torch.compiler.reset()
        model, optimizer, device = _make(group, kind, algorithm="bytegrad")
        compiled = torch.compile(model, backend=backend)
        for step in range(3):
            _step(group, compiled, optimizer, device, step)
        found.append(_weights(model))
        model.bagua.remove()
    assert accelerator.agree(found[1], found[0])


@pytest.mark.slow("test_under_a_scaler_it_trains_as_on_the_cpu")
def test_a_compiled_model(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_compile_and_train, ["aot_eager"]], timeout=60)


@pytest.mark.gpu
@pytest.mark.slow("test_under_a_scaler_it_trains_as_on_the_cpu")
def test_a_compiled_model_on_a_gpu(device_pools):
    """Inductor compiles it, whose kernels only a GPU has."""
    device_pools(accelerator.CUDA, 2).run(_in_group, args=[_compile_and_train, ["inductor"]], timeout=120)


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
            _step(group, model, optimizer, device, step)
        found.append(_weights(model))
        model.bagua.remove()
    assert accelerator.agree(found[1], found[0])


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_a_graphed_model(device_pools, algorithm):
    device_pools(accelerator.CUDA, 2).run(_in_group, args=[_train_graphed, (algorithm,)])


# ---- NaN and infinity


class _Fused(torch.optim.SGD):
    """Steps as torch's fused optimizers: GradScaler always calls step, which reads found_inf where the weights are."""

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


def _train_scaled(group, kind, options):
    """Weights after each step: the scale grows, one step is skipped, and the scale falls."""
    model, optimizer, device = _make(group, kind, **options)
    scaler = bagua.amp.GradScaler(device.type, init_scale=8.0, growth_factor=3.0, growth_interval=2)
    seen = []
    for step in range(7):
        _step(group, model, optimizer, device, step, float("inf") if step == 3 else 1.0, scaler)
        seen.append(_weights(model))
    assert scaler.get_scale() != 8.0
    model.bagua.remove()
    return seen


def _compare_scaled(group, optimizer, names):
    different = []
    for name in names:
        options = ALL[name]
        options = {"optimizer": optimizer, **options}
        of_cpu, of_device = (_train_scaled(group, kind, options) for kind in ("cpu", accelerator.kind()))
        assert all(map(torch.equal, of_cpu[2], of_cpu[3])) or name in OF_WEIGHTS, "the step was not skipped on the CPU"
        if not all(map(accelerator.agree, of_device, of_cpu)):
            different.append(name)
    return different


@pytest.mark.parametrize(
    "optimizer, names",
    [
        pytest.param(_Fused, SOME, id="fused-some"),
        pytest.param(_Fused, ALL, id="fused-all", marks=SAME_TEST),
        pytest.param(torch.optim.SGD, ALL, id="not fused-all", marks=SAME_TEST),
    ],
)
def test_under_a_scaler_it_trains_as_on_the_cpu(pair_on_devices, optimizer, names):
    """Residuals too: the steps behind a skipped one and a change of scale show them."""
    assert pair_on_devices.run(_in_group, args=[_compare_scaled, [optimizer, list(names)]], timeout=60) == [[], []]


def _remembered(group, kind, options):
    """Returns the states in a checkpoint, taken before a backward with Inf and right behind it."""
    model, optimizer, device = _make(group, kind, **options)
    states = []
    for step in range(2):
        _step(group, model, optimizer, device, step, float("inf") if step else 1.0)
        states.append([])
        for own in model.bagua.state_dict()["parameters"]["states"].values():
            states[step] += [*own["parameters"].values(), *(stripe[-1] for stripe in own["stripes"].values())]
    assert all(not parameter.isfinite().all() for parameter in model.parameters() if parameter.dim() > 1)
    model.bagua.remove()
    return [[value.cpu() for value in values if value.numel()] for values in states]


def _compare_remembered(group):
    for name in ("onebit", "bfloat16", "qsgd", "powersgd"):
        of_cpu, of_device = (_remembered(group, kind, ALL[name]) for kind in _BOTH_KINDS)
        assert any(value.any() for value in of_cpu[0])
        for before, behind, expected in zip(*of_device, of_cpu[1], strict=True):
            assert torch.equal(before, behind) and torch.equal(behind, expected), name


def test_a_backward_with_inf_leaves_no_trace_in_what_is_remembered(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_compare_remembered, ()])


def _go_back(group, options):
    """The error comes at the next forward, the group is whole, and a checkpoint continues as if nothing had been."""
    seen = []
    for bad_step in (None, 2):
        model, optimizer, device = _make(group, accelerator.kind(), **options, nonfinite="raise")
        for step in range(5):
            if step == 2:
                saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, model.bagua)])
                if bad_step is not None:
                    _step(group, model, optimizer, device, step, float("inf"))
                    with pytest.raises(bagua.InvalidArgument, match="a gradient of the last backward was NaN or Inf"):
                        model(_inputs(group.rank, step, device))
                for part, state in zip((model, optimizer, model.bagua), saved, strict=True):
                    part.load_state_dict(state)
            _step(group, model, optimizer, device, step)
        seen.append(_weights(model))
        model.bagua.remove()
    assert all(map(torch.equal, *seen)) and all(weight.isfinite().all() for weight in seen[0])


def test_on_request_it_is_an_error_of_the_next_forward(pair_on_devices):
    for name in ("gradient_allreduce", "bytegrad", "onebit"):
        pair_on_devices.run(_in_group, args=[_go_back, (ALL[name],)])


def _load_from_the_host(group, options):
    """A state that was saved on a device and is loaded on the CPU continues there, and follows the scale."""

    def wrapped():
        model, optimizer, device = _make(group, accelerator.kind(), **options)
        scaler = bagua.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
        return model, optimizer, device, scaler

    model, optimizer, device, scaler = wrapped()
    for step in range(7):
        if step == 4:
            torch.save([part.state_dict() for part in (model, optimizer, model.bagua, scaler)], saved := io.BytesIO())
        _step(group, model, optimizer, device, step, scaler=scaler)
    expected = _weights(model)
    model.bagua.remove()
    saved.seek(0)
    model, optimizer, device, scaler = wrapped()
    states = torch.load(saved, map_location="cpu")
    for part, state in zip((model, optimizer, model.bagua, scaler), states, strict=True):
        part.load_state_dict(state)
    for step in range(4, 7):
        _step(group, model, optimizer, device, step, scaler=scaler)
    assert accelerator.agree(_weights(model), expected)


@fast_in("name", ["onebit"], ["onebit", "powersgd"])
def test_a_state_that_is_loaded_on_the_host_continues_on_the_device(pair_on_devices, name):
    pair_on_devices.run(_in_group, args=[_load_from_the_host, [ALL[name]]])


def _lose_a_weight(group):
    model, optimizer, device = _make(group, emulated.NAME, algorithm="low_precision_decentralized")
    error = bagua.RemoteError if group.rank == 0 else bagua.InvalidArgument
    with pytest.raises(error, match=r"weights of bucket \d .* became NaN or Inf"):
        for step in range(3):
            if step == 1 and group.rank == 1:
                with torch.no_grad():
                    model[2].weight[0, 0].fill_(float("nan"))
            _step(group, model, optimizer, device, step)
    assert step == 2


def test_a_weight_that_no_codec_can_send_is_an_error_of_the_next_step(pair_on_emulated):
    pair_on_emulated.run(_in_group, args=[_lose_a_weight, ()], env=tcp(2).env)


# ---- mistakes


def _check_mistakes(group):
    device = accelerator.use_device_of(group.rank)
    kind = device.type
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
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
    # The rank that comes to it later may get the other one's error.
    with pytest.raises((bagua.InvalidArgument, bagua.RemoteError), match="gradient of .* was moved since the wrap"):
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
    model(_inputs(group.rank, 0, device)).sum().backward()  # the group is whole
    optimizer.step()


def test_a_graph_that_is_captured(alone_on_emulated):
    alone_on_emulated.run(_capture)


def test_mistakes(pair_on_devices):
    pair_on_devices.run(_in_group, args=[_check_mistakes, ()])
