"""Parameters that a backward leaves out: an error that names them, or find_unused_parameters."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import OF_GRADIENTS, TIMEOUT_S, process_group, wrap
from tests.distributed.worlds import fast_in
from tests.meeting import meet


class Branches(torch.nn.Module):
    """Uses the branches that its arguments name; ``root`` belongs to the root module itself."""

    def __init__(self):
        super().__init__()
        self.root = torch.nn.Parameter(torch.full((4,), 2.0))
        self.branches = torch.nn.ParameterList([torch.full((4,), float(i + 1)) for i in range(3)])

    def forward(self, *used):
        return self.root.sum() + sum((self.branches[i] * 10**i).sum() for i in used)


def _grads(model):
    return [None if p.grad is None else p.grad[0].item() for p in model.branches]


def _names_them(rank, world_size, used_by_rank_1):
    with process_group():
        model = bagua.with_bagua(Branches())
        model(0, 1, 2).backward()
        meet()
        begin = time.monotonic()
        with pytest.raises(BaguaError) as caught:
            model(*((0, 1, 2) if rank == 0 else used_by_rank_1)).backward()
        assert time.monotonic() - begin < TIMEOUT_S / 3
        with pytest.raises(BaguaError):  # the first cause, at once
            model(0, 1, 2)
        with pytest.raises(BaguaError):
            bagua.barrier()
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.timed
def test_a_missing_parameter_is_named_on_all_ranks(pool2):
    (_, other), (kind, own) = pool2.run(_names_them, args=((0,),))
    assert kind == "InvalidArgument"
    for message in (own, other):
        assert "'branches.1', 'branches.2'" in message
        assert "find_unused_parameters=True" in message
        assert "rank 1" in message


def _frozen_late(rank, world_size):
    with process_group():
        model = Branches()
        model.branches[1].requires_grad_(False)
        bagua.with_bagua(model)
        model.branches[1].requires_grad_(True)
        bagua.with_bagua(model)  # which takes it in
        model(0, 1, 2).backward()
        assert _grads(model) == [1.0, 10.0, 100.0]
        model.branches[0].requires_grad_(False)
        meet()  # both are wrapped before either fails
        with pytest.raises(BaguaError, match=r"'branches\.0'.*frozen or replaced after"):
            model(0, 1, 2).backward()


def test_a_parameter_frozen_after_the_wrap_is_named(pool2):
    pool2.run(_frozen_late)


def _finds_them(rank, world_size, algorithm, set_to_none):
    with process_group():
        model = wrap(Branches(), algorithm=algorithm, find_unused_parameters=True)
        for _ in range(3):
            model(0, 2).backward() if rank == 0 else model(0).backward()
            assert _grads(model) == [1.0, None, 50.0]
            assert model.root.grad[0] == 1.0
            model.zero_grad(set_to_none=set_to_none)


@fast_in(
    "algorithm, set_to_none",
    [("gradient_allreduce", True), ("powersgd", False)],
    list(itertools.product(OF_GRADIENTS, [True, False])),
)
def test_unused_parameters_count_as_zero(pool2, algorithm, set_to_none):
    pool2.run(_finds_them, args=(algorithm, set_to_none))


def _leaves_out_differently(rank, world_size, algorithm, bucket_bytes):
    with process_group():
        model = wrap(Branches(), algorithm=algorithm, find_unused_parameters=True, bucket_bytes=bucket_bytes)
        for used_by_0, used_by_1 in [((0, 1, 2), (0,)), ((2,), (0, 1)), ((0, 1, 2), ()), ((), (1,))] * 2:
            model(*(used_by_0 if rank == 0 else used_by_1)).backward()
            for i, grad in enumerate(_grads(model)):
                count = (i in used_by_0) + (i in used_by_1)
                assert grad == (count * 10**i / 2 if count else None)
            model.zero_grad()


@fast_in(
    "algorithm, bucket_bytes",  # a parameter, two, all in a bucket
    [("gradient_allreduce", 16), ("qsgd", 32), ("qadam", 1 << 20)],
    list(itertools.product(OF_GRADIENTS, [16, 32, 1 << 20])),
)
def test_ranks_that_leave_out_different_parameters(pool2, algorithm, bucket_bytes):
    pool2.run(_leaves_out_differently, args=(algorithm, bucket_bytes))


class Routed(torch.nn.Module):
    """A residual block with one expert, to which a rank may route nothing."""

    def __init__(self):
        super().__init__()
        self.expert = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, is_routed):
        return (x + self.expert * x if is_routed else x).sum()


def _uses_nothing(rank, world_size):
    with process_group():
        model = bagua.with_bagua(Routed(), find_unused_parameters=True)
        for step in range(4):
            x = torch.full((3,), step + 1.0, requires_grad=True)
            model(x, is_routed=rank == 0 or step % 2).backward()
            expected = step + 1.0 if step % 2 else (step + 1.0) / 2
            assert model.expert.grad.tolist() == [expected] * 3
            model.zero_grad()
        x = torch.ones(3, requires_grad=True)
        torch.autograd.grad(model(x, is_routed=True), x)
        assert model.expert.grad is None


def test_a_rank_that_uses_no_parameter_stays_in_step(pool2):
    pool2.run(_uses_nothing)


def _keeps_what_nobody_used(rank, world_size):
    with process_group():
        model = bagua.with_bagua(Branches(), find_unused_parameters=True)
        model(0, 1, 2).backward()
        own = torch.full((4,), 0.1 + rank)
        model.branches[1].grad.copy_(own)  # no longer equal on the ranks, and no longer sent
        model(0, 2).backward()
        assert torch.equal(model.branches[1].grad, own)
        assert _grads(model)[0] == 2.0
        replaced = torch.full((4,), 7.0)
        model.branches[1].grad = replaced
        model(0, 2).backward()
        assert model.branches[1].grad is replaced


def test_gradients_that_no_rank_used_stay_as_they_were(pool2):
    pool2.run(_keeps_what_nobody_used)


def _accumulates(rank, world_size):
    with process_group():
        model = bagua.with_bagua(Branches(), find_unused_parameters=True)
        for _ in range(2):
            with model.bagua.no_sync():
                model(1).backward() if rank == 0 else model(0).backward()
            model(2).backward()  # uses neither: what no_sync has left still counts
            assert _grads(model) == [0.5, 5.0, 100.0]
            model.zero_grad()


def test_gradients_of_no_sync_count_as_used(pool2):
    pool2.run(_accumulates)


class DropsOne(torch.autograd.Function):
    """A product whose second factor gets no gradient on odd ranks."""

    @staticmethod
    def forward(ctx, x, weight, rank):
        ctx.rank = rank
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, None if ctx.rank % 2 else 4 * grad, None


def _never_defined(rank, world_size, find_unused_parameters):
    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.nn.Parameter(torch.ones(3))
            self.dropped = torch.nn.ParameterList([torch.ones(3), torch.ones(3)])

        def forward(self):
            return DropsOne.apply(DropsOne.apply(self.kept, self.dropped[0], rank), self.dropped[1], 1)

    with process_group():
        model = bagua.with_bagua(Drops(), find_unused_parameters=find_unused_parameters)
        if not find_unused_parameters:
            meet()
            with pytest.raises(BaguaError, match=r"'dropped\.[01]'.*find_unused_parameters=True"):
                model().sum().backward()
            return
        for _ in range(2):
            model().sum().backward()
            assert model.dropped[0].grad.tolist() == [2.0] * 3 and model.dropped[1].grad is None
            with model.bagua.no_sync():
                model.zero_grad()
                model().sum().backward()
                assert (model.dropped[0].grad is None) == (rank == 1)
            model.zero_grad()


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_a_gradient_that_autograd_leaves_undefined(pool2, find_unused_parameters):
    pool2.run(_never_defined, args=(find_unused_parameters,))
