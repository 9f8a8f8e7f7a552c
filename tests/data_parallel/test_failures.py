"""A backward that cannot end well: the error of the rank itself, and that of the others, in time."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import TIMEOUT_S, batch, grads_of, loss_of, make_net, process_group
from tests.distributed.worlds import fast_in
from tests.meeting import meet


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


def _raises_in_the_middle(rank, world_size, everywhere):
    with process_group():
        model = bagua.with_bagua(make_net(), bucket_bytes=1024)
        loss_of(model, batch(rank, 0)).backward()
        meet()
        if rank == 1 or everywhere:
            narrow = model.narrow.forward
            model.narrow.forward = lambda x: narrow(Fails.apply(x))
        begin = time.monotonic()
        # If all ranks raise, the later one may get the error of the earlier one.
        error = ArithmeticError if rank == 1 and not everywhere else (ArithmeticError, BaguaError)
        with pytest.raises(error) as caught:
            loss_of(model, batch(rank, 1)).backward()
        assert time.monotonic() - begin < TIMEOUT_S / 3
        model.narrow.forward = torch.nn.Linear.forward.__get__(model.narrow)
        for call in (lambda: model(batch(rank, 2)[0]), lambda: bagua.barrier()):
            with pytest.raises(BaguaError, match="raised after it had started"):
                call()
        model.eval()
        with torch.no_grad():
            model(batch(rank, 2)[0])  # what needs no other rank still works
        return str(caught.value)


@pytest.mark.timed
@pytest.mark.parametrize("everywhere", [False, True])
def test_backward_raises_in_the_middle(pool2, everywhere):
    other, own = pool2.run(_raises_in_the_middle, args=(everywhere,))
    if not everywhere:
        assert own == "on purpose"
        assert "backward of rank 1 raised after it had started" in other


def _twice(rank, world_size):
    class Shared(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.part = torch.nn.Linear(4, 4)

        def forward(self, x, use_reentrant):
            x = checkpoint(self.part, x, use_reentrant=use_reentrant)
            return checkpoint(self.part, x, use_reentrant=use_reentrant)

    with process_group():
        model = bagua.with_bagua(Shared())
        x = torch.ones(2, 4, requires_grad=True)
        model(x, False).sum().backward()
        meet()
        with pytest.raises(BaguaError, match=r"'part\.(weight|bias)' became ready twice.*use_reentrant=False"):
            model(x, True).sum().backward()


def test_a_parameter_that_becomes_ready_twice(pool2):
    pool2.run(_twice)


def _create_graph(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(3, 1))
        x = torch.full((2, 3), 1.0 + rank)
        with model.bagua.no_sync():
            model(x).square().sum().backward(create_graph=True)
            model.weight.grad.sum().backward()  # the graph of a local gradient is whole
        model.zero_grad()
        model(x).sum().backward()
        assert float(model.weight.grad[0, 0]) == 3.0
        model.zero_grad()
        meet()  # what follows poisons the group, also for a rank that is still in the step before
        with pytest.raises(BaguaError, match="create_graph=True"):
            model(x).square().sum().backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph(pool2):
    pool2.run(_create_graph)


WORDS = torch.tensor([1, 2])


def _sparse(model):
    torch.nn.functional.embedding(WORDS, model.weight, sparse=True).sum().backward()


def _trained(model):
    model(WORDS).sum().backward()


def _converted(model):
    model.double()
    _trained(model)


def _converted_with_gradients(model):
    _trained(model)
    model.double()
    _trained(model)


def _lomo(parameter):
    with torch.no_grad():
        parameter -= 0.1 * parameter.grad
    parameter.grad = None


# Programs whose gradients cannot be exchanged: a hook of the parameter, options, what they do, and the error.
REFUSED = {
    "sparse": (None, {}, _sparse, "'weight' has a torch.sparse_coo gradient"),
    "a hook that steps and clears": (_lomo, {}, _trained, "'weight', but its .grad is None: a hook .*LOMO"),
    "converted": (None, {}, _converted, "memory of the gradient of 'weight' was moved"),
    "converted with gradients": (None, {}, _converted_with_gradients, "memory of the gradient of 'weight' was moved"),
}


def _is_refused(rank, world_size, name):
    hook, options, program, message = REFUSED[name]
    with process_group():
        model = torch.nn.Embedding(10, 4)
        if hook is not None:
            model.weight.register_post_accumulate_grad_hook(hook)
        bagua.with_bagua(model, **options)
        meet()  # the first to raise ends the group
        with pytest.raises(BaguaError, match=message):
            program(model)
        with pytest.raises(BaguaError, match=message):  # the first cause, from here on
            model(WORDS)


@pytest.mark.parametrize("name", REFUSED)
def test_a_gradient_that_cannot_be_exchanged_is_named(pool2, name):
    pool2.run(_is_refused, args=(name,))


def _accumulated_sums(rank, world_size, find_unused):
    """Two synchronising backwards with average=False lead to right sums, or to an error."""
    with process_group():
        model = torch.nn.Linear(3, 2)
        bagua.with_bagua(model, average=False, find_unused_parameters=find_unused)
        values = torch.full((1, 3), 1.0 + rank)
        for _ in range(2):  # cleared in between, by None or by zeros
            model(values).sum().backward()
            assert model.weight.grad.unique().tolist() == [3.0]
            model.zero_grad(set_to_none=False)
        with model.no_sync():
            model(values).sum().backward()
        model(values).sum().backward()
        assert model.weight.grad.unique().tolist() == [6.0]
        with model.no_sync():
            model(values).sum().backward()  # local gradients are added to the sums
        meet()
        with pytest.raises(BaguaError, match=r"are the sums over all ranks \(average=False\).*no_sync"):
            model(values).sum().backward()


@pytest.mark.parametrize("find_unused", [False, True])
def test_a_sum_is_not_summed_again(pool2, find_unused):
    pool2.run(_accumulated_sums, args=(find_unused,))


def _summed_with_a_penalty(rank, world_size):
    """Under find_unused_parameters autograd.grad exchanges too, so it comes before the sum."""
    with process_group():
        model = torch.nn.Linear(3, 2, bias=False)
        bagua.with_bagua(model, average=False, find_unused_parameters=True)
        values = torch.full((1, 3), 1.0 + rank, requires_grad=True)
        torch.autograd.grad(model(values).sum(), values)
        model(values).sum().backward()
        assert model.weight.grad.unique().tolist() == [3.0]
        meet()
        with pytest.raises(BaguaError, match="are the sums over all ranks"):
            torch.autograd.grad(model(values).sum(), values)


def test_an_inner_gradient_sums_nothing_again(pool2):
    pool2.run(_summed_with_a_penalty)


def _bypassed_forward(rank, world_size):
    with process_group():
        model = bagua.with_bagua(make_net(), bucket_bytes=1024)
        for step in range(2):
            model.zero_grad()
            (model.forward(batch(rank, step)[0]) ** 2).sum().backward()  # no module hook runs
            grads = grads_of(model)
            for name, grad in grads.items():
                first = grad.clone()
                bagua.broadcast(first, 0)
                assert torch.equal(first, grad), name
        with model.bagua.no_sync():
            (model.forward(batch(rank, 7)[0]) ** 2).sum().backward()
        assert model.bagua.timeline().summary()["steps"] == 2


def test_a_forward_that_bypasses_the_hooks_is_synchronised_all_the_same(pool2):
    pool2.run(_bypassed_forward)


def _under_compiled_autograd(rank, world_size):
    import torch._dynamo.compiled_autograd as compiled_autograd

    for algorithm in ("gradient_allreduce", "local_sgd"):
        with process_group():
            model = torch.nn.Linear(4, 4)
            bagua.with_bagua(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm=algorithm)
            loss = model(torch.ones(2, 4)).sum()
            with (
                pytest.raises(Exception, match="under torch's compiled autograd .*leave that out"),
                compiled_autograd._enable(torch.compile(backend="eager")),
            ):
                loss.backward()
            with pytest.raises(BaguaError, match="under torch's compiled autograd"):
                model(torch.ones(2, 4))
            meet()


@pytest.mark.slow("nothing: torch compiles a backward")
def test_a_backward_under_compiled_autograd(pool2):
    pool2.run(_under_compiled_autograd)


def _is_freed(rank, world_size, how):
    """Without a collection: the model, a weight and a bucket are in no cycle of bagua's."""

    def train():
        model = make_net()
        watched = [weakref.ref(model), weakref.ref(model.wide.weight)]
        if how == "compiled":
            model = torch.compile(model, backend="eager")
        bagua.with_bagua(model, algorithm="bytegrad")
        watched.append(weakref.ref(model.bagua.buckets[-1].flat))
        loss_of(model, batch(rank, 0)).backward()
        if how == "failed":
            loss = loss_of(model, batch(rank, 1))
            if rank == 1:
                with pytest.raises(BaguaError, match="rank 0"):
                    loss.backward()
        torch.compiler.reset()
        gc.collect()  # what torch has left
        gc.disable()
        return watched

    try:
        with process_group():
            watched = train()
            if how != "failed":
                assert [ref() for ref in watched] == [None] * 3
        gc.collect()
        assert [ref() for ref in watched] == [None] * 3
    finally:
        gc.enable()


@fast_in("how", ["plain", "failed"], ["plain", "compiled", "failed"])
def test_a_dropped_model_is_freed_with_its_memory(pool2, how):
    pool2.run(_is_freed, args=(how,))
