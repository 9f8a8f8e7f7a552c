"""Hooks of the user's on parameters: what they change is what is exchanged, whenever they were registered."""

from __future__ import annotations

import contextlib

import pytest
import torch

import bagua
from bagua.errors import BaguaError
from tests.conformance.training import (
    OF_GRADIENTS,
    batch,
    loss_of,
    make_net,
    make_optimizer,
    mean_in_loops,
    plain_grads,
    process_group,
    slow_but,
)
from tests.meeting import meet

STEPS = 4


def _replaced(parameter):
    parameter.grad = parameter.grad * 2


def _in_place(parameter):
    parameter.grad.mul_(2)


def _hook(model, change):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(change)


def _trained(rank, algorithm, change, is_after_wrap):
    model = make_net()
    optimizer = make_optimizer(algorithm, model)
    if not is_after_wrap:
        _hook(model, change)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=64 * 1024)
    if is_after_wrap:
        _hook(model, change)
    weights = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    model.bagua.remove()
    return weights


def _same_before_and_after(rank, world_size, algorithm):
    with process_group():
        for change in (_replaced, _in_place):
            before, after = (_trained(rank, algorithm, change, is_after_wrap) for is_after_wrap in (False, True))
            for step, (expected, actual) in enumerate(zip(before, after, strict=True)):
                for name, value in expected.items():
                    assert torch.equal(actual[name], value), (change.__name__, step, name)


@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce", "bytegrad"))
def test_it_is_all_the_same_when_they_are_registered(pool2, algorithm):
    pool2.run(_same_before_and_after, args=(algorithm,))


def _mean_of_what_they_make(rank, world_size):
    """And a hook that comes in mid-training sees this rank's own gradient."""
    with process_group():
        model = make_net()
        bagua.with_bagua(model, make_optimizer("gradient_allreduce", model), bucket_bytes=64 * 1024)
        names = {id(p): name for name, p in model.named_parameters()}
        seen = {}
        for step in range(STEPS):
            if step == 1:
                _hook(model, _replaced)
            if step == 2:
                _hook(model, lambda p: seen.update({names[id(p)]: p.grad.clone()}))
            factor = 2 if step else 1
            model.zero_grad()
            own = {name: factor * grad for name, grad in plain_grads(model, batch(rank, step)).items()}
            expected = mean_in_loops(bagua.get_default_group().all_gather_object(own))
            loss_of(model, batch(rank, step)).backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad.double(), expected[name].double(), rtol=1e-4, atol=1e-6)
            if step >= 2:
                assert seen.keys() == own.keys()
                assert all(torch.equal(seen[name], grad) for name, grad in own.items())


def test_the_mean_is_that_of_what_they_make(pool2):
    pool2.run(_mean_of_what_they_make)


def _that_end_the_wrap(rank, world_size):
    """In the middle of a backward, which is told as one that is not complete; the next ones are the rank's own."""
    with process_group():
        model = make_net()
        bagua.with_bagua(model, algorithm="gradient_allreduce")
        handle = model.bagua
        _hook(model, lambda _: handle.remove())
        loss = loss_of(model, batch(rank, 0))
        meet()  # the first to raise ends the group, also for one whose forward has not begun
        with pytest.raises(BaguaError, match="of 12 parameters have no gradient"):
            loss.backward()
        assert not hasattr(model, "bagua")
        model.zero_grad()
        expected = plain_grads(model, batch(rank, 1))
        loss_of(model, batch(rank, 1)).backward()
        assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_that_end_the_wrap(pool2):
    pool2.run(_that_end_the_wrap)


class _Failure(Exception):
    pass


def _that_raise(rank, world_size):
    """Of a single rank, which goes on: nothing is left of the backward that failed."""
    with process_group():
        model = make_net()
        bagua.with_bagua(model, algorithm="gradient_allreduce")
        is_failing = True

        def fail(_):
            if is_failing:
                raise _Failure

        _hook(model, fail)
        with pytest.raises(_Failure):
            loss_of(model, batch(rank, 0)).backward()
        assert model.bagua.step._postponed is None
        is_failing = False
        for inside in (model.bagua.no_sync(), contextlib.nullcontext()):
            model.zero_grad()
            expected = plain_grads(model, batch(rank, 1))
            with inside:
                loss_of(model, batch(rank, 1)).backward()
            assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters() if p.requires_grad)


def test_that_raise():
    bagua.testing.spawn(_that_raise, 1)


def _returning(rank, world_size):
    with process_group():
        model = torch.nn.Linear(3, 2)
        model.weight.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.mul_(2))
        bagua.with_bagua(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(BaguaError, match="'weight' .*returned a Tensor; such hooks return None"):
            model(torch.ones(1, 3)).sum().backward()
    return True


def test_a_hook_that_returns_a_tensor_is_named(pool2):
    assert pool2.run(_returning) == [True, True]


def _load(model):
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def _convert_and_back(model):
    model.double()
    model.float()


def _swap_one(model):
    first = model[0].weight
    torch.utils.swap_tensors(first, torch.nn.Parameter(first.detach().clone()))


def _wrap_again(model):
    bagua.with_bagua(model, model.optimizer, algorithm=model.algorithm, find_unused_parameters=model.finds)


def _swapped(rank, world_size, algorithm, changes, swaps):
    """Weights after six steps, with `changes` after every second one; the gradients are those of all ranks."""
    weights = []
    for is_changed in (False, True):
        with process_group():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
            model.optimizer, model.algorithm, model.finds = (
                make_optimizer(algorithm, model),
                algorithm,
                len(changes) > 1,
            )
            called = []
            model[2].bias.register_post_accumulate_grad_hook(lambda _, called=called: called.append(1))
            bagua.with_bagua(model, model.optimizer, algorithm=algorithm, find_unused_parameters=model.finds)
            for step in range(6):
                model.optimizer.zero_grad()
                values = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                model(values).square().mean().backward()
                model.optimizer.step()
                if step % 2:
                    with contextlib.ExitStack() as reset:
                        torch.__future__.set_swap_module_params_on_conversion(swaps)
                        reset.callback(torch.__future__.set_swap_module_params_on_conversion, False)
                        for change in changes:
                            if is_changed or change is _wrap_again:
                                change(model)
            assert len(called) == 6  # the user's hooks, too
            weights.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(
    "algorithm", slow_but(("gradient_allreduce", "bytegrad", "local_sgd", "decentralized"), "gradient_allreduce")
)
@pytest.mark.parametrize(
    "changes, swaps",
    [
        ([_load], True),
        ([_convert_and_back], True),
        ([_convert_and_back], False),
        ([_swap_one], False),
        ([_swap_one, _wrap_again], False),
        ([_load, _load], True),
    ],
    ids=["load", "convert", "convert_in_place", "one", "wrap_again", "twice"],
)
def test_parameters_whose_tensors_torch_swaps(pool2, algorithm, changes, swaps):
    pool2.run(_swapped, args=(algorithm, changes, swaps))


def _swapped_and_bypassed(rank, world_size, swaps_all, find_unused):
    """No forward of the model comes between the swap and a backward, of whose gradients nobody hears."""
    with process_group():
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, find_unused_parameters=find_unused)
        bypassing = torch.nn.Sequential(*model)
        values = torch.full((4, 8), 1.0 + rank)
        for called in (model, bypassing):
            optimizer.zero_grad()
            called(values).sum().backward()
            optimizer.step()
        meet()
        optimizer.zero_grad()
        torch.__future__.set_swap_module_params_on_conversion(True)
        (_load if swaps_all else _swap_one)(model)
        torch.__future__.set_swap_module_params_on_conversion(False)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(BaguaError, match="swapped.*(call the model|before a forward of the model)"):
            bypassing(values).sum().backward()
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.parametrize("swaps_all", [False, True])
def test_a_swap_that_no_forward_follows(pool2, swaps_all, find_unused):
    pool2.run(_swapped_and_bypassed, args=(swaps_all, find_unused))
