"""Profiles: recorded from models, saved, read back, and played by a model that sleeps."""

import json
import math
import time

import pytest
import torch

import bagua
from bagua import cli
from bagua.profiles import Layer, Profile, SleepingModel, record

TWO = Profile("two", "made up", (Layer("first", ((30, 4), (30,)), 10.0, 20.0), Layer("second", ((5, 30),), 30.0, 40.0)))


class Napping(torch.nn.Module):
    """A linear layer whose forward and backward take a given time on top."""

    class _Nap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, forward_s, backward_s):
            ctx.backward_s = backward_s
            time.sleep(forward_s)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            time.sleep(ctx.backward_s)
            return grad, None, None

    def __init__(self, forward_s, backward_s):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.times = (forward_s, backward_s)

    def forward(self, x):
        return self.linear(self._Nap.apply(x, *self.times))


def napping():
    """What `bagua bench record` is pointed at below."""
    x = torch.ones(1, 8, requires_grad=True)
    model = torch.nn.Sequential(Napping(0.02, 0.04), torch.nn.ReLU(), Napping(0.01, 0.03))
    return model, lambda model: model(x).sum()


def test_a_recorded_profile_has_the_times_of_the_layers():
    profile = record(*napping(), name="napping", repetitions=3)
    assert [layer.name for layer in profile.layers] == ["0.linear", "2.linear"]
    assert all(layer.parameters == ((8, 8), (8,)) for layer in profile.layers)
    first, second = profile.layers
    # A layer's gradients are ready before its nap in backward, which is in front of it in forward.
    assert 19 < first.forward_ms < 45 and 9 < second.forward_ms < 35
    assert second.backward_ms < 25 and 30 + 40 - 1 < first.backward_ms < 30 + 40 + 25


def test_a_module_that_is_used_twice_is_ready_once():
    linear = torch.nn.Linear(4, 4)
    profile = record(linear, lambda model: model(model(torch.ones(1, 4))).sum(), repetitions=1)
    assert [layer.parameters for layer in profile.layers] == [((4, 4), (4,))]


def test_recording_leaves_no_hooks_and_no_gradients():
    model, loss = napping()
    record(model, loss, repetitions=1)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    loss(model).backward()


def test_a_loss_without_parameters_is_refused():
    with pytest.raises(bagua.InvalidArgument, match="no parameter of the model has got a gradient"):
        record(torch.nn.Linear(2, 2), lambda model: torch.ones(1, requires_grad=True).sum(), repetitions=1)


def test_saved_and_read_back(tmp_path):
    TWO.save(tmp_path / "two.json")
    assert Profile.load(tmp_path / "two.json") == TWO


@pytest.mark.parametrize("scale", [0.1, 0.5, 3])
def test_scaled(scale):
    scaled = TWO.scaled(scale)
    for before, after in zip(TWO.layers, scaled.layers, strict=True):
        assert (before.forward_ms, before.backward_ms) == (after.forward_ms, after.backward_ms)
        for old, new in zip(before.parameters, after.parameters, strict=True):
            assert len(old) == len(new) and abs(math.prod(new) - math.prod(old) * scale) <= 0.5


@pytest.mark.parametrize("scale", [0, -1.0, math.nan])
def test_a_scale_that_is_none(scale):
    with pytest.raises(bagua.InvalidArgument, match="expected a positive number"):
        TWO.scaled(scale)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a profile"),
        ("[]", "is no profile"),
        ('{"name": "x", "source": "y", "layers": []}', "one layer or more"),
        ('{"name": "x", "source": "y", "layers": [3]}', "a layer is 3"),
        (json.dumps({"name": "x", "source": "y", "layers": [{"name": "a", "parameters": [0]}]}), "expected an object"),
        ("parameters=[[0, 3]]", "expected their shapes"),
        ("parameters=7", "expected their shapes"),
        ("forward_ms=-1", "expected milliseconds"),
        ('backward_ms="fast"', "expected milliseconds"),
    ],
)
def test_what_is_no_profile(tmp_path, text, message):
    if "=" in text:
        key, _, value = text.partition("=")
        layer = {"name": "a", "parameters": [[3]], "forward_ms": 1, "backward_ms": 1, key: json.loads(value)}
        text = json.dumps({"name": "x", "source": "y", "layers": [layer]})
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(bagua.InvalidArgument, match=message):
        Profile.load(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(bagua.InvalidArgument, match=r"none\.json cannot be read as a profile"):
        Profile.load(tmp_path / "none.json")


def test_the_sleeping_model_takes_its_time_and_makes_every_gradient():
    model = SleepingModel(TWO)
    ready = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append((name, time.perf_counter())))
    begin = time.perf_counter()
    output = model()
    forward_s = time.perf_counter() - begin
    begin = time.perf_counter()
    output.backward()
    assert 0.04 <= forward_s < 0.09
    assert [name.split(".")[1] for name, _ in ready] == ["1", "0", "0"]  # the last layer's first
    times = [at - begin for _, at in ready]
    assert 0.04 <= times[0] < 0.09 and 0.06 <= times[1] < 0.11 and times[1] - times[0] > 0.01
    assert [p.grad.shape for p in model.parameters()] == [(30, 4), (30,), (5, 30)]
    assert all(p.grad.count_nonzero() == p.numel() for p in model.parameters())


def test_what_the_host_does_meanwhile_takes_no_time_of_the_accelerators():
    profile = Profile("two", "made up", (Layer("first", ((3,),), 0.0, 60.0), Layer("second", ((3,),), 0.0, 20.0)))
    model = SleepingModel(profile)
    model.layers[1].weights[0].register_post_accumulate_grad_hook(lambda _: time.sleep(0.04))
    output = model()
    begin = time.perf_counter()
    output.backward()
    assert 0.08 <= time.perf_counter() - begin < 0.12  # of which 0.04 are the host's, under the 0.06 of the first layer


def test_gradients_of_the_sleeping_model_are_the_same_memory_in_every_step():
    model = SleepingModel(TWO)
    places = []
    for _ in range(2):
        model.zero_grad()
        model().backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
    assert places[0] == places[1]


def test_bench_record(tmp_path, capsys):
    out = tmp_path / "napping.json"
    argv = ["bench", "record", f"{__file__}:napping", "--out", str(out), "--repetitions", "1", "--name", "nap"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nap: 2 layers, 144 parameters, forward ")
    assert Profile.load(out).num_parameters == 144


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", "names no function"),
        ("nowhere.py:make", "cannot be imported"),
        ("no.such.module:make", "cannot be imported"),
        (f"{__file__}:nothing", "has no function 'nothing'"),
        ("builtins:dict", "returned dict, expected"),
    ],
)
def test_what_cannot_be_recorded(tmp_path, capsys, target, message):
    assert cli.main(["bench", "record", target, "--out", str(tmp_path / "x.json")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
