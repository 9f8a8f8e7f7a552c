"""Buffers: rank 0's on all ranks after each synchronising backward, so in evaluation too."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import (
    OF_GRADIENTS,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    make_net,
    process_group,
    slow_but,
    wrap,
)
from tests.meeting import meet


def _in_evaluation(rank, world_size, algorithm):
    with process_group():
        model = wrap(make_net(), algorithm=algorithm)
        for step in range(2):
            forward_of_rank_0 = make_net()
            forward_of_rank_0.load_state_dict(model.state_dict())
            forward_of_rank_0(batch(0, step)[0])
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            for name, expected in forward_of_rank_0.named_buffers():
                assert torch.equal(model.get_buffer(name), expected), name
        model.eval()
        with torch.no_grad():
            return float(loss_of(model, batch(0, 99)))


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce", "bytegrad"))
def test_the_same_test_data_gives_the_same_loss_on_all_ranks(pool2, algorithm):
    first, second = pool2.run(_in_evaluation, args=(algorithm,))
    assert first == second


def _when_they_are_sent(rank, world_size):
    with process_group():
        model = bagua.with_bagua(make_net())
        model.norm.eval()  # which leaves the buffers to the lines below

        def make_own():
            model.norm.running_mean.fill_(float(rank + 1))

        def mean():
            return float(model.norm.running_mean[0])

        make_own()
        with model.no_sync():
            loss_of(model, batch(rank, 0)).backward()
        assert mean() == rank + 1
        model.bagua.synchronize()
        assert mean() == 1
        make_own()
        held = model.norm.running_mean
        loss = loss_of(model, batch(rank, 0))
        assert mean() == rank + 1  # nothing is sent before a forward
        loss.backward()
        assert mean() == 1 and model.norm.running_mean is held
        bagua.with_bagua(model, broadcast_buffers=False)
        make_own()
        loss_of(model, batch(rank, 0)).backward()
        assert mean() == rank + 1


def test_a_synchronising_backward_or_synchronize_sends_them(pool2):
    pool2.run(_when_they_are_sent)


class Scaled(nn.Module):
    """Has a buffer that takes part in a product, which autograd saves."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return x * self.weight * self.scale


def _two_forwards(rank, world_size, writes_in_place):
    """The gradient of a forward is that of the buffer that this forward has read."""
    with process_group():
        model = bagua.with_bagua(Scaled(), find_unused_parameters=True)
        x = torch.tensor([3.0, 5.0])
        first = model(x).sum()
        if rank == 0 and writes_in_place:
            model.scale.data.mul_(2)
        elif rank == 0:
            model.scale = model.scale * 2
        second = model(x * 0).sum()
        second.backward()  # rank 0's buffer arrives while the graph of the first forward is alive
        assert model.scale.tolist() == [2.0, 2.0]
        model.zero_grad()
        first.backward()
        assert model.weight.grad.tolist() == ([4.5, 7.5] if writes_in_place else [3.0, 5.0])
        model.zero_grad()
        model(x).sum().backward()
        assert model.weight.grad.tolist() == [6.0, 10.0]


@pytest.mark.parametrize("writes_in_place", [False, True])
def test_what_autograd_has_saved_is_not_written_to(pool2, writes_in_place):
    """Only the other rank's gradient is that of the forward if the program itself writes to the buffer on rank 0."""
    pool2.run(_two_forwards, args=(writes_in_place,))


def _forwards_ahead(rank, world_size, local):
    """A forward of the next step, and one in no_sync, keep the buffer that they have read, too."""
    with process_group():
        model = bagua.with_bagua(Scaled())
        x = torch.tensor([3.0, 5.0])

        def forward(scale):
            if rank == 0:
                model.scale = torch.full((2,), scale)
            read = model.scale.clone()
            return model(x).sum(), read

        with model.no_sync() if local else contextlib.nullcontext():
            ahead = forward(2.0)
        for step in range(3):
            new = forward(3.0 + step)
            (loss, read), ahead = (new, ahead) if local else (ahead, new)
            model.zero_grad()
            loss.backward()
            everyone = bagua.get_default_group().all_gather_plain(read.tolist())
            assert model.weight.grad.tolist() == (x * torch.tensor(everyone).mean(0)).tolist()
        with model.no_sync():
            model.zero_grad()
            ahead[0].backward()
        assert model.weight.grad.tolist() == (x * ahead[1]).tolist()


@pytest.mark.parametrize("local", [False, True])
def test_what_a_forward_ahead_has_saved_is_not_written_to(pool2, local):
    pool2.run(_forwards_ahead, args=(local,))


class Sized(nn.Module):
    """Makes its statistics from the first batch, as ActNorm and observers do."""

    def __init__(self, first):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", first)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("turned", torch.zeros(2, 3, dtype=torch.bfloat16).t())

    def forward(self, x):
        if self.scale is None or not self.scale.numel():
            self.scale = x.std(0)
        with torch.no_grad():
            self.count += int(x[0, 0] * 100)
            self.turned += x[0, 1]
        self.mask = x[0, :3] > 0
        return self.layer(x) / self.scale.mean()


def _made_by_data(rank, world_size):
    with process_group():
        for first in (None, torch.empty(0)):
            model = bagua.with_bagua(Sized(first))
            for step in range(3):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).sum().backward()
                assert_equal_on_all_ranks(dict(model.named_buffers()))
            generator = torch.Generator().manual_seed(0)  # of rank 0's first batch
            assert torch.equal(model.scale, torch.randn(8, 4, generator=generator).std(0))
            if rank == 0:
                model.register_buffer("late", torch.full((3,), 7.0))
            else:
                model.register_buffer("late", torch.zeros(3))
            model.bagua.synchronize()
            assert model.late.tolist() == [7.0] * 3


def test_buffers_of_any_type_that_are_made_after_the_wrap(pool2):
    pool2.run(_made_by_data)


def _unlike(rank, world_size):
    with process_group():
        model = torch.nn.Linear(4, 4)
        model.register_buffer("extra", torch.zeros(5))
        bagua.with_bagua(model)
        model(torch.ones(2, 4)).sum().backward()
        meet()
        if rank == 1:
            model.extra = torch.zeros(50)
        with pytest.raises(BaguaError, match=r"broadcast #\d+ of \d+ (uint8|bytes).*broadcast #\d+ of \d+"):
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()


def test_another_shape_on_one_rank_is_an_error_on_all(pool2):
    pool2.run(_unlike)
