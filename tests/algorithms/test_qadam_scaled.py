"""qadam where the gradients of backward are larger or smaller than those that the optimizer steps with."""

from __future__ import annotations

import contextlib
import io
import math

import pytest
import torch

import bagua
from tests.algorithms.quadratic import Quadratic, target_of, weights_of
from tests.algorithms.test_qadam import BETAS, EPS, FLOOR, LR, SHAPES, OneBit, floored
from tests.conformance.training import assert_equal_on_all_ranks, process_group

NUMEL = 2048  # of SHAPES


def _unit(model):
    (unit,) = model.bagua.state_dict()["state"]["units"]
    return unit


def _scaler(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)


@contextlib.contextmanager
def _training(codec, **options):
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 64))
        optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=3, **options)
        bagua.with_bagua(model, optimizer, algorithm="qadam", codec=codec, min_compressed_bytes=0)
        yield model, optimizer


def _steps(model, optimizer, scaler, rank, steps, max_norm=None):
    units = []
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        optimizer.zero_grad()
        scaler.scale((model(x) - x).square().mean()).backward()
        if max_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        units.append(_unit(model))
    return units


def _bits(model, optimizer):
    moments = [optimizer.state[parameter]["exp_avg"] for parameter in model.parameters()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


def _under_scale(rank, world_size, codec, max_norm, scale):
    with _training(codec, weight_decay=0.1) as (model, optimizer):
        units = _steps(model, optimizer, _scaler(scale), rank, range(10), max_norm)
        return units, _bits(model, optimizer)


@pytest.mark.parametrize("max_norm", [None, 0.02])
@pytest.mark.parametrize("codec", ["onebit", "minmax_uint8"])
def test_a_scale_that_is_a_power_of_two_changes_no_bit(pool2, codec, max_norm):
    units, plain = pool2.run(_under_scale, args=(codec, max_norm, 1.0))[0]
    scaled_units, scaled = pool2.run(_under_scale, args=(codec, max_norm, 65536.0))[0]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(scaled, plain, strict=True))
    assert scaled_units == [65536 * unit for unit in units]
    assert (set(units) == {1.0}) if max_norm is None else (min(units) > 1)


def _clipped(rank, world_size, scale, max_norm, num_steps):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=4, betas=BETAS, eps=EPS)
        bagua.with_bagua(model, optimizer, algorithm="qadam", codec="onebit", min_compressed_bytes=0)
        scaler, history = _scaler(scale), []
        for step in range(num_steps):
            optimizer.zero_grad()
            scaler.scale(model(target_of(rank, step, NUMEL).float())).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            history.append((weights_of(model), _unit(model)))
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        return history


def _clipped_oracle(n, num_steps, scale, max_norm):
    """Adam with a frozen v: m and g_i are encoded in the unit R of the gradients in backward, then clipped."""
    beta1, beta2 = BETAS
    compress, unit, history = OneBit(n, NUMEL), 1.0, []
    x, m, v = ([0.0] * NUMEL for _ in range(3))
    for step in range(num_steps):
        targets = [target_of(rank, step, NUMEL).tolist() for rank in range(n)]
        grads = [[scale * (value - c) for value, c in zip(x, target, strict=True)] for target in targets]
        if step < 4:
            g = [sum(grad[e] for grad in grads) / n for e in range(NUMEL)]
        else:
            old = [unit * beta1 * a for a in m]
            momenta = [[a + (1 - beta1) * b for a, b in zip(old, grad, strict=True)] for grad in grads]
            g = [(c - a) / (1 - beta1) for c, a in zip(compress(momenta), old, strict=True)]
        in_backward = max(map(abs, g))
        norm = sum((b / scale) ** 2 for b in g) ** 0.5
        g = [b / scale * min(1.0, max_norm / (norm + 1e-6)) for b in g]
        unit = 2.0 ** round(math.log2(in_backward / max(map(abs, g))))
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        if step < 4:
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        x = [
            value - LR * (a / (1 - beta1 ** (step + 1))) / ((b / (1 - beta2 ** min(step + 1, 4))) ** 0.5 + EPS)
            for value, a, b in zip(x, m, v, strict=True)
        ]
        if step + 1 == 4:
            v = floored(v, FLOOR)
        history.append((x, unit))
    return history


def test_clipping_follows_the_oracle(pool2):
    num_steps, scale, max_norm = 9, 1024.0, 3.0  # norms are about 30 in the warm-up
    per_rank = pool2.run(_clipped, args=(scale, max_norm, num_steps))
    expected = _clipped_oracle(2, num_steps, scale, max_norm)
    for step, (weights, unit) in enumerate(expected):
        assert per_rank[0][step][1] == per_rank[1][step][1] == unit and unit > scale, step
        off = (torch.tensor(per_rank[0][step][0], dtype=torch.float64) - torch.tensor(weights)).abs()
        # A value at the edge of two signs may fall to either side of it, and then its residual goes another way.
        assert float((off > 1e-4).double().mean()) < 0.02, (step, float(off.max()))


def _resumed(rank, world_size):
    with _training("minmax_uint8") as (model, optimizer):
        scaler = _scaler(4096.0)
        _steps(model, optimizer, scaler, rank, range(6))
        saved = model.state_dict(), optimizer.state_dict(), model.bagua.state_dict(), scaler.state_dict()
        saved = torch.load(_written(saved), weights_only=True)
        _steps(model, optimizer, scaler, rank, range(6, 9))
        expected = _bits(model, optimizer)
    with _training("minmax_uint8") as (model, optimizer):
        scaler = _scaler(1.0)
        for part, state in zip((model, optimizer, model.bagua, scaler), saved, strict=True):
            part.load_state_dict(state)
        assert _unit(model) == 4096
        _steps(model, optimizer, scaler, rank, range(6, 9))
        assert all(torch.equal(a, b) for a, b in zip(_bits(model, optimizer), expected, strict=True))


def _written(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def test_a_resumed_training_knows_the_unit(pool2):
    pool2.run(_resumed)


def _what_teaches(rank, world_size):
    """Gradients that are not there or 0 teach nothing; nor does a step without a backward before it."""
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=1)
        bagua.with_bagua(
            model, optimizer, algorithm="qadam", codec="fp16", min_compressed_bytes=0, find_unused_parameters=True
        )
        first, second = model.parts

        def unit_after(in_backward, in_step, parts=(first,)):
            optimizer.zero_grad()
            sum((part * in_backward).sum() for part in parts).backward()
            for part in parts:
                part.grad.fill_(in_step)
            optimizer.step()
            return _unit(model)

        assert _unit(model) == 1
        assert unit_after(8.0, 1.0) == 8 and second.grad is None
        assert unit_after(8.0, 0.0) == 8
        assert unit_after(0.0, 1.0) == 8
        assert unit_after(-3.0, 1.0, parts=(first, second)) == 4  # log2 3 = 1.58
        first.grad.mul_(1024)
        optimizer.step()
        assert _unit(model) == 4
        assert unit_after(0.0, 0.0) == 4


def test_what_the_unit_is_learnt_from(pool2):
    pool2.run(_what_teaches)


def _skips(rank, world_size):
    """A step that the scaler skips teaches nothing, and the next one is in half the unit: m stays equal everywhere."""
    with _training("minmax_uint8") as (model, optimizer):
        scaler = _scaler(2.0**14)
        _steps(model, optimizer, scaler, rank, range(5))
        optimizer.zero_grad()
        scaler.scale(model(torch.full((8, 64), float("inf") if rank == 1 else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**13 and _unit(model) == 2.0**14
        assert _steps(model, optimizer, scaler, rank, range(5, 7)) == [2.0**13] * 2
        assert_equal_on_all_ranks({str(i): tensor for i, tensor in enumerate(_bits(model, optimizer))})


def test_a_skipped_step_leaves_the_unit(pool2):
    pool2.run(_skips)
