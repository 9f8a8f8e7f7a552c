"""The profile that is recorded in a training, by a clock that goes by hand."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from bagua.choice import recording
from bagua.choice.prediction import of_plain, to_plain
from bagua.choice.recording import DeviceClock, Recorded, Recording


def _members(*shapes, dtype=torch.float32):
    members = []
    for index, shape in enumerate(shapes):
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
        values = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        members.append(types.SimpleNamespace(index=index, name=f"p{index}", parameter=parameter, values=values))
    return members


def test_medians_of_steps(monkeypatch):
    """Three steps: forward ends after 2 s, gradients become ready at 3 s, 3.5 s and 6 s, backward waits to 8 s, and the
    optimizer takes 1 s. The second step is disturbed."""
    now = 0.0
    monkeypatch.setattr(recording, "time", types.SimpleNamespace(perf_counter=lambda: now))
    first, second, third = members = _members((2, 3), (3,), (5,))
    found = Recording(members, DeviceClock(torch.device("cpu")))
    for step in range(3):
        begin, factor = now, 5.0 if step == 1 else 1.0
        found.begin_step(now)
        for at, member in ((3.0, third), (3.5, second), (6.0, first)):
            now = begin + factor * at
            member.parameter.sum().backward()
        now = begin + factor * 8.0
        found.end_backward()
        third.parameter.sum().backward()  # of a micro-batch of the next step
        now = begin + factor * 9.0
    found.begin_step(now)
    recorded = found.end()
    assert recorded == Recorded((3.0, 0.5, 0.0), before_s=4.0, step_s=9.0)
    assert recorded.compute_s == 7.0
    found.remove()
    first.parameter.sum().backward()  # no hook is left
    profile = recorded.profile(members)
    assert [(layer.name, layer.parameters) for layer in profile.layers] == [
        ("p0", ((2, 3),)),
        ("p1", ((3,),)),
        ("p2", ((5,),)),
    ]
    assert (profile.forward_ms, profile.backward_ms) == (4000.0, 3000.0)
    assert [layer.backward_ms for layer in profile.layers] == [2500.0, 500.0, 0.0]


def test_a_rank_may_use_no_parameter(monkeypatch):
    """As find_unused_parameters allows."""
    monkeypatch.setattr(recording, "time", types.SimpleNamespace(perf_counter=lambda: 5.0))
    members = _members((2,))
    found = Recording(members, DeviceClock(torch.device("cpu")))
    found.begin_step(2.0)
    found.end_backward()
    found.begin_step(6.0)
    assert found.end() == Recorded((None,), before_s=4.0, step_s=4.0)
    assert found.end().profile(members).num_parameters == 2


def test_neighbours_share_layers():
    """A thousand parameters become 64 layers or so, with all shapes in the order of forward, and all time."""
    ready = tuple((999 - index) / 1000 for index in range(1000))
    members = _members(*[(index % 7 + 1,) for index in range(1000)])
    profile = Recorded(ready, 0.5, 2.0).profile(members)
    assert 32 <= len(profile.layers) <= 65
    assert [sorted(layer.parameters) for layer in profile.layers] == [
        sorted((index % 7 + 1,) for index in range(first, last)) for first, last in _places(profile)
    ]
    assert profile.backward_ms == pytest.approx(999.0)
    assert profile.forward_ms == 500.0
    assert of_plain(to_plain(profile)).layers == profile.layers


def _places(profile):
    ends = list(itertools.accumulate(len(layer.parameters) for layer in profile.layers))
    return zip([0, *ends], ends, strict=False)


def test_what_has_no_gradient_and_what_a_profile_holds_otherwise():
    """A parameter without a gradient counts as the last; a scalar has one dimension, a complex number two values."""
    layers = Recorded((0.0, None, 1.0), 0.5, 2.0).profile(_members((), (2,), (3,), dtype=torch.complex64)).layers
    assert [sorted(layer.parameters) for layer in layers] == [[(2, 2), (3, 2)], [(2,)]]
    assert {layer.dtype for layer in layers} == {"float32"}


def test_a_layer_has_one_dtype():
    members = [*_members((2,)), *_members((3,), dtype=torch.bfloat16)]
    members[1].index = 1
    layers = Recorded((0.0, 0.0), 0.5, 2.0).profile(members).layers
    assert sorted((layer.dtype, layer.parameters) for layer in layers) == [("bfloat16", ((3,),)), ("float32", ((2,),))]
