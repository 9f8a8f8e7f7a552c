"""qadam and its optimizer beside torch's Adam, and beside Adam with a frozen v in plain float64 loops."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.algorithms.test_bytegrad import quantise
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

LR, BETAS, EPS, FLOOR, DECAY = 0.05, (0.9, 0.99), 1e-8, 1e-6, 0.1
WARMUP, NUM_STEPS = 4, 9
SHAPES = [(64, 16), (32, 32)]  # one block of 2048 together
NUMEL = 2048


# ---- the optimizer


@fast_in(
    "weight_decay, dtype",
    [(DECAY, torch.float32), (0.0, torch.bfloat16)],
    list(itertools.product([0.0, DECAY], [torch.float32, torch.bfloat16])),
)
def test_warm_up_is_torch_adam_bit_for_bit(weight_decay, dtype):
    def train(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(dtype)
        optimizer = make(model.parameters())
        for step in range(20):
            optimizer.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
            model(x).square().mean().backward()
            optimizer.step()
        return model.state_dict()

    options = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    ours = train(lambda p: bagua.optim.QAdam(p, warmup_steps=20, **options))
    theirs = train(lambda p: torch.optim.Adam(p, **options))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def _after_adam(kind, num_steps, warmup_steps, **options):
    """The weights of an Adam that goes on, and those of a QAdam that has taken over its state."""
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
def test_continues_from_the_state_of_an_adam(kind):
    assert torch.equal(*_after_adam(kind, 5, 20, weight_decay=0.0))
    with pytest.raises(InvalidArgument, match="an Adam that has made 5 steps, and warmup_steps is 5; .* above 5"):
        _after_adam(kind, 5, 5, weight_decay=0.0)
    refused = [{"maximize": True}, {"amsgrad": True}, *([{"weight_decay": 0.1}] if kind is torch.optim.AdamW else [])]
    for options in refused:
        with pytest.raises(InvalidArgument, match="without maximize, amsgrad and decoupled weight decay"):
            _after_adam(kind, 1, 20, **{"weight_decay": 0.0, **options})


@pytest.mark.parametrize("name", ["NAdam", "SGD"])
def test_takes_no_state_of_another_optimizer(name):
    parameter = torch.nn.Parameter(torch.ones(3))
    other, own = getattr(torch.optim, name)([parameter], lr=LR), bagua.optim.QAdam([parameter], lr=LR)
    before = own.state_dict()
    for _ in range(2):  # before its first step, and after it
        with pytest.raises(InvalidArgument, match="of neither a QAdam nor a plain Adam"):
            own.load_state_dict(other.state_dict())
        assert own.state_dict() == before
        parameter.grad = torch.ones(3)
        other.step()


@fast_in("variance_floor", [None, 1e-2], [0.0])
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
        grad[::9] = 0 if step < 3 else 1  # 57 elements without a second moment
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
    assert torch.equal(parameters[0] == 0, torch.arange(512) % 9 == 0) and not parameters[1].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 0}, "warmup_steps is 0, expected an integer of at least 1, or 'auto'"),
        ({"warmup_steps": "automatic"}, "warmup_steps is 'automatic', expected"),
        ({"betas": (0.9, 1.0)}, "betas is .*, expected two numbers"),
        ({"eps": -1.0}, "eps is -1.0, expected a number, 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay is nan"),
        ({"variance_floor": "x"}, "variance_floor is 'x', expected a number, 0 or more"),
    ],
)
def test_options_out_of_range(options, message):
    weight, bias = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(1))
    optimizer = bagua.optim.QAdam([weight])
    with pytest.raises(InvalidArgument, match=message):
        bagua.optim.QAdam([weight], **options)
    with pytest.raises(InvalidArgument, match=message):
        optimizer.add_param_group({"params": [bias], **options})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("qadam", options)


def _scale(step, settles_after):
    return 2.0 ** (max(settles_after - step, 0) / 10)  # of gradients: it falls until then


def _settled_at(settles_after, num_steps, beta2):
    """The step after which the sum of v has changed by at most 4% in 1 / (1 - b2) steps; gradients are +-scale."""
    v, before = 0.0, 0.0
    for step in range(1, num_steps + 1):
        v = beta2 * v + (1 - beta2) * _scale(step, settles_after) ** 2
        if step % round(1 / (1 - beta2)) == 0:
            norm = v / (1 - beta2**step)
            if before and 0.96 <= norm / before <= 1 / 0.96:
                return step, v
            before = norm
    return None, v


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settles_after, beta2", [(0, 0.9), (25, 0.9), (30, 0.8)])
def test_the_warm_up_ends_when_v_is_steady(settles_after, beta2, fused):
    expected, v = _settled_at(settles_after, 100, beta2)
    weight = torch.nn.Parameter(torch.ones(6))
    optimizer = bagua.optim.QAdam([weight], warmup_steps="auto", betas=(0.9, beta2), fused=fused)
    for step in range(1, 101):
        weight.grad = torch.tensor([1.0, -1.0] * 3) * _scale(step, settles_after)
        optimizer.step()
        assert optimizer.is_warm(weight, optimizer.param_groups[0]) == (step >= expected)
        if step == 50:  # what it has seen is in its state
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = bagua.optim.QAdam([weight], warmup_steps="auto", fused=fused)
            optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["settled_at"] == expected
    assert optimizer.state[weight]["exp_avg_sq"].tolist() == pytest.approx([v] * 6, rel=1e-5)


def test_a_look_is_taken_once():
    """A step in which the group has no gradient right after a look compares nothing with itself."""
    weight, other = torch.nn.Parameter(torch.ones(6)), torch.nn.Parameter(torch.ones(2))
    optimizer = bagua.optim.QAdam([{"params": [weight]}, {"params": [other]}], warmup_steps="auto", betas=(0.9, 0.9))
    for step in range(1, 31):
        weight.grad = torch.ones(6) * 2.0**step
        optimizer.step()
        weight.grad, other.grad = None, torch.ones(2)
        optimizer.step()
    assert optimizer.param_groups[0]["settled_at"] is None
    assert optimizer.param_groups[1]["settled_at"] is not None


def test_no_gradient_is_not_steady():
    weight = torch.nn.Parameter(torch.ones(6))
    optimizer = bagua.optim.QAdam([weight], warmup_steps="auto", betas=(0.9, 0.9))
    for _ in range(30):
        weight.grad = torch.zeros(6)
        optimizer.step()
    assert optimizer.param_groups[0]["settled_at"] is None


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_the_options_that_were_given(make_copy):
    weight = torch.nn.Parameter(torch.ones(3))
    other = make_copy(bagua.optim.QAdam([weight], warmup_steps=5, betas=(0.8, 0.9)))
    other.check_given({"betas": [0.8, 0.9], "eps": 1e-3}, "x", "y")
    with pytest.raises(InvalidArgument, match=r"warmup_steps is 6 for x and 5 for y.param_groups\[0\]"):
        other.check_given({"warmup_steps": 6}, "x", "y")


# ---- on ranks, beside plain loops


def _wrap(model, optimizer, **options):
    return bagua.with_bagua(model, optimizer, algorithm="qadam", min_compressed_bytes=0, **options)


def _floored(v, variance_floor):
    """v when the warm-up has ended: max(v, floor times the mean), or 0 where v is 0, of each tensor of SHAPES."""
    result, end = [], 0
    for rows, columns in SHAPES:
        part = v[end : end + rows * columns]
        least = variance_floor * math.fsum(part) / len(part)
        result += [max(value, least) if value else 0.0 for value in part]
        end += len(part)
    return result


def _mean(per_rank):
    return [sum(values) / len(values) for values in zip(*per_rank, strict=True)]


def _minmax(momenta):
    """Two quantisations: of each rank's, and of their mean."""
    return quantise(_mean([quantise(momentum) for momentum in momenta]))


class _OneBit:
    """1-bit Adam's two-shot average: residuals of every rank and of the owner, here rank 0, of the one block."""

    def __init__(self) -> None:
        self.residuals: dict[object, list[float]] = {}

    def code(self, of, values):
        total = [a + r for a, r in zip(values, self.residuals.get(of, [0.0] * len(values)), strict=True)]
        scale = sum(map(abs, total)) / len(total)
        code = [scale if value >= 0 else -scale for value in total]
        self.residuals[of] = [a - b for a, b in zip(total, code, strict=True)]
        return code

    def __call__(self, momenta):
        return self.code("owner", _mean([self.code(rank, momentum) for rank, momentum in enumerate(momenta)]))


def oracle(n, compress, weight_decay=0.0, max_norm=math.inf, variance_floor=FLOOR, num_steps=NUM_STEPS):
    """x by step. ``compress`` makes one momentum of the ranks'; the gradient that leads to it is what is clipped."""
    (beta1, beta2), history = BETAS, []
    x, m, v = ([0.0] * NUMEL for _ in range(3))
    for t in range(1, num_steps + 1):
        targets = [target_of(rank, t - 1, NUMEL).tolist() for rank in range(n)]
        grads = [[value - c for value, c in zip(x, target, strict=True)] for target in targets]
        g = _mean(grads)
        if t > WARMUP:
            old = [beta1 * a + (1 - beta1) * weight_decay * b for a, b in zip(m, x, strict=True)]
            c = compress([[a + (1 - beta1) * b for a, b in zip(old, grad, strict=True)] for grad in grads])
            g = [(a - b) / (1 - beta1) for a, b in zip(c, old, strict=True)]
        factor = min(1.0, max_norm / (math.sqrt(sum(a * a for a in g)) + 1e-6))
        g = [factor * a + weight_decay * b for a, b in zip(g, x, strict=True)]
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        if t <= WARMUP:
            v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        corrections = 1 - beta1**t, 1 - beta2 ** min(t, WARMUP)
        steps = [LR * (a / corrections[0]) / ((b / corrections[1]) ** 0.5 + EPS) for a, b in zip(m, v, strict=True)]
        x = [a - b for a, b in zip(x, steps, strict=True)]
        if t == WARMUP:
            v = _floored(v, variance_floor)
        history.append(x)
    return history


def _train(rank, world_size, codec, weight_decay, max_norm, variance_floor, dtype):
    with process_group():
        model = Quadratic(SHAPES, dtype)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=WARMUP, betas=BETAS, eps=EPS)
        _wrap(model, optimizer, codec=codec, weight_decay=weight_decay, variance_floor=variance_floor)
        history = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            model(target_of(rank, step, NUMEL).to(dtype)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            history.append(weights_of(model))
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        moments = {f"{i} {k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items() if k != "step"}
        assert_equal_on_all_ranks(moments)
        return history


# The ranks, codec, decay, norm and floor; norms are about 30 in the warm-up.
CASES = {
    "fp16": (2, "fp16", 0.0, math.inf, FLOOR),
    "floor": (2, "fp16", DECAY, math.inf, 0.5),
    "minmax_uint8": (2, "minmax_uint8", DECAY, math.inf, FLOOR),
    "minmax_uint8, clipped": (4, "minmax_uint8", 0.0, 3.0, FLOOR),
    "onebit": (4, "onebit", 0.0, math.inf, FLOOR),
    "onebit, clipped": (2, "onebit", DECAY, 3.0, FLOOR),
}


@fast_in("case", ["floor", "minmax_uint8, clipped", "onebit, clipped"], CASES)
def test_follows_the_oracle(pool2, pool4, case):
    n, codec, weight_decay, max_norm, floor = CASES[case]
    pool = {2: pool2, 4: pool4}[n]
    found = pool.run(_train, args=(codec, weight_decay, max_norm, floor, torch.float32))[0]
    compress = {"fp16": _mean, "minmax_uint8": _minmax, "onebit": _OneBit()}[codec]
    for step, weights in enumerate(oracle(n, compress, weight_decay, max_norm, floor)):
        off = (torch.tensor(found[step], dtype=torch.float64) - torch.tensor(weights)).abs()
        if codec == "fp16":  # which rounds m, over a small v
            assert float(off.max()) < (1e-5 if step < WARMUP else 2e-3), step
        else:  # A value at the edge of two codes may fall to either side of it, and then goes another way.
            assert float((off > 1e-4).double().mean()) < 0.02, (step, float(off.max()))


def _finds_the_end_of_the_warm_up(rank, world_size):
    with process_group():
        model = Quadratic(SHAPES)
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        groups = [{"params": list(model.parameters())}, {"params": [frozen]}]
        optimizer = bagua.optim.QAdam(groups, lr=1e-6, betas=(0.9, 0.9))
        _wrap(model, optimizer, codec="onebit", warmup_steps="auto")
        for step in range(40):
            model.zero_grad()
            model(target_of(rank, step, NUMEL).float()).backward()
            optimizer.step()
        ends = optimizer.param_groups[0]["settled_at"]
        declared = {bucket.declaration.codec for bucket in model.bagua.buckets}
        assert (ends is not None, declared) == (True, {"onebit"})
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        return ends


def test_ranks_end_the_warm_up_together(pool2):
    assert len(set(pool2.run(_finds_the_end_of_the_warm_up))) == 1


def test_weights_in_bfloat16(pool2):
    """They and m are rounded to 8 bits in each step, of weights up to 0.5."""
    found = pool2.run(_train, args=("minmax_uint8", 0.0, math.inf, FLOOR, torch.bfloat16))[0]
    for step, weights in enumerate(oracle(2, _minmax)):
        off = (torch.tensor(found[step], dtype=torch.float64) - torch.tensor(weights)).abs()
        assert float(off.mean()) < 2e-3 * (step + 1), (step, float(off.mean()))


def _accumulates(rank, world_size, in_no_sync):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=WARMUP, betas=BETAS, eps=EPS)
        _wrap(model, optimizer, codec="fp16")
        history = []
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            target = target_of(rank, step, NUMEL).float()
            # Adam does not notice if every step lacks the same share of its gradient, so the shares differ.
            share = (0.875, 0.125, 0.5)[step % 3]
            with model.no_sync() if in_no_sync else contextlib.nullcontext():
                (model(target) * share).backward()
            (model(target) * (1 - share)).backward()
            optimizer.step()
            history.append(weights_of(model))
        return history


@fast_in("in_no_sync", [False], [True, False])
def test_accumulation_moves_the_momentum_once(pool2, in_no_sync):
    found = pool2.run(_accumulates, args=(in_no_sync,))[0]
    for step, weights in enumerate(oracle(2, _mean)):
        assert found[step] == pytest.approx(weights, abs=1e-5 if step < WARMUP else 2e-3), step


# ---- which weights move


def _late(rank, world_size, num_steps, first_step):
    with process_group():
        model = Quadratic(SHAPES)
        optimizer = bagua.optim.QAdam(model.parameters(), lr=LR, warmup_steps=2, betas=BETAS, eps=EPS)
        _wrap(model, optimizer, codec="onebit", find_unused_parameters=True)
        declared, moments = [], []
        for step in range(num_steps):
            optimizer.zero_grad()
            targets = target_of(rank, step, NUMEL).float().split([part.numel() for part in model.parts])
            num_used = 2 if step >= first_step else 1
            model(torch.cat(targets))
            pairs = list(zip(model.parts, targets, strict=True))[:num_used]
            sum(((part.reshape(-1) - c) ** 2).sum() / 2 for part, c in pairs).backward()
            declared.append([str(bucket.declaration) for bucket in model.bagua.buckets])
            optimizer.step()
            moments.append(optimizer.state[model.parts[1]].get("exp_avg_sq", torch.zeros(32, 32)).reshape(-1).tolist())
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        return declared, moments


def test_a_late_parameter_learns_its_v_at_full_precision(pool2):
    num_steps, first_step, beta2 = 8, 4, BETAS[1]
    declared, moments = pool2.run(_late, args=(num_steps, first_step))[0]
    own = "all_reduce, full precision (warm-up of parts.1)"
    expected = ["all_reduce, full precision (warm-up)"] * 2 + [own] * 4 + ["all_reduce, onebit"] * 2
    assert declared == [[text] for text in expected]
    x, m, v = ([0.0] * 1024 for _ in range(3))
    for step in (first_step, first_step + 1):  # its own warm-up is plain Adam
        t = step - first_step + 1
        targets = [target_of(i, step, NUMEL)[-1024:].tolist() for i in range(2)]
        g = [sum(a - target[e] for target in targets) / 2 for e, a in enumerate(x)]
        m = [BETAS[0] * a + (1 - BETAS[0]) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        scales = [(b / (1 - beta2**t)) ** 0.5 + EPS for b in v]
        x = [a - LR * b / (1 - BETAS[0] ** t) / c for a, b, c in zip(x, m, scales, strict=True)]
        assert moments[step] == pytest.approx(v, rel=1e-4, abs=1e-9), step
    assert moments[-1] == moments[first_step + 1]


# ---- a loss scale, and checkpoints


# ---- what it refuses


def _options_of_groups(rank, world_size):
    with process_group():
        model = Quadratic(SHAPES)
        with pytest.raises(InvalidArgument, match=r"steps with bagua.optim.QAdam, but optimizers\[0\] is a Adam"):
            _wrap(model, torch.optim.Adam(model.parameters()))
        with pytest.raises(InvalidArgument, match="needs the model's optimizer, a bagua.optim.QAdam"):
            _wrap(model, ())
        first, second = model.parts
        optimizer = bagua.optim.QAdam([first], warmup_steps=1)
        with pytest.raises(InvalidArgument, match="no optimizer .* steps parts.1; pass all .* freeze what none"):
            _wrap(model, optimizer)
        groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
        optimizer = bagua.optim.QAdam(groups, eps=1e-6)
        with pytest.raises(InvalidArgument, match=r"weight_decay is 0.3 for algorithm 'qadam' and 0.1 for optimizers"):
            _wrap(model, optimizer, weight_decay=0.3)
        with pytest.raises(InvalidArgument, match=r"is 0.1 for .* and 0.0 for optimizers\[0\].param_groups\[1\]"):
            _wrap(model, optimizer, weight_decay=0.1)
        with pytest.raises(InvalidArgument, match="eps is 1e-07 for algorithm 'qadam' and 1e-06 for"):
            _wrap(model, optimizer, eps=1e-7)
        assert not hasattr(model, "bagua")
        _wrap(model, optimizer, warmup_steps=3, eps=1e-6, betas=[0.8, 0.9])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
        assert all(group["warmup_steps"] == 3 and group["eps"] == 1e-6 for group in optimizer.param_groups)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "eps": 1e-5})
        assert optimizer.param_groups[2]["warmup_steps"] == 3 and optimizer.param_groups[2]["eps"] == 1e-5
        step_once(model, optimizer, rank, 0)


def test_options_of_parameter_groups_are_kept(pool2):
    pool2.run(_options_of_groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error_feedback": 1}, "error_feedback is 1, expected True, False or None"),
        ({"codec": "onebit", "error_feedback": False}, "pass error_feedback=True"),
        ({"average": False}, "average=False would let it grow"),
    ],
)
def test_options_of_the_algorithm(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("qadam", options)
