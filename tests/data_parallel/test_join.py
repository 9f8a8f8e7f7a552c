"""model.bagua.join: ranks with different numbers of batches, against plain loops, under every gradient algorithm."""

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import OF_GRADIENTS, batch, loss_of, make_net, make_optimizer, process_group, slow_but
from tests.distributed.worlds import in_turns


def small():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def loss_in(model, rank, step):
    x, y = batch(rank, step)
    return (model(x).flatten() - y).square().mean()


def in_loops(num_batches, counts_zeros):
    """All ranks by themselves: the mean of the gradients, of every parameter and step; the statistics of the first."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(max(num_batches)):
        active = [rank for rank, num in enumerate(num_batches) if step < num]
        before = {name: value.clone() for name, value in model.named_buffers()}
        totals, buffers = [torch.zeros_like(one) for one in model.parameters()], None
        for rank in active:
            model.load_state_dict(before, strict=False)
            optimizer.zero_grad()
            loss_in(model, rank, step).backward()
            for total, parameter in zip(totals, model.parameters(), strict=True):
                total += parameter.grad
            buffers = buffers or {name: value.clone() for name, value in model.named_buffers()}
        model.load_state_dict(buffers, strict=False)
        for total, parameter in zip(totals, model.parameters(), strict=True):
            parameter.grad = total / (len(num_batches) if counts_zeros else len(active))
        optimizer.step()
    return model


def equals_the_loops(rank, world_size, num_batches, counts_zeros, wrap):
    with process_group():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if wrap == "class":
            called = bagua.DistributedDataParallel(model, optimizers=optimizer)
            joined = called.join(divide_by_initial_world_size=counts_zeros)
        else:
            called = bagua.with_bagua(model, optimizer, find_unused_parameters=wrap == "finds unused")
            joined = called.bagua.join(divide_by_initial_world_size=counts_zeros)
        with joined:
            for step in range(num_batches[rank]):
                if step == 1:
                    with torch.no_grad():
                        model.eval()(batch(rank, step)[0])
                    model.train()
                loss_in(called, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
        expected = in_loops(num_batches, counts_zeros).state_dict()
        torch.testing.assert_close(model.state_dict(), expected, rtol=1e-4, atol=1e-5)
        # The optimizers' states are equal, too: all train on alike.
        for step in range(10, 12):
            loss_in(called, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.bagua.check_replicas()


@in_turns("num_batches, counts_zeros", [(2, 5), (5, 2), (0, 3), (3, 3)], [True, False])
def test_uneven_inputs(pool2, num_batches, counts_zeros):
    pool2.run(equals_the_loops, args=(num_batches, counts_zeros, ""))


@pytest.mark.parametrize("wrap", ["class", "finds unused"])
def test_uneven_inputs_in_another_form(pool2, wrap):
    pool2.run(equals_the_loops, args=((2, 4), True, wrap))


def test_ranks_that_leave_one_after_the_other(pool4):
    pool4.run(equals_the_loops, args=((1, 3, 0, 4), True, ""))


def ends_equal(rank, world_size, algorithm):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        with model.bagua.join():
            for step in range(2 + 2 * rank):
                with model.no_sync():
                    loss_of(model, batch(rank, step)).backward()
                loss_of(model, batch(rank, step + 10)).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.bagua.check_replicas()
        assert model.bagua.reducer.num_steps == 4


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "bytegrad", "qadam"))
def test_every_gradient_algorithm_ends_equal(pool2, algorithm):
    pool2.run(ends_equal, args=(algorithm,))


def refuses(rank, world_size):
    with process_group():
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd")
        with pytest.raises(InvalidArgument, match="'local_sgd' exchanges weights"), model.bagua.join():
            pass
        bagua.with_bagua(model, optimizer)
        with model.bagua.join():
            with pytest.raises(InvalidArgument, match="batches that weigh 0"):
                model.bagua.weight(3)
            with pytest.raises(InvalidArgument, match="is active"), model.bagua.join():
                pass


def test_what_cannot_be_joined_is_refused(pool2):
    pool2.run(refuses)
