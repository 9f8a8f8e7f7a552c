"""``no_sync``: gradients stay local inside, and trainers that accumulate gradients find it at ``model.no_sync``."""

from __future__ import annotations

import contextlib

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, batch, grads_of, loss_of, make_net, process_group


def _train_as_accelerate_does(model, rank, num_batches, every):
    """Runs backwards of which the last of ``every`` micro-batches synchronises."""
    for step in range(num_batches):
        quiet = getattr(model, "no_sync", contextlib.nullcontext) if (step + 1) % every else contextlib.nullcontext
        with quiet():
            loss_of(model, batch(rank, step)).backward()


def _accumulated(rank, world_size):
    with process_group():
        model = bagua.with_bagua(make_net(seed=rank))
        keys = list(model.state_dict())
        _train_as_accelerate_does(model, rank, num_batches=8, every=4)
        assert model.bagua.timeline().summary()["steps"] == 2
        assert_equal_on_all_ranks(grads_of(model))
        first = model.no_sync
        bagua.with_bagua(model)  # of the wrap that counts
        assert model.no_sync is not first
        _train_as_accelerate_does(model, rank, num_batches=4, every=2)
        assert model.bagua.timeline().summary()["steps"] == 2
        model.bagua.remove()
        assert not hasattr(model, "no_sync") and not hasattr(model, "bagua")
        assert list(model.state_dict()) == keys


def test_trainers_find_it_and_synchronise_once_per_accumulated_batch(pool2):
    pool2.run(_accumulated)


def _stays_local(rank, world_size):
    """Gradients, their sums and a step on them are the rank's own, in memory that bagua sends nothing of."""
    with process_group():
        model = bagua.with_bagua(make_net(), check_replicas=False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.zero_grad()
        alone = make_net()
        alone.load_state_dict(model.state_dict())
        sent = bagua.get_default_group().bytes_sent
        for step in (1, 2):
            loss_of(alone, batch(rank, step)).backward()
            with model.no_sync():
                loss_of(model, batch(rank, step)).backward()
            for name, expected in grads_of(alone).items():
                assert torch.equal(model.get_parameter(name).grad, expected), name
        optimizer.step()
        assert bagua.get_default_group().bytes_sent == sent
        return model.scale.detach()


def test_gradients_are_local_inside(pool2):
    first, second = pool2.run(_stays_local)
    assert not torch.equal(first, second)


def _other_numbers(rank, world_size):
    with process_group():
        model = bagua.with_bagua(make_net())
        with pytest.raises(InvalidArgument, match=r"accumulate\(3\): 0 backwards .*expected the last of 3"):
            with model.bagua.accumulate(3):
                for step in range(2):
                    loss_of(model, batch(rank, step)).backward()
        model.zero_grad()
        with pytest.raises(InvalidArgument, match=r"weight\(\) inside accumulate"), model.bagua.accumulate(1):
            model.bagua.weight(3)
        with pytest.raises(InvalidArgument, match=r"accumulate\(1\): 2 backwards inside have synchronised"):
            with model.bagua.accumulate(1):
                for step in range(2):
                    loss_of(model, batch(rank, step)).backward()
        for num in (0, 2.0, True):
            with pytest.raises(InvalidArgument, match=f"accumulate.. got {num}, expected a number of backwards"):
                with model.bagua.accumulate(num):
                    pytest.fail("the block was entered")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd")
        with pytest.raises(InvalidArgument, match="accumulate is for gradients; algorithm 'local_sgd'"):
            with model.bagua.accumulate(2):
                pytest.fail("the block was entered")


def test_accumulate_with_another_number_of_backwards(pool2):
    pool2.run(_other_numbers)


class HasItsOwn(torch.nn.Linear):
    def no_sync(self):
        return contextlib.nullcontext()


def _own(rank, world_size):
    with process_group():
        model = HasItsOwn(2, 2)
        with pytest.raises(InvalidArgument, match="HasItsOwn has a `no_sync` of its own"):
            bagua.with_bagua(model)
        assert not hasattr(model, "bagua")
        bagua.with_bagua(torch.nn.Sequential(model))


def test_a_model_that_has_its_own_is_refused(pool2):
    pool2.run(_own)
