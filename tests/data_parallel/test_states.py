"""The states that the library keeps of parameters for an algorithm: what counts, what is forgotten, what moves."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState, Stage
from tests.conformance.training import process_group

SHAPES = [(3, 5), (7,), (5, 4), (6,), (2, 2, 4)]


class Sums(torch.nn.Module):
    """Has gradients that are the input; those of the first parameter are ready first."""

    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in SHAPES)

    def forward(self, x):
        for weight in reversed(self.weights):
            x = Scale.apply(x, weight)
        return x


class Scale(torch.autograd.Function):
    """The identity, in whose backward each element of the weight gets x times the gradient; raises where x < 0."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if float(x) < 0 and weight.dim() == 3:
            raise RuntimeError("on purpose")
        return grad, torch.full_like(weight, float(x * grad))


@dataclasses.dataclass(kw_only=True)
class Adds(Algorithm):
    """Adds up the mean gradients in both kinds of states; in another stage from the third step on."""

    name = "adds"
    has_stages: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.num_steps = 0

    def stage(self):
        return Stage("late" if self.has_stages and self.num_steps > 1 else "early")

    def parameter_state(self):
        return {"total": ParameterState(), "sum": ParameterState(shape=lambda p: (1,))}

    def communicate(self, bucket, group):
        total = bucket.state("total")
        for member in bucket.members:
            bucket.state("sum", member)
        yield group.all_reduce(bucket, ReduceOp.AVG)
        total.add_(bucket.flat)
        for member in bucket.members:
            bucket.state("sum", member).add_(member.view.mean())

    def after_backward(self, buckets, group):
        self.num_steps += 1


def _totals(model):
    """The numbers that occur in any state: one, where all elements have the same."""
    found = set()
    for own in model.bagua.state_dict()["parameters"]["states"].values():
        for value in own["parameters"].values():
            found |= set(value.flatten().tolist())
    return found


def _train(model, optimizer, value, steps=True):
    optimizer.zero_grad()
    model(torch.tensor(value)).backward()
    if steps:
        optimizer.step()


def _wrapped(**options):
    model = Sums()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return bagua.with_bagua(model, optimizer, algorithm=Adds(**options), bucket_bytes=64), optimizer


def _laid_out_under_way(rank, world_size):
    with process_group():
        model, optimizer = _wrapped()
        _train(model, optimizer, 1.0, steps=False)  # the buckets are laid out anew after it
        _train(model, optimizer, 2.0)
        assert _totals(model) == {3.0}
        _train(model, optimizer, 4.0)
        assert _totals(model) == {7.0}


def test_a_layout_between_two_backwards_of_a_step_loses_nothing(pool2):
    pool2.run(_laid_out_under_way)


def _poisoned(rank, world_size):
    """A backward counts by itself, whether a step follows it or not, unless a result of it is NaN or Inf."""
    with process_group():
        model, optimizer = _wrapped()
        for value, total in ((1.0, 1.0), (float("nan") if rank else 1.0, 1.0), (2.0, 3.0), (float("inf"), 3.0)):
            _train(model, optimizer, value, steps=False)
            assert _totals(model) == {total}
        other, optimizer = _wrapped()
        other.bagua.load_state_dict(model.bagua.state_dict())
        _train(other, optimizer, 4.0)
        assert _totals(other) == {7.0}


def test_a_backward_with_nan_changes_nothing(pool2):
    pool2.run(_poisoned)


def _another_stage(rank, world_size):
    with process_group():
        model, optimizer = _wrapped(has_stages=True)
        for step in range(5):
            _train(model, optimizer, 1.0)
            assert _totals(model) == {step + 1.0}


def test_states_outlive_a_stage(pool2):
    pool2.run(_another_stage)


@pytest.fixture(scope="module")
def pool1():
    from bagua.testing import Pool

    with Pool(1) as pool:
        yield pool


def _after_a_failed_backward(rank, world_size):
    with process_group():
        model, optimizer = _wrapped()
        expected = 0.0
        for value in (1.0, -5.0, 2.0, 4.0):
            if value < 0:
                with pytest.raises(RuntimeError, match="on purpose"):
                    _train(model, optimizer, value)
                continue
            _train(model, optimizer, value)
            expected += value
            assert _totals(model) == {expected}
        _train(model, optimizer, 8.0, steps=False)
        with pytest.raises(RuntimeError, match="on purpose"):
            _train(model, optimizer, -5.0)
        _train(model, optimizer, 16.0)
        assert _totals(model) == {7.0 + 8.0 + 16.0}


def test_what_a_backward_that_raised_has_written_is_forgotten(pool1):
    """A single rank trains on after it."""
    pool1.run(_after_a_failed_backward)
