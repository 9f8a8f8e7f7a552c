"""Forwards of a wrapped model that are only looked at, and backwards inside of what torch.compile compiles."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import process_group


class Net(torch.nn.Module):
    """Its gradients come in another order than that of registration, so the second forward lays out the buckets."""

    def __init__(self):
        super().__init__()
        self.out, self.inner, self.norm = torch.nn.Linear(8, 3), torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)

    def forward(self, x):
        return self.out(torch.relu(self.norm(self.inner(x))))


def made():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, rank, number):
    optimizer.zero_grad()
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).pow(2).mean().backward()
    optimizer.step()


def fake(model, x):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.randn(5, 4)).shape == (5, 3)


def exported(model, x):
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))


def traced(model, x):
    torch.testing.assert_close(torch.jit.trace(model, (x,))(x), model(x))


def differentiated(model, x):
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    found = grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)
    torch.testing.assert_close(found["out.bias"], torch.full((3,), 5.0))
    each = vmap(grad(lambda p, row: functional_call(model, p, (row[None],)).sum()), (None, 0))(parameters, x)
    torch.testing.assert_close(each["out.bias"], torch.ones(5, 3))


LOOKS = {"fake": fake, "exported": exported, "traced": traced, "differentiated": differentiated}


def looked_at(rank, world_size):
    """After the first step rank 0 alone looks: no rank is waited for, and the steps are those of who never looked."""
    weights = {}
    with process_group():
        for what, look in {"nothing": lambda *_: None, **LOOKS}.items():
            for algorithm in ("gradient_allreduce", "decentralized"):
                model, optimizer = made()
                bagua.with_bagua(model, optimizer, algorithm=algorithm)
                step(model, optimizer, rank, 0)
                if rank == 0:
                    model.eval()
                    look(model, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)))
                    model.train()
                for number in (1, 2):
                    step(model, optimizer, rank, number)
                model.bagua.remove()
                weights[what, algorithm] = copy.deepcopy(model.state_dict())
    return weights


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_forward_that_is_looked_at_changes_nothing(pool2):
    for weights in pool2.run(looked_at):
        for (what, algorithm), found in weights.items():
            for name, value in weights["nothing", algorithm].items():
                assert torch.equal(found[name], value), (what, algorithm, name)


def compiled(rank, world_size):
    weights = {}
    with process_group():
        for how in ("plain", "compiled"):
            model, optimizer = made()
            bagua.with_bagua(model, optimizer)
            run = torch.compile(step, backend="eager") if how == "compiled" else step
            for number in range(3):
                run(model, optimizer, rank, number)
            model.bagua.remove()
            weights[how] = copy.deepcopy(model.state_dict())
    return weights


def test_a_step_that_is_compiled_as_a_whole(pool2):
    for weights in pool2.run(compiled):
        for name, value in weights["plain"].items():
            torch.testing.assert_close(weights["compiled"][name], value)


def converted_after_wrap(rank, world_size, algorithm):
    with process_group():
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        model.double()
        with pytest.raises(BaguaError, match="is torch.float64, but was torch.float32 when the model"):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
                optimizer.step()
    return True


@pytest.mark.parametrize("algorithm", ["local_sgd", "low_precision_decentralized", "decentralized"])
def test_weights_of_another_dtype_are_refused(pool2, algorithm):
    assert pool2.run(converted_after_wrap, args=(algorithm,)) == [True, True]
