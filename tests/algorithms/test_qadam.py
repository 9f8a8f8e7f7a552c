"""qadam and its optimizer beside torch's Adam, and beside Adam with a frozen v in plain float64 loops."""

from __future__ import annotations

import copy
import math
import re
import warnings

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of
from tests.conformance.training import assert_equal_on_all_ranks, process_group

LR, BETAS, EPS, FLOOR = 0.05, (0.9, 0.99), 1e-8, 1e-6
SHAPES = [(64, 16), (32, 32)]  # one block of 2048 together


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_warm_up_is_torch_adam_bit_for_bit(weight_decay):
    def train(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = make(model.parameters())
        for step in range(20):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    ours = train(lambda p: bagua.optim.QAdam(p, warmup_steps=20, **options))
    theirs = train(lambda p: torch.optim.Adam(p, **options))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def floored(v, variance_floor):
    """v when the warm-up has ended: max(v, floor times the mean), or 0 where v is 0, of each tensor of SHAPES."""
    result, end = [], 0
    for rows, columns in SHAPES:
        part = v[end : end + rows * columns]
        least = variance_floor * math.fsum(part) / len(part)
        result += [max(value, least) if value else 0.0 for value in part]
        end += len(part)
    return result


def oracle(n, numel, num_steps, warmup_steps, weight_decay, compress=None, variance_floor=FLOOR):
    """x by step. ``compress`` is what becomes of the ranks' momenta; by default their mean."""
    beta1, beta2 = BETAS
    compress = compress or (lambda momenta: [sum(m[e] for m in momenta) / n for e in range(numel)])
    x, m, v = ([0.0] * numel for _ in range(3))
    history = []
    for step in range(num_steps):
        t = step + 1
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        grads = [[value - c + weight_decay * value for value, c in zip(x, targets[i], strict=True)] for i in range(n)]
        if step < warmup_steps:
            g = [sum(grad[e] for grad in grads) / n for e in range(numel)]
            m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        else:
            m = compress([[beta1 * a + (1 - beta1) * b for a, b in zip(m, grad, strict=True)] for grad in grads])
        frozen = min(t, warmup_steps)
        x = [
            value - LR * (a / (1 - beta1**t)) / ((b / (1 - beta2**frozen)) ** 0.5 + EPS)
            for value, a, b in zip(x, m, v, strict=True)
        ]
        if t == warmup_steps:
            v = floored(v, variance_floor)
        history.append(x)
    return history


class OneBit:
    """1-bit Adam's two-shot average: residuals of every rank and of the owner, here rank 0, of the one block."""

    def __init__(self, n: int, numel: int) -> None:
        self.worker = [[0.0] * numel for _ in range(n)]
        self.owner = [0.0] * numel

    @staticmethod
    def code(values: list[float]) -> list[float]:
        scale = sum(map(abs, values)) / len(values)
        return [scale if value >= 0 else -scale for value in values]

    def __call__(self, momenta: list[list[float]]) -> list[float]:
        sent = []
        for rank, momentum in enumerate(momenta):
            total = [a + r for a, r in zip(momentum, self.worker[rank], strict=True)]
            sent.append(self.code(total))
            self.worker[rank] = [a - b for a, b in zip(total, sent[-1], strict=True)]
        mean = [sum(code[e] for code in sent) / len(sent) for e in range(len(self.owner))]
        total = [a + r for a, r in zip(mean, self.owner, strict=True)]
        result = self.code(total)
        self.owner = [a - b for a, b in zip(total, result, strict=True)]
        return result


def _train(rank, world_size, num_steps, options, algorithm_options):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, **options)
        bagua.with_bagua(model, optimizer, algorithm="qadam", min_compressed_bytes=0, **algorithm_options)
        history = [step_once(model, optimizer, rank, step) for step in range(num_steps)]
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        moments = {f"{i} {k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items() if k != "step"}
        assert_equal_on_all_ranks(moments)
        return history


@pytest.mark.parametrize(("weight_decay", "variance_floor"), [(0.0, None), (0.1, None), (0.1, 0.5)])
def test_follows_the_oracle(pool2, weight_decay, variance_floor):
    options = {"warmup_steps": 4, "betas": BETAS, "eps": EPS, "weight_decay": weight_decay}
    per_rank = pool2.run(_train, args=(10, options, {"codec": "fp16", "variance_floor": variance_floor}))
    floor = FLOOR if variance_floor is None else variance_floor
    expected = oracle(2, 2048, 10, 4, weight_decay, variance_floor=floor)
    for step, weights in enumerate(expected):
        tolerance = 1e-5 if step < 4 else 2e-3  # what float16 rounds of m, over a small v
        assert per_rank[0][step] == pytest.approx(weights, abs=tolerance), step


def test_one_bit_adam_follows_the_oracle(pool4):
    per_rank = pool4.run(_train, args=(10, {"warmup_steps": 4, "betas": BETAS, "eps": EPS}, {"codec": "onebit"}))
    expected = oracle(4, 2048, 10, 4, 0.0, OneBit(4, 2048))
    for step, weights in enumerate(expected):
        off = (torch.tensor(per_rank[0][step], dtype=torch.float64) - torch.tensor(weights)).abs()
        # A value at the edge of two signs may fall to either side of it, and then its residual goes another way.
        assert float((off > 1e-4).double().mean()) < 0.02, (step, float(off.max()))


def _after_adam(kind, num_steps, warmup_steps, **options):
    """A QAdam that has taken over what an Adam has learnt in `num_steps`, and an Adam that goes on."""
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 8)) for _ in range(2)]
    first = kind(parameters[:1], lr=LR, betas=BETAS, **options)

    def step(optimizer, parameter, number):
        parameter.grad = torch.sin(parameter.detach() * 3 + number)
        optimizer.step()

    for number in range(num_steps):
        step(first, parameters[0], number)
    with torch.no_grad():
        parameters[1].copy_(parameters[0])
    second = bagua.optim.QAdam(parameters[1:], warmup_steps=warmup_steps)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for number in range(4):
        step(first, parameters[0], number)
        step(second, parameters[1], number)
    assert second.param_groups[0]["warmup_steps"] == warmup_steps and second.param_groups[0]["lr"] == LR
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_goes_on_from_the_state_of_an_adam(kind):
    assert torch.equal(*_after_adam(kind, 5, 20, weight_decay=0.0))
    with pytest.raises(InvalidArgument, match="an Adam that has made 5 steps, and warmup_steps is 5; .* above 5"):
        _after_adam(kind, 5, 5, weight_decay=0.0)
    for options in ({"maximize": True}, {"amsgrad": True}):
        with pytest.raises(InvalidArgument, match=rf"{next(iter(options))}=True, which QAdam does not have"):
            _after_adam(kind, 1, 20, weight_decay=0.0, **options)
    if kind is torch.optim.AdamW:
        with pytest.raises(InvalidArgument, match="decoupled_weight_decay=True, which QAdam does not have"):
            _after_adam(kind, 1, 20, weight_decay=0.1)


OTHERS = ["NAdam", "RAdam", "Adamax", "SGD", "RMSprop", "Adagrad", "Adadelta"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_takes_no_state_of_another_optimizer(name, has_stepped):
    parameter = torch.nn.Parameter(torch.ones(3))
    other, own = getattr(torch.optim, name)([parameter], lr=LR), bagua.optim.QAdam([parameter], lr=LR)
    if has_stepped:
        parameter.grad = torch.ones(3)
        other.step()
    before = own.state_dict()
    with pytest.raises(InvalidArgument, match="of neither a QAdam nor an Adam"):
        own.load_state_dict(other.state_dict())
    assert own.state_dict() == before


@pytest.mark.parametrize("variance_floor", [None, 0.0, 1e-2])
def test_the_floor_of_the_second_moment(variance_floor):
    """v <- max(v, floor times its mean) of each tensor once, when its warm-up ends; where v is 0 it stays 0."""
    floor = FLOOR if variance_floor is None else variance_floor
    generator = torch.Generator().manual_seed(5)
    scales = 10.0 ** -torch.arange(0.0, 8.0).repeat(64)  # of the gradients' elements
    parameters = [torch.nn.Parameter(torch.zeros(512)) for _ in range(2)]
    optimizer = bagua.optim.QAdam(parameters, warmup_steps=3, betas=BETAS, variance_floor=variance_floor)
    expected = [0.0] * 512
    for step in range(5):
        grad = scales * torch.randn(512, generator=generator)
        grad[::9] = 0
        parameters[0].grad, parameters[1].grad = grad, torch.zeros(512)
        if step < 3:
            expected = [BETAS[1] * v + (1 - BETAS[1]) * g * g for v, g in zip(expected, grad.tolist(), strict=True)]
        if step == 2:
            mean = math.fsum(expected) / 512
            num_raised = sum(0 < v < floor * mean for v in expected)
            expected = [max(v, floor * mean) if v else 0.0 for v in expected]
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # a floor twice would be another one
        assert optimizer.state[parameters[0]]["exp_avg_sq"].tolist() == pytest.approx(expected, rel=1e-5, abs=0)
    assert (num_raised > 64) == (floor > 0)
    assert [int(count) for _, count in optimizer.still_weights()] == [57, 512]


def _dead_input(rank, world_size, codec):
    """Weights of an input that is always 0 stay: a codec's rounding of their 0 momentum must not be divided by eps."""
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 16, bias=False)
        before = model.weight.detach().clone()
        optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=5)
        bagua.with_bagua(model, optimizer, algorithm="qadam", codec=codec, min_compressed_bytes=0)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(15):
            x = torch.randn(32, 256, generator=generator)
            x[:, 7] = 0
            optimizer.zero_grad()
            (model(x) - x[:, 16:32]).square().mean().backward()
            optimizer.step()
        moved = (model.weight.detach() - before).abs()
        assert torch.equal(moved[:, 7], torch.zeros(16))
        assert float(moved.sum()) > 0 and float(moved.max()) < 0.1  # 15 steps of about lr each


@pytest.mark.parametrize("codec", ["minmax_uint8", "onebit", "qsgd"])
def test_weights_without_a_second_moment_stay(pool2, codec):
    pool2.run(_dead_input, args=(codec,))


def _faint_input(rank, world_size, factor, variance_floor=None):
    """An input of which hardly anything is seen in the warm-up: v is there, but tiny."""
    with process_group(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 16, bias=False)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=5, variance_floor=variance_floor)
        bagua.with_bagua(model, optimizer, algorithm="qadam", codec="onebit", min_compressed_bytes=0)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8):
            x = torch.randn(32, 256, generator=generator)
            x[:, 7] *= factor
            optimizer.zero_grad()
            (model(x) - x[:, 16:32]).square().mean().backward()
            optimizer.step()
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


def test_steps_of_rounding_alone_are_told(pool2):
    first, second = pool2.run(_faint_input, args=(1e-5, 0.0))
    assert len(first) == 1 and second == []
    found = re.search(
        r"moved (\d+) weights of weight by more than 1000 times the learning rate.*codec 'onebit'.*eps=(\S+) ",
        first[0],
    )
    assert found and 1 <= int(found[1]) <= 16  # the weights of that input
    assert 1e-7 < float(found[2]) < 1e-2
    assert pool2.run(_faint_input, args=(1.0, 0.0)) == [[], []]
    assert pool2.run(_faint_input, args=(1e-5,)) == [[], []]  # that is what variance_floor is for


def _switch(rank, world_size):
    """v stands still from the first step after the warm-up, whose gradient counts; m does not."""
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="qadam", warmup_steps=3, betas=BETAS, min_compressed_bytes=0)
        declared, moments = [], []
        for step in range(5):
            declared.append(str(model.bagua.buckets[0].declaration))
            step_once(model, optimizer, rank, step)
            state = optimizer.state[model.parts[0]]
            moments.append((state["exp_avg"].clone(), state["exp_avg_sq"].clone()))
        return declared, moments


def test_the_switch(pool2):
    declared, moments = pool2.run(_switch)[0]
    assert declared == ["all_reduce, full precision (warm-up)"] * 3 + ["all_reduce, minmax_uint8"] * 2
    assert not torch.equal(moments[1][1], moments[2][1])
    assert torch.equal(moments[2][1], moments[3][1]) and torch.equal(moments[3][1], moments[4][1])
    assert not torch.equal(moments[2][0], moments[3][0])


def _accumulates(rank, world_size, in_no_sync):
    """Two parts of a batch before a step: m moves once, by their sum. Adam does not see it if every step lacks the same
    share of its gradient, so the shares differ."""
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2, betas=BETAS)
        bagua.with_bagua(model, optimizer, algorithm="qadam", codec="fp16", min_compressed_bytes=0)
        history = []
        for step in range(5):
            optimizer.zero_grad()
            target = target_of(rank, step, 2048).float()
            share = (0.875, 0.125, 0.5, 0.875, 0.125)[step]
            if in_no_sync:
                with model.bagua.no_sync():
                    (model(target) * share).backward()
            else:
                (model(target) * share).backward()
            (model(target) * (1 - share)).backward()
            optimizer.step()
            history.append(torch.cat([part.detach().reshape(-1) for part in model.parts]).tolist())
        return history


@pytest.mark.parametrize("in_no_sync", [True, False])
def test_accumulation_moves_the_momentum_once(pool2, in_no_sync):
    per_rank = pool2.run(_accumulates, args=(in_no_sync,))
    for step, weights in enumerate(oracle(2, 2048, 5, 2, 0.0)):
        assert per_rank[0][step] == pytest.approx(weights, abs=1e-5 if step < 2 else 2e-3), step


def _late_parameter(rank, world_size):
    """One that is used for the first time after the warm-up has a warm-up of its own: no division by a v of 0."""
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2)
        bagua.with_bagua(
            model, optimizer, algorithm="qadam", codec="onebit", min_compressed_bytes=0, find_unused_parameters=True
        )
        for step in range(8):
            optimizer.zero_grad()
            used = model.parts[: 1 if step < 4 else 2]
            sum((part - 1.0).square().sum() for part in used).backward() if step < 4 else model(
                torch.ones(2048)
            ).backward()
            optimizer.step()
        assert float(model.parts[1].abs().max()) < 8 * LR
        assert_equal_on_all_ranks(dict(model.named_parameters()))


def test_a_parameter_that_comes_late(pool2):
    pool2.run(_late_parameter)


def _errors(rank, world_size):
    with process_group():
        model = Quadratic(SHAPES)
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(InvalidArgument, match=r"steps with bagua.optim.QAdam, but optimizers\[0\] is a Adam"):
            bagua.with_bagua(model, adam, algorithm="qadam")
        with pytest.raises(InvalidArgument, match="needs the model's optimizer, a bagua.optim.QAdam"):
            bagua.with_bagua(model, algorithm="qadam")
        ours = bagua.optim.QAdam(model.parameters(), warmup_steps=5)
        with pytest.raises(InvalidArgument, match=r"warmup_steps is 6 for algorithm 'qadam' and 5 for optimizers\[0\]"):
            bagua.with_bagua(model, ours, algorithm="qadam", warmup_steps=6)
        bagua.with_bagua(model, ours, algorithm="qadam", warmup_steps=5, eps=1e-6)
        assert ours.param_groups[0]["eps"] == 1e-6 and ours.param_groups[0]["warmup_steps"] == 5


def test_errors(pool2):
    pool2.run(_errors)
    for options, message in [
        ({"warmup_steps": 0}, "warmup_steps is 0, expected an integer of at least 1"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"eps": -1.0}, "eps is -1.0, expected a number, 0 or more"),
        ({"variance_floor": -1.0}, "variance_floor is -1.0, expected a number, 0 or more"),
        ({"error_feedback": 1}, "error_feedback is 1, expected True, False or None"),
        ({"codec": "onebit", "error_feedback": False}, "pass error_feedback=True"),
        ({"average": False}, "average=False would let it grow"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            bagua.algorithms.create("qadam", options)
