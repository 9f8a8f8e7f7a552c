"""gradient_allreduce beside its oracle: the mean (or the sum) over ranks, element by element in float64."""

from __future__ import annotations

import pytest
import torch

import bagua
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

ROWS, COLUMNS = 7, 33


def _gradient(rank, world_size):
    """Different for every rank and element, and small integers, so that sums and means of 4 are exact."""
    values = [float((i * world_size + rank) % 64) for i in range(ROWS * COLUMNS)]
    return torch.tensor(values).view(ROWS, COLUMNS)


def _reduced(rank, world_size, average, hierarchical=False):
    with process_group():
        model = torch.nn.Linear(COLUMNS, ROWS, bias=False)
        model = bagua.with_bagua(model, algorithm="gradient_allreduce", average=average, hierarchical=hierarchical)
        (model.weight * _gradient(rank, world_size)).sum().backward()
        expected = []
        for i in range(ROWS * COLUMNS):
            total = sum(float(_gradient(r, world_size).flatten()[i]) for r in range(world_size))
            expected.append(total / world_size if average else total)
        assert model.weight.grad.flatten().tolist() == expected
        assert_equal_on_all_ranks({"grad": model.weight.grad})
        (bucket,) = model.bagua.buckets
        assert bucket.declaration.codec is None
        assert str(bucket.declaration) == ("hierarchical " if hierarchical else "") + "all_reduce, full precision"


@pytest.mark.parametrize("average", [True, False])
def test_equals_the_oracle(pool2, average):
    pool2.run(_reduced, args=(average,))


@fast_in("average", [True], [True, False])
def test_hierarchical_equals_the_oracle(pool_of_two_nodes, average):
    pool_of_two_nodes.run(_reduced, args=(average, True), env={"BAGUA_SOCKET_IFNAME": "lo"})


def test_an_option_of_another_type_is_refused():
    with pytest.raises(bagua.InvalidArgument, match="option average is 'yes'"):
        bagua.algorithms.create("gradient_allreduce", {"average": "yes"})
