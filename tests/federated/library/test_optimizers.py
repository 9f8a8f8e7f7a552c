"""Server optimizers against torch.optim and formulas, number by number; their derivatives against differences."""

from __future__ import annotations

import collections

import numpy
import pytest
import torch
from torch.func import grad, jacfwd

from bagua.errors import InvalidArgument
from bagua.federated.library.optimizers import SGD, Adam, AdamW, Yogi

SHAPES = {"w": (3, 2), "b": ()}


def values(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()}


def steps(optimizer, number=5):
    value = values(0)
    state = optimizer.init(value)
    for seed in range(1, number + 1):
        before = {name: leaf.clone() for name, leaf in value.items()}
        kept, (value, state) = value, optimizer.apply(value, values(seed), state)
        assert all(torch.equal(kept[name], before[name]) for name in SHAPES), "nothing is changed in place"
    return value


TORCHS = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "nesterov": (
        SGD(0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": (
        Adam(0.1, numpy.array([0.8, 0.95]), 1e-2),
        lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), eps=1e-2),
    ),
    "adamw": (
        AdamW(0.1, (0.8, 0.95), 1e-2, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), eps=1e-2, weight_decay=0.3),
    ),
    "adamw by default": (AdamW(0.1, (0.9, 0.999), 1e-8), lambda p: torch.optim.AdamW(p, lr=0.1)),
}
STEPS = 50


@pytest.mark.parametrize("name", TORCHS)
def test_steps_are_those_of_torch(name):
    ours, theirs = TORCHS[name]
    value = {key: torch.nn.Parameter(leaf) for key, leaf in values(0).items()}
    optimizer = theirs(list(value.values()))
    for seed in range(1, STEPS + 1):
        for key, gradient in values(seed).items():
            value[key].grad = gradient
        optimizer.step()
    torch.testing.assert_close(
        steps(ours, STEPS), {key: leaf.detach() for key, leaf in value.items()}, rtol=1e-12, atol=1e-12
    )


def test_yogi_by_hand():
    found = steps(Yogi(0.1, (0.8, 0.95), 1e-2))
    for name, leaf in values(0).items():
        for index in range(leaf.numel()):
            x, m, v = leaf.flatten()[index].item(), 0.0, 0.0
            for step in range(1, 6):
                g = values(step)[name].flatten()[index].item()
                m = 0.8 * m + 0.2 * g
                v = v - 0.05 * g * g * ((v > g * g) - (v < g * g))
                x -= 0.1 * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)) ** 0.5 + 1e-2)
            assert found[name].flatten()[index].item() == pytest.approx(x, rel=1e-12)


def reordered(tree):
    """The same leaves under the same keys, in an OrderedDict whose keys are in the other order."""
    if not isinstance(tree, dict):
        return tree
    return collections.OrderedDict((key, reordered(tree[key])) for key in reversed(tree))


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9), Adam(0.1)], ids=lambda one: type(one).__name__)
def test_keys_may_be_in_any_order(optimizer):
    """Leaf by leaf, each alone, is the definition; a, b and c have one shape, so that no check finds them swapped."""

    def tree(*numbers):
        a, b, c = (torch.full((2,), number, dtype=torch.float64) for number in numbers)
        return {"a": a, "layers": {"b": b, "c": c}}

    value, state = tree(1.0, 2.0, 3.0), optimizer.init(tree(1.0, 2.0, 3.0))
    alone = {name: (leaf, optimizer.init(leaf)) for name, leaf in (("a", value["a"]), *value["layers"].items())}
    for gradients in ((100.0, 1.0, -7.0), (0.5, -20.0, 3.0)):
        value, state = optimizer.apply(value, reordered(tree(*gradients)), reordered(state))
        for name, number in zip(alone, gradients, strict=True):
            alone[name] = optimizer.apply(alone[name][0], torch.full((2,), number, dtype=torch.float64), alone[name][1])
    found = {"a": value["a"], **value["layers"]}
    assert list(found) == ["a", "b", "c"]
    assert all(torch.equal(found[name], alone[name][0]) for name in alone)


KINDS = {
    "momentum": lambda lr: SGD(lr, momentum=0.9),
    "adamw": lambda lr: AdamW(lr, epsilon=0.1, weight_decay=0.5),
    "yogi": lambda lr: Yogi(lr, epsilon=0.1),
}


@pytest.mark.parametrize("name", KINDS)
def test_training_is_differentiable(name):
    """In the learning rate and in where it begins, through gradients that depend on the values."""

    def trained(rate, start):
        optimizer, value = KINDS[name](rate), {"x": start}
        state = optimizer.init(value)
        for _ in range(3):
            value, state = optimizer.apply(value, {"x": grad(lambda x: (x**4).sum())(value["x"])}, state)
        return value["x"].square().sum()

    rate, start, step = torch.tensor(0.01).double(), torch.tensor([1.0, -0.5, 0.0]).double(), 1e-6
    by_rate = (trained(rate + step, start) - trained(rate - step, start)) / (2 * step)
    torch.testing.assert_close(grad(trained)(rate, start), by_rate, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(jacfwd(trained)(rate, start), by_rate, rtol=1e-6, atol=1e-8)
    found = grad(trained, argnums=1)(rate, start)
    for index in range(2):  # at 0 nothing moves, and nothing is NaN
        there = torch.zeros(3, dtype=torch.float64)
        there[index] = step
        expected = (trained(rate, start + there) - trained(rate, start - there)) / (2 * step)
        torch.testing.assert_close(found[index], expected, rtol=1e-6, atol=1e-8)
    assert found[2] == 0


@pytest.mark.parametrize("optimizer", [SGD(0.1, momentum=0.9, nesterov=True), AdamW(0.1), Yogi(0.1)])
def test_dtypes_are_those_of_the_values(optimizer):
    for dtype, other in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        value = torch.ones(2, dtype=dtype)
        state = before = optimizer.init(value)
        value, state = optimizer.apply(value, torch.ones(2, dtype=other), state)
        assert value.dtype == dtype
        after, first = torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(before)
        assert [leaf.dtype for leaf in after] == [leaf.dtype for leaf in first]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SGD(-0.1), "learning_rate=-0.1, expected 0 to below inf"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), r"betas\[1\]=1.0"),
        (lambda: SGD(0.1).apply(torch.zeros(2), None, ()), "a gradient with None, a NoneType, .*: give zeros"),
        (lambda: Adam(0.1).apply(torch.zeros(2), torch.zeros(2), ()), r"a state \(\) for Adam: use this .* init"),
        (lambda: SGD(0.1).apply(torch.tensor([3]), torch.tensor([1]), ()), "step of torch.int64, expected floating"),
        (
            lambda: SGD(0.1).apply({"x": torch.zeros(2)}, {"x": torch.zeros(3)}, ()),
            r"gradient of shapes .*\(3,\).*, expected those of the values, .*\(2,\)",
        ),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()
