"""optimizer.step(closure): as without one, whatever the algorithm does around forward, backward and step."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from bagua.testing import spawn
from tests.conformance.training import (
    ALGORITHMS,
    OF_GRADIENTS,
    assert_equal_on_all_ranks,
    batch,
    loss_of,
    make_net,
    make_optimizer,
    process_group,
    slow_but,
)
from tests.meeting import meet

IN_LOCKSTEP = [name for name in ALGORITHMS if bagua.algorithms.get(name).is_lockstep]
HOOKS = ("before_forward", "after_backward", "before_optimizer_step", "after_optimizer_step")
OPTIONS = {"local_sgd": {"sync_every": 2}, "decentralized": {"topology": "ring"}}


def _step(model, optimizer, data, with_closure):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        return loss

    if with_closure == "keyword":
        return float(optimizer.step(closure=closure).detach())
    if with_closure:
        return float(optimizer.step(closure).detach())
    loss = closure()
    optimizer.step()
    return float(loss.detach())


def _same_numbers(rank, world_size, algorithm, broadcast_buffers):
    """Weights, buffers and losses bit by bit, and the algorithm's hooks in their order."""
    with process_group():
        results = []
        for with_closure in (False, True, "keyword"):
            model = make_net()
            optimizer = make_optimizer(algorithm, model)
            options = {**OPTIONS.get(algorithm, {}), "broadcast_buffers": broadcast_buffers}
            bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=64 * 1024, **options)
            calls = []
            for name in HOOKS:
                hook = getattr(model.bagua.algorithm, name)

                def told(*args, name=name, hook=hook, calls=calls):
                    calls.append(name)
                    return hook(*args)

                setattr(model.bagua.algorithm, name, told)
            losses = [_step(model, optimizer, batch(rank, step), with_closure) for step in range(4)]
            assert calls == list(HOOKS) * 4
            results.append({**model.state_dict(), "losses": torch.tensor(losses)})
            if algorithm in OF_GRADIENTS:
                assert_equal_on_all_ranks(dict(model.named_parameters()))
        for other in results[1:]:
            assert all(torch.equal(other[name], value) for name, value in results[0].items())


@pytest.mark.parametrize("algorithm", slow_but(IN_LOCKSTEP, "bytegrad", "local_sgd", "decentralized"))
def test_a_closure_that_is_evaluated_once_changes_nothing(pool2, algorithm):
    pool2.run(_same_numbers, args=(algorithm, None if algorithm in OF_GRADIENTS else True))


def _overlaps(rank, world_size):
    """Buckets are launched while the backward inside the closure still computes."""
    with process_group():
        model = make_net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        bagua.with_bagua(model, optimizer, bucket_bytes=1024)
        _step(model, optimizer, batch(rank, 0), False)  # the order is known from here on
        num_launched = []
        algorithm = model.bagua.algorithm
        launched, communicate = [], algorithm.communicate
        algorithm.communicate = lambda bucket, group: launched.append(bucket) or communicate(bucket, group)
        for with_closure in (False, True):
            launched.clear()
            removable = model.scale.register_hook(lambda grad: num_launched.append(len(launched)))  # the last one
            _step(model, optimizer, batch(rank, 1), with_closure)
            removable.remove()
        assert num_launched[0] == num_launched[1] >= 3


def test_communication_overlaps_with_a_backward_in_a_closure(pool2):
    pool2.run(_overlaps)


def _raises_everywhere(rank, world_size, algorithm, where):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
        _step(model, optimizer, batch(rank, 0), True)

        def closure():
            optimizer.zero_grad()
            if where == "before the forward":
                raise ArithmeticError("on purpose")
            loss = loss_of(model, batch(rank, 1))
            if where == "before the backward":
                raise ArithmeticError("on purpose")
            loss.backward()
            raise ArithmeticError("on purpose")

        with pytest.raises(ArithmeticError) as caught:
            optimizer.step(closure)
        calls = []
        for name in HOOKS:
            hook = getattr(model.bagua.algorithm, name)
            setattr(model.bagua.algorithm, name, lambda *args, name=name, hook=hook: calls.append(name) or hook(*args))
        for with_closure in (False, True, False):
            _step(model, optimizer, batch(rank, 2), with_closure)
        assert calls == list(HOOKS) * 3
        if algorithm in OF_GRADIENTS:
            assert_equal_on_all_ranks(dict(model.named_parameters()))
        bagua.barrier()
        return str(caught.value)


@pytest.mark.parametrize("where", ["before the forward", "before the backward", "after the backward"])
@pytest.mark.parametrize(
    "algorithm", slow_but(["gradient_allreduce", "bytegrad", "decentralized", "local_sgd"], "bytegrad", "decentralized")
)
def test_a_closure_that_raises_on_all_ranks_leaves_nothing_behind(pool2, algorithm, where):
    pool2.run(_raises_everywhere, args=(algorithm, where))


SHORT_S = 0.6


def _raises_alone(rank, world_size):
    with process_group():
        model = make_net()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        bagua.with_bagua(model, optimizer)
        _step(model, optimizer, batch(rank, 0), True)
        meet()
        bagua.get_default_group().set_timeout(SHORT_S)

        def closure():
            optimizer.zero_grad()
            if rank == 1:
                raise ArithmeticError("on purpose")
            loss_of(model, batch(rank, 1)).backward()

        begin = time.monotonic()
        if rank == 1:
            with pytest.raises(ArithmeticError):
                optimizer.step(closure)
            meet()  # when the other one has failed
            with pytest.raises(BaguaError):
                loss_of(model, batch(rank, 1)).backward()
            return ""
        with pytest.raises(BaguaError) as caught:
            optimizer.step(closure)
        assert SHORT_S <= time.monotonic() - begin < 4 * SHORT_S  # twice what is promised
        meet()
        return str(caught.value)


@pytest.mark.timed
def test_a_closure_that_raises_on_one_rank_is_known_in_time(pool2):
    message, _ = pool2.run(_raises_alone)
    assert "rank 1" in message


def _many_evaluations(rank, world_size, algorithm):
    """Of gradients that are the same on all ranks there are as many everywhere; of others, one exchange per step."""
    with process_group():
        model = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
        optimizer.param_groups[0]["max_iter"] = 3 if algorithm in OF_GRADIENTS else 3 + 2 * rank
        for step in range(3):
            x, y = batch(rank, step)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = (model(x).squeeze(1) - y).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        if algorithm in OF_GRADIENTS:
            assert_equal_on_all_ranks(dict(model.named_parameters()))
        bagua.barrier()
        spans = model.bagua.timeline().spans
        return sum(span.kind == "operation" and span.label == "bucket 0" for span in spans)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "decentralized", "local_sgd"])
def test_a_closure_that_is_evaluated_many_times(pool2, algorithm):
    num, other = pool2.run(_many_evaluations, args=(algorithm,))
    assert num == other
    assert {"gradient_allreduce": num > 3, "decentralized": num == 3, "local_sgd": num >= 1}[algorithm]


def _accumulated(rank, world_size, algorithm):
    """Weights after steps of three micro-batches, the last of them in a closure and not."""
    found = []
    with process_group():
        for with_closure in (False, True):
            model = make_net()
            optimizer = make_optimizer(algorithm, model)
            bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
            for step in range(3):
                optimizer.zero_grad()
                for part in range(2):
                    loss_of(model, batch(rank, 3 * step + part)).backward()

                def closure(model=model, step=step):
                    loss = loss_of(model, batch(rank, 3 * step + 2))
                    loss.backward()
                    return loss

                optimizer.step(closure) if with_closure else (closure(), optimizer.step())
            found.append([p.detach().clone() for p in model.parameters()])
            model.bagua.remove()
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("algorithm", IN_LOCKSTEP)
def test_a_closure_with_the_last_micro_batch(pool2, algorithm):
    """As trainers call it that accumulate gradients."""
    assert pool2.run(_accumulated, args=(algorithm,)) == [True, True]


class Ascends(torch.optim.SGD):
    """Sharpness-aware minimisation: looks at the gradient elsewhere, by a closure, after a backward of the user's."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for options in self.param_groups for p in options["params"]]
        shifts = [0.05 * p.grad for p in parameters]
        for p, shift in zip(parameters, shifts, strict=True):
            p.add_(shift)
        with torch.enable_grad():
            closure()
        for p, shift in zip(parameters, shifts, strict=True):
            p.sub_(shift)
        super().step()


def _after_a_backward(rank, world_size, algorithm):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model, Ascends)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()

            def closure(step=step):
                optimizer.zero_grad()
                loss_of(model, batch(rank, step)).backward()

            optimizer.step(closure)
        if algorithm in OF_GRADIENTS:
            assert_equal_on_all_ranks(dict(model.named_parameters()))
        bagua.barrier()
        return sum(s.kind == "operation" and s.label == "bucket 0" for s in model.bagua.timeline().spans)


@pytest.mark.parametrize("algorithm, num", [("gradient_allreduce", 6), ("decentralized", 3)])
def test_a_closure_after_a_backward(pool2, algorithm, num):
    assert pool2.run(_after_a_backward, args=(algorithm,)) == [num, num]


class Ignores(torch.optim.SGD):
    """Takes a closure and never calls it."""

    def step(self, closure=None):
        return super().step()


def _ignored(rank, world_size):
    with process_group():
        model = torch.nn.Linear(16, 1)
        optimizer = Ignores(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="decentralized")
        model(batch(rank, 0)[0]).sum().backward()
        optimizer.step(lambda: None)
        meet()
        with pytest.raises(
            (InvalidArgument, BaguaError), match="was given a closure and has stepped without calling it"
        ):
            optimizer.step(lambda: None)


def test_a_closure_that_is_not_called(pool2):
    pool2.run(_ignored)


def _ignored_behind_another_wrap(rank, world_size):
    with process_group():
        model = torch.nn.Linear(16, 1)
        optimizer = Ignores(model.parameters(), lr=0.01)
        for value in (1.0, float("inf")):
            bagua.with_bagua(model, optimizer, algorithm="bytegrad")
            optimizer.zero_grad()
            model(batch(rank, 0)[0] * (value if rank else 1.0)).sum().backward()
            bagua.with_bagua(model, optimizer, algorithm="bytegrad")
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if value == 1.0:
                optimizer.step(lambda: None)
                assert not any(map(torch.equal, model.parameters(), before))
        with pytest.raises(
            InvalidArgument, match=r"a gradient is NaN or Inf on some rank.*No rank has changed a weight"
        ):
            optimizer.step(lambda: None)
        assert all(map(torch.equal, model.parameters(), before))


def test_a_closure_is_not_needed_after_a_backward_before_another_wrap(pool2):
    """Nor does it hide what that backward has left."""
    pool2.run(_ignored_behind_another_wrap)


def _ignored_alone(rank, world_size):
    """Nothing can part where there is one rank."""
    with process_group():
        results = []
        for algorithm in (None, "bytegrad", "decentralized"):
            model = make_net()
            optimizer = Ignores([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
            if algorithm is not None:
                bagua.with_bagua(model, optimizer, algorithm=algorithm)
            loss_of(model, batch(rank, 0)).backward()
            for _ in range(3):
                optimizer.step(lambda: None)
            results.append([p.detach() for p in model.parameters()])
        assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))


def test_a_closure_that_a_single_rank_does_not_call():
    spawn(_ignored_alone, 1)


def _frees_locals(rank, world_size):
    """What a training function holds ends with it, without the garbage collector."""
    with process_group():
        model = make_net()
        optimizer = make_optimizer("gradient_allreduce", model)
        bagua.with_bagua(model, optimizer)

        def train(step):
            data = batch(rank, step)

            def closure():
                optimizer.zero_grad()
                loss = loss_of(model, data)
                loss.backward()
                return loss.detach()

            optimizer.step(closure)
            return weakref.ref(data[0])

        gc.collect()
        gc.disable()
        try:
            kept = [train(step) for step in range(5)]
            return sum(ref() is not None for ref in kept)
        finally:
            gc.enable()


def test_a_step_keeps_nothing_of_its_caller(pool2):
    assert pool2.run(_frees_locals) == [0, 0]


def _another_inside(rank, world_size):
    """Another optimizer of the same parameters steps in the closure; both steps are those of all ranks."""
    with process_group():
        model = make_net()
        first, second = (torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.01, 0.02))
        bagua.with_bagua(model, first)

        def closure():
            first.zero_grad()
            loss = loss_of(model, batch(rank, 0))
            loss.backward()
            second.step()
            return loss

        for _ in range(2):
            first.step(closure)
            assert_equal_on_all_ranks(dict(model.named_parameters()))


def test_another_optimizer_steps_in_the_closure(pool2):
    pool2.run(_another_inside)
