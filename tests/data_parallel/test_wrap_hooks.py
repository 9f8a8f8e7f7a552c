"""Forwards of a wrapped model whose values are fake, or for a graph or a transform; and compiled models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap

import bagua
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in


class Net(torch.nn.Module):
    """Gradients come in another order than that of registration, so the second forward lays out the buckets."""

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
    """After the first step rank 0 alone runs such a forward: no rank waits for it, and the steps stay as they were."""
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


def normed():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def compile_around(model):
    compiled = torch.compile(model, backend="eager")
    return compiled, compiled


def compile_and_call_what_is_inside(model):
    return torch.compile(model, backend="eager"), model


def compile_and_pass_what_is_inside(model):
    return model, torch.compile(model, backend="eager")


def compile_whole(model):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    return compiled, compiled


def compile_in_place(model):
    model.compile(backend="eager")
    return model, model


MAKES = (
    compile_around,
    compile_and_call_what_is_inside,
    compile_and_pass_what_is_inside,
    compile_whole,
    compile_in_place,
)


def compiled_and_run(rank, world_size, make):
    """It trains as a plain model does, was it run before the wrap or not; hooks end with ``remove``."""
    with process_group():
        for runs_before in (False, True):
            torch.compiler.reset()
            torch.manual_seed(0)
            plain, model = normed(), normed()
            model.load_state_dict(plain.state_dict())
            wrapped, called = make(model)
            for alone in (plain, called) if runs_before else ():
                alone(torch.ones(6, 4)).sum().backward()
                alone.zero_grad()
            bagua.with_bagua(wrapped)
            bagua.with_bagua(plain)
            for number in range(3):
                x = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * number + rank))
                for one in (plain, called):
                    one.zero_grad()
                    one(x).square().sum().backward()
                for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad)
                for ours, theirs in zip(model.buffers(), plain.buffers(), strict=True):
                    torch.testing.assert_close(ours, theirs)
            wrapped.bagua.remove()
            plain.bagua.remove()
            assert not hasattr(model, "bagua") and not hasattr(model, "no_sync")
            if rank == 0:  # nothing waits for the others
                called(torch.randn(6, 4)).square().sum().backward()


@fast_in("make", [compile_whole], MAKES)
def test_a_compiled_model_trains_as_a_plain_one(pool2, make):
    pool2.run(compiled_and_run, args=(make,))
