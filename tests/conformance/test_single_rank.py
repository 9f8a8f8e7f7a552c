"""Every registered algorithm with one rank equals plain PyTorch, bit for bit, for any optimizer."""

from __future__ import annotations

import functools

import pytest
import torch

import bagua
from tests.conformance.training import (
    ALGORITHMS,
    ANY,
    WITHOUT_MOMENTUM,
    batch,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
    wrap,
)
from tests.distributed.worlds import fast_in

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.fixture(scope="module")
def pool1():
    from bagua.testing import Pool

    with Pool(1) as pool:
        yield pool


def _train(model, make_optimizer, wrap, set_to_none):
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer([p for p in trainable if p.is_contiguous()])  # torch's LBFGS takes no others
    second = torch.optim.SGD([p for p in trainable if not p.is_contiguous()], lr=0.01)
    model = wrap(model, [optimizer, second])
    for step in range(6):

        def closure(step=step):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = loss_of(model, batch(0, step))
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            second.step()
            if step % 2:
                second.zero_grad(set_to_none=set_to_none)
    return model.state_dict()


@functools.cache
def _plain(name, set_to_none):
    """Returns the weights of torch alone, computed once in the life of a rank; not to be changed."""
    return _train(make_net(), OPTIMIZERS[name], lambda model, _: model, set_to_none)


def _equals_plain_torch(rank, world_size, algorithm, name, set_to_none):
    expected = _plain(name, set_to_none)
    with process_group():

        def wrap(model, optimizers):
            options = WITHOUT_MOMENTUM.get(algorithm, {})
            return bagua.with_bagua(model, optimizers, algorithm=algorithm, bucket_bytes=64 * 1024, **options)

        actual = _train(make_net(), OPTIMIZERS[name], wrap, set_to_none)
    assert list(actual) == list(expected)
    for key, value in expected.items():
        assert torch.equal(actual[key], value), key


OF_ANY = [name for name in ALGORITHMS if bagua.algorithms.get(name).optimizer_class is ANY]
CASES = [("sgd", False), *((name, index % 2 == 0) for index, name in enumerate(OPTIMIZERS))]


# Each algorithm with an optimizer, each optimizer with one or two algorithms, and all with all.
@fast_in(
    "algorithm, name, set_to_none",
    [(OF_ANY[i % len(OF_ANY)], *CASES[i % len(CASES)]) for i in range(max(len(OF_ANY), len(CASES)))],
    [(algorithm, *case) for algorithm in OF_ANY for case in CASES],
)
def test_equals_plain_torch(pool1, algorithm, name, set_to_none):
    pool1.run(_equals_plain_torch, args=(algorithm, name, set_to_none))


def _equals_its_optimizer_alone(rank, world_size, algorithm):
    def train(model, wrapped):
        optimizer = make_optimizer(algorithm, model)
        optimizer.param_groups[0]["warmup_steps"] = 3
        if wrapped:
            bagua.with_bagua(model, optimizer, algorithm=algorithm)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            optimizer.step()
        return model.state_dict()

    expected = train(make_net(), False)
    with process_group():
        actual = train(make_net(), True)
    assert all(torch.equal(actual[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if bagua.algorithms.get(name).optimizer_class is not ANY]
)
def test_equals_its_optimizer_alone(pool1, algorithm):
    pool1.run(_equals_its_optimizer_alone, args=(algorithm,))


def _recovers(rank, world_size, algorithm):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    with process_group():
        model = make_net()
        wrap(model, make_optimizer(algorithm, model), algorithm=algorithm, bucket_bytes=1024)
        narrow = model.narrow.forward
        model.narrow.forward = lambda x: narrow(Fails.apply(x))
        with pytest.raises(RuntimeError, match="on purpose"):
            loss_of(model, batch(0, 0)).backward()
        model.narrow.forward = narrow
        model.zero_grad()
        model.load_state_dict(make_net().state_dict())
        loss_of(model, batch(0, 0)).backward()
        plain = make_net()
        loss_of(plain, batch(0, 0)).backward()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("algorithm", slow_but(ALGORITHMS, "gradient_allreduce", "powersgd", "decentralized"))
def test_a_backward_that_raised_is_forgotten(pool1, algorithm):
    pool1.run(_recovers, args=(algorithm,))
