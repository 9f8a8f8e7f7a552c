"""The fused step of bagua.optim.QAdam on the CPU: plain float64 loops, the operators' numbers, checkpoints."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument

WARMUP, LR, BETAS, EPS, DECAY, FLOOR = 3, 0.05, (0.9, 0.99), 1e-6, 0.1, 0.01
OPTIONS = {"lr": LR, "warmup_steps": WARMUP, "betas": BETAS, "eps": EPS, "weight_decay": DECAY, "variance_floor": FLOOR}
SHAPES = [(3, 5), (1,), (0,), (70,), (2, 3, 4, 4)]
# The results differ by the rounding to the dtype between two steps.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def parameters_of(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in SHAPES]
    made[-1] = made[-1].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(tensor) for tensor in made]


def set_gradients(parameters, step):
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=generator)
        grad.flatten()[::3] = 0  # there v stays 0 in the warm-up
        if parameter.dim() == 4 and step % 2:
            grad = grad.to(memory_format=torch.channels_last)
        parameter.grad = grad.to(parameter.device, parameter.dtype)


def train(optimizer, parameters, num_steps=6, begin=0):
    for step in range(begin, begin + num_steps):
        set_gradients(parameters, step)
        optimizer.step()


def expected(num_steps, dtype):
    """Returns the weights by element, in float64; the gradients are those of ``dtype``."""
    parameters = parameters_of(dtype)
    x = [p.detach().double().flatten().tolist() for p in parameters]
    m, v = ([[0.0] * len(one) for one in x] for _ in range(2))
    for t in range(1, num_steps + 1):
        set_gradients(parameters, t - 1)
        for i, parameter in enumerate(parameters):
            for e, grad in enumerate(parameter.grad.double().flatten().tolist()):
                g = grad + DECAY * x[i][e]
                m[i][e] = BETAS[0] * m[i][e] + (1 - BETAS[0]) * g
                if t <= WARMUP:
                    v[i][e] = BETAS[1] * v[i][e] + (1 - BETAS[1]) * g * g
                elif v[i][e] == 0:
                    m[i][e] = 0.0
                root = (v[i][e] / (1 - BETAS[1] ** min(t, WARMUP))) ** 0.5
                x[i][e] -= LR * m[i][e] / (1 - BETAS[0] ** t) / (root + EPS)
            if t == WARMUP and v[i]:
                least = FLOOR * sum(v[i]) / len(v[i])
                v[i] = [max(value, least) if value else 0.0 for value in v[i]]
    return x


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_follows_plain_loops(dtype):
    parameters = parameters_of(dtype)
    optimizer = bagua.optim.QAdam(parameters, **OPTIONS, fused=True)
    train(optimizer, parameters)
    for parameter, wanted in zip(parameters, expected(6, dtype), strict=True):
        tolerance = TOLERANCES[dtype]
        assert parameter.detach().double().flatten().tolist() == pytest.approx(wanted, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("refresh_doubling", [0, 1])
def test_gives_the_numbers_of_the_operators_before_and_after_a_checkpoint(refresh_doubling):
    """Each state continues in the other form, which it does not change."""
    ours, theirs = parameters_of(), parameters_of()
    options = {**OPTIONS, "refresh_doubling": refresh_doubling}
    fused, plain = bagua.optim.QAdam(ours, **options, fused=True), bagua.optim.QAdam(theirs, **options)
    for begin in (0, 2, 4):
        train(fused, ours, 2, begin)
        train(plain, theirs, 2, begin)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        of_fused, of_plain = copy.deepcopy(fused.state_dict()), copy.deepcopy(plain.state_dict())
        fused.load_state_dict(of_plain)
        plain.load_state_dict(of_fused)
        assert [fused.param_groups[0]["fused"], plain.param_groups[0]["fused"]] == [True, None]
        assert all(state["step"].device.type == "cpu" for state in fused.state.values())
    assert pickle.loads(pickle.dumps(fused)).param_groups[0]["fused"] is True


def test_large_tensors_are_shared_by_threads_to_the_same_bits():
    results = []
    for num_threads in (1, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            parameters = [torch.nn.Parameter(torch.linspace(-1, 1, numel)) for numel in (5, 300_000, 77, 200_001)]
            optimizer = bagua.optim.QAdam(parameters, warmup_steps=1, fused=True)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = parameter.detach().cos()
                optimizer.step()
            results.append([p.detach().clone() for p in parameters])
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_gradients_that_autograd_has_expanded():
    weights = []
    for fused in (True, False):
        weight = torch.nn.Parameter(torch.ones(4, 3))
        optimizer = bagua.optim.QAdam([weight], lr=0.1, warmup_steps=2, fused=fused)
        for _ in range(3):
            (weight.grad,) = torch.autograd.grad(weight.sum(), weight)
            assert weight.grad.stride() == (0, 0)
            optimizer.step()
            assert weight.grad.eq(1).all()
        weights.append(weight.detach())
    torch.testing.assert_close(*weights)


def test_autograd_notices_a_fused_step():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = bagua.optim.QAdam([weight], fused=True)
    loss = (weight * weight).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_refuses_what_no_kernel_is_for():
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(InvalidArgument, match="fused is 1, expected True, False or None"):
        bagua.optim.QAdam([weight], fused=1)
    for parameter, reason in [
        (torch.nn.Parameter(torch.ones(3).to(torch.float8_e5m2)), "of torch.float8_e5m2"),
        (torch.nn.Parameter(torch.ones(3, device="meta")), "on meta"),
    ]:
        optimizer = bagua.optim.QAdam([weight], fused=True)
        with pytest.raises(InvalidArgument, match=f"a parameter is {reason}"):
            optimizer.add_param_group({"params": [parameter]})
        assert len(optimizer.param_groups) == 1
        bagua.optim.QAdam([parameter])
