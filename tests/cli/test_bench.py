"""Profiles: recorded from models, saved, read back, and played by a model that sleeps."""

import itertools
import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch

import bagua.cli.bench
import bagua.replay.profiles
from bagua import cli
from bagua.replay.profiles import Layer, Profile, SleepingModel, record

PROFILES = Path(bagua.replay.profiles.__file__).parent / "models"
# Parameters, milliseconds of forward, of backward.
EXPECTED = {
    "vgg16": (138_357_544, 33, 67),
    "bert_large": (333_608_960, 60, 120),
    "gpt_124m": (124_439_808, 40, 80),
    "resnet50": (25_557_032, 30, 60),
}
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


@pytest.mark.timed
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_parameters_and_gradients_are_of_the_recorded_dtype(tmp_path, dtype):
    """So that a replayed model puts as many bytes on the wire."""
    recorded = torch.nn.Linear(4, 3, dtype=dtype)
    profile = record(recorded, lambda model: model(torch.ones(2, 4, dtype=dtype)).sum(), repetitions=1)
    profile.save(tmp_path / "linear.json")
    model = SleepingModel(Profile.load(tmp_path / "linear.json").scaled(0.5))
    model().backward()
    assert [(p.dtype, p.grad.dtype) for p in model.parameters()] == [(dtype, dtype)] * 2


def test_a_dtype_for_each_layer(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), torch.nn.Linear(4, 4))
    profile = record(model, lambda model: model[1](model[0](torch.ones(1, 4).bfloat16()).float()).sum(), repetitions=1)
    assert [layer.dtype for layer in profile.layers] == ["bfloat16", "float32"]


def test_a_layer_of_two_dtypes_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].bias.data = model[1].bias.data.double()
    with pytest.raises(bagua.InvalidArgument, match="parameters of layer '1' are float32 and float64; a profile holds"):
        record(model, lambda model: model(torch.ones(1, 4)).sum())
    assert all(not module._forward_hooks for module in model.modules())


def test_a_dtype_that_no_profile_holds_is_refused():
    with pytest.raises(bagua.InvalidArgument, match="parameters of layer 'Linear' are complex64"):
        record(torch.nn.Linear(2, 2, dtype=torch.complex64), lambda model: model.weight.abs().sum())


@pytest.mark.parametrize("repetitions", [0, -2, 1.5])
def test_repetitions_that_have_no_median(repetitions):
    with pytest.raises(bagua.InvalidArgument, match=f"repetitions is {repetitions}, expected an integer of at least 1"):
        record(torch.nn.Linear(2, 2), lambda model: pytest.fail("measured"), repetitions=repetitions)


def test_a_loss_without_parameters_is_refused():
    with pytest.raises(bagua.InvalidArgument, match="no parameter of the model has got a gradient"):
        record(torch.nn.Linear(2, 2), lambda model: torch.ones(1, requires_grad=True).sum(), repetitions=1)


def test_saved_and_read_back(tmp_path):
    TWO.save(tmp_path / "two.json")
    assert Profile.load(tmp_path / "two.json") == TWO


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.json")), ids=lambda path: path.stem)
def test_profiles_that_are_there_are_read(path):
    """They name no dtype; parameters and times are those of EXPECTED."""
    profile = Profile.load(path)
    assert {layer.dtype for layer in profile.layers} == {"float32"}
    num_parameters, forward_ms, backward_ms = EXPECTED[path.stem]
    assert profile.num_parameters == num_parameters
    assert profile.forward_ms == pytest.approx(forward_ms, abs=0.01)
    assert profile.backward_ms == pytest.approx(backward_ms, abs=0.01)


def shapes_of(name):
    """Of every parameter, by layer."""
    return {layer.name: layer.parameters for layer in Profile.load(PROFILES / f"{name}.json").layers}


def test_the_profile_of_vgg16():
    """Configuration D: 3 x 3 convolutions, then three layers that hold most of the weights; each with a bias."""
    shapes = shapes_of("vgg16")
    channels = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    for index, (before, after) in enumerate(itertools.pairwise(channels), 1):
        assert shapes.pop(f"conv{index}") == ((after, before, 3, 3), (after,))
    num_weights = {name: (math.prod(weight), *bias) for name, (weight, bias) in shapes.items()}
    assert num_weights == {"fc6": (102_760_448, 4096), "fc7": (16_777_216, 4096), "fc8": (4_096_000, 1000)}


@pytest.mark.parametrize(
    ("name", "num_layers", "of_layer", "of_embeddings"),
    [("bert_large", 24, 12_596_224, 31_299_584), ("gpt_124m", 12, 7_087_872, 39_383_808)],
)
def test_the_profiles_of_transformers(name, num_layers, of_layer, of_embeddings):
    """As many equal layers, behind the embeddings; GPT's head has a norm of its own and shares the embeddings."""
    layers = Profile.load(PROFILES / f"{name}.json").layers
    sizes = [sum(map(math.prod, layer.parameters)) for layer in layers]
    assert sizes == [of_embeddings, *[of_layer] * num_layers, *([1536] if name == "gpt_124m" else [])]
    assert len({(layer.forward_ms, layer.backward_ms) for layer in layers[1 : num_layers + 1]}) == 1


def test_the_profile_of_resnet50():
    """53 convolutions and their batch norms, those of a shortcut beside another one, and the classifier."""
    shapes = shapes_of("resnet50")
    assert shapes.pop("fc") == ((1000, 2048), (1000,))
    assert sum(len(shape) == 4 for parameters in shapes.values() for shape in parameters) == 53
    assert all(len(parameters) in (3, 6) for parameters in shapes.values())


def test_wire_over_compute():
    """2 (n-1)/n of the bits over the rate, over the 0.1 s of forward and backward; a host alone sends nothing."""
    num_parameters = 30 * 4 + 30 + 5 * 30
    assert TWO.wire_over_compute(4, 100) == pytest.approx(1.5 * 32 * num_parameters / 100e6 / 0.1)
    assert TWO.wire_over_compute(2, 100) == pytest.approx(32 * num_parameters / 100e6 / 0.1)
    assert TWO.wire_over_compute(1, 100) == 0
    assert Profile("", "", (Layer("a", ((3,),), 0.0, 0.0),)).wire_over_compute(2, 100) == math.inf


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
        ('{"name": "x", "source": "y", "layers": 3}', "one layer or more"),
        ('{"name": "x", "source": "y", "layers": [3]}', "a layer is 3"),
        ("parameters=[[0, 3]]", "expected their shapes"),
        ('{"name": "x", "source": null, "layers": [3]}', "source is None, expected a string"),
        ("name=3", "the name of a layer is 3, expected a string"),
        ("parameters=[]", "has no layer with parameters"),
        ("forward_ms=-1", "expected milliseconds"),
        ('backward_ms="fast"', "expected milliseconds"),
        ('dtype="int8"', "dtype of layer 'a' is 'int8', expected one of float32, "),
        ('shape="round"', "expected an object"),
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


@pytest.mark.timed
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
    assert 0.04 <= forward_s < 0.4  # a tenth or ten times of it is another unit
    assert [name.split(".")[1] for name, _ in ready] == ["1", "0", "0"]  # the last layer's first
    times = [at - begin for _, at in ready]
    assert 0.04 <= times[0] < times[1] and 0.06 <= times[1] < 0.6
    assert [p.grad.shape for p in model.parameters()] == [(30, 4), (30,), (5, 30)]
    assert all(p.grad.count_nonzero() == p.numel() for p in model.parameters())


@pytest.mark.timed
def test_what_the_host_does_meanwhile_takes_no_time_of_the_accelerators():
    profile = Profile("two", "made up", (Layer("first", ((3,),), 0.0, 600.0), Layer("second", ((3,),), 0.0, 100.0)))
    model = SleepingModel(profile)
    model.layers[1].weights[0].register_post_accumulate_grad_hook(lambda _: time.sleep(0.5))
    output = model()
    begin = time.perf_counter()
    output.backward()
    assert 0.7 <= time.perf_counter() - begin < 1.2  # of which 0.5 are the host's, under the 0.6 of the first layer


def test_gradients_of_the_sleeping_model_are_the_same_memory_in_every_step():
    model = SleepingModel(TWO)
    addresses = []
    for _ in range(2):
        model.zero_grad()
        model().backward()
        addresses.append([p.grad.data_ptr() for p in model.parameters()])
    assert addresses[0] == addresses[1]


def test_bench_record(tmp_path, capsys):
    out = tmp_path / "napping.json"
    argv = ["bench", "record", f"{__file__}:napping", "--out", str(out), "--repetitions", "1", "--name", "nap"]
    assert cli.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("nap: 2 layers, 144 parameters, forward ")
    assert "\nwire over compute, 4 hosts with links of so many Gbit/s: " in printed
    assert Profile.load(out).num_parameters == 144


SCRIPT = """\
from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import torch


@dataclass
class Sizes:
    features: int


def make():
    assert callable(random.random)  # the module of that name, not the script
    sizes = pickle.loads(pickle.dumps(Sizes(3)))
    return torch.nn.Linear(sizes.features, 2), lambda model: model(torch.ones(1, 3)).sum()
"""


@pytest.mark.parametrize("name", ["a_script_of_its_own.py", "with-hyphens and.dots.py", "random.py", "torch.py"])
def test_a_script_with_dataclasses_that_are_pickled(tmp_path, name, monkeypatch):
    """Whose name may be that of another module, which stays what it is."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(sys.modules)
    script = tmp_path / name
    script.write_text(SCRIPT)
    argv = ["bench", "record", f"{script}:make", "--out", str(tmp_path / "x.json"), "--repetitions", "1"]
    assert cli.main(argv) == 0
    assert Profile.load(tmp_path / "x.json").num_parameters == 8
    assert all(sys.modules[module] is before[module] for module in before)
    (added,) = [name for name, module in sys.modules.items() if getattr(module, "__file__", None) == str(script)]
    del sys.modules[added]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nraise ValueError('no data')\n", 'ValueError: no data\n  File "{}", line 2, in <module>\n'),
        ("import no_such_module_1\n", "ModuleNotFoundError: No module named 'no_such_module_1'\n  File \"{}\", line 1"),
        ("def f(:\n", 'File "{}", line 1\n'),
        ("raise SystemExit\n", 'SystemExit; it ends when it is imported: put what runs it below `if __name__ == "'),
    ],
)
def test_a_script_that_raises(tmp_path, capsys, monkeypatch, text, message):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "raises_at_once.py"
    path.write_text(text)
    assert cli.main(["bench", "record", f"{path}:make", "--out", str(tmp_path / "x.json")]) == 1
    printed = capsys.readouterr().err
    assert f"'{path}' cannot be imported: " in printed and message.format(path) in printed
    assert "bench.py" not in printed and "importlib" not in printed
    assert "raises_at_once" not in sys.modules


def swapped():
    model, loss = napping()
    return loss, model


def two_models():
    return torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)


def no_loss():
    return torch.nn.Linear(2, 2), 3


@pytest.mark.parametrize(
    ("name", "returned"),
    [("swapped", "(function, Sequential)"), ("two_models", "(Linear, Linear)"), ("no_loss", "(Linear, int)")],
)
def test_what_is_no_model_and_its_loss(tmp_path, capsys, name, returned):
    assert cli.main(["bench", "record", f"{__file__}:{name}", "--out", str(tmp_path / "x.json")]) == 1
    printed = capsys.readouterr().err
    assert f"{name} returned {returned}, expected (model, loss): a torch.nn.Module, and a function of it" in printed


def a_float():
    model = torch.nn.Linear(2, 2)
    return model, lambda model: model(torch.ones(1, 2)).sum().item()


def a_vector():
    model = torch.nn.Linear(2, 3)
    return model, lambda model: model(torch.ones(2))


def detached():
    model = torch.nn.Linear(2, 3)
    return model, lambda model: model(torch.ones(2)).sum().detach()


def lazy():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    return model, lambda model: model(torch.ones(1, 2)).sum()


def wants(argument):
    return argument


def raises_in_the_loss():
    return torch.nn.Linear(2, 3), lambda model: model(torch.ones(7)).sum()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_float", "of type float, expected a tensor of one element that has a gradient"),
        ("a_vector", "the loss is a tensor of shape (3,), expected a tensor of one element"),
        ("detached", "the loss is a tensor that needs no gradient, expected"),
        ("lazy", "parameters of layer '0' have no shape yet; run the model once before"),
        ("wants", "wants() raised TypeError: wants() missing 1 required positional argument: 'argument'"),
        ("raises_in_the_loss", "a step of {}:raises_in_the_loss raised RuntimeError: "),
    ],
)
def test_a_step_that_cannot_be_taken(tmp_path, capsys, name, message):
    assert cli.main(["bench", "record", f"{__file__}:{name}", "--out", str(tmp_path / "x.json")]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("bagua bench: ") and message.replace("{}", __file__) in printed
    assert (f'File "{__file__}"' in printed) == (name == "raises_in_the_loss")
    assert not (tmp_path / "x.json").exists()


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repetitions", "0"], "repetitions is 0, expected an integer of at least 1"),
        (["--repetitions", "-3"], "repetitions is -3, expected"),
        (["--out", "{}/missing/x.json"], "there is no folder {}/missing; make it, or name another one"),
        (["--out", "{}"], "--out is the folder {}, expected a file, such as {}/profile.json"),
        (
            ["--out", "/proc/x.json"],
            "--out is /proc/x.json, which cannot be written (No such file or directory); name a",
        ),
        (["--out", "{}/" + 300 * "x"], "which cannot be written (File name too long); name a file in a folder of your"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(tmp_path, capsys, options, message):
    argv = ["--out", f"{tmp_path}/x.json", *(option.format(tmp_path) for option in options)]
    assert cli.main(["bench", "record", f"{__file__}:no_function", *argv]) == 1
    assert message.replace("{}", str(tmp_path)) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_somebody_elses(tmp_path, capsys):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        os.seteuid(65534)
    try:
        assert bagua.cli.bench.main(["record", f"{__file__}:no_function", "--out", f"{folder}/x.json"]) == 1
    finally:
        os.seteuid(user)
    assert f"--out is {folder}/x.json, " in capsys.readouterr().err
