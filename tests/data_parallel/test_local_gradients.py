"""Which gradients are the ranks' own when a model is wrapped once more."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import process_group


def _synchronised_in(rank, world_size, first, algorithms):
    """The weights after a step whose gradients came before all wraps but the first."""
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = [bagua.new_group([each]) for each in range(world_size)][rank]
        bagua.with_bagua(model, optimizer, group=alone if first == "alone" else None)
        model(torch.full((2, 8), 1.0 + rank)).square().sum().backward()
        for algorithm in algorithms:
            bagua.with_bagua(model, optimizer, algorithm=algorithm)
        optimizer.step()
        return model.weight.detach()


def test_what_the_same_ranks_have_synchronised_stays_so(pool2):
    """An algorithm that exchanges weights in between changes nothing."""
    changes = (["decentralized", "gradient_allreduce"], ["bytegrad", "local_sgd", "decentralized", "bytegrad"])
    expected = pool2.run(_synchronised_in, args=("all", []))
    for algorithms in changes:
        assert all(map(torch.equal, pool2.run(_synchronised_in, args=("all", algorithms)), expected))
    assert torch.equal(*expected)


def _synchronised_alone(rank, world_size):
    with pytest.raises(
        BaguaError, match=r"gradients that no_sync\(\) has left unsynchronised.* a backward before with_"
    ):
        _synchronised_in(rank, world_size, "alone", ["gradient_allreduce"])


def test_what_fewer_ranks_have_synchronised_is_local(pool2):
    pool2.run(_synchronised_alone)
