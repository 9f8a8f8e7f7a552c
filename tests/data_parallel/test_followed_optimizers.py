"""Optimizers that are made anew, that nobody passed to with_bagua, and that step where they must not."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import (
    ALGORITHMS,
    OF_GRADIENTS,
    OF_WEIGHTS,
    TIMEOUT_S,
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
OWN_KIND = [n for n in ALGORITHMS if bagua.algorithms.get(n).optimizer_class is not torch.optim.Optimizer]
OPTIONS = {"local_sgd": {"sync_every": 2}, "async_averaging": {"sync_interval": 0.0}}
MOMENTUM = {"momentum": 0.9}


def _options_of(algorithm, optimizer_class=torch.optim.SGD):
    return {} if algorithm in OWN_KIND else MOMENTUM


def _trained(rank, algorithm, remake):
    """The weights after 6 steps; ``remake(optimizer)`` gives the one for the next step."""
    model = make_net()
    optimizer = make_optimizer(algorithm, model, **_options_of(algorithm))
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=64 * 1024, **OPTIONS.get(algorithm, {}))
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizer.step()
        optimizer = remake(step, optimizer)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _made_anew(rank, world_size, algorithm):
    """It goes on from the state of the one before, so nothing may tell that it is another object."""

    def remake(step, optimizer):
        if step not in (0, 3):
            return optimizer
        twin = type(optimizer)(optimizer.param_groups[0]["params"], lr=0.01)
        twin.load_state_dict(optimizer.state_dict())
        return twin

    with process_group():
        expected = _trained(rank, algorithm, lambda step, optimizer: optimizer)
        actual = _trained(rank, algorithm, remake)
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("algorithm", slow_but(IN_LOCKSTEP, "qadam", "local_sgd", "decentralized"))
def test_an_optimizer_that_is_made_anew_takes_the_place_of_the_one_before(pool2, algorithm):
    pool2.run(_made_anew, args=(algorithm,))


def _taking_turns(rank, world_size, algorithm):
    """Two that step the same parameters, without state: as one of them alone."""
    with process_group():
        expected = _trained_by_turns(rank, algorithm, 1)
        actual = _trained_by_turns(rank, algorithm, 2)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())


def _trained_by_turns(rank, algorithm, num_optimizers):
    model = make_net()
    optimizers = [make_optimizer(algorithm, model) for _ in range(num_optimizers)]
    bagua.with_bagua(model, optimizers[0], algorithm=algorithm, **OPTIONS.get(algorithm, {}))
    for step in range(5):
        model.zero_grad()
        loss_of(model, batch(rank, step)).backward()
        optimizers[step % num_optimizers].step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("algorithm", ["local_sgd", "decentralized"])
def test_two_optimizers_in_turns(pool2, algorithm):
    pool2.run(_taking_turns, args=(algorithm,))


def _rounds_of_async(rank, world_size):
    with process_group():
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="async_averaging", sync_interval=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rounds, begin = [], model.bagua.algorithm._begin_round
        model.bagua.algorithm._begin_round = lambda: rounds.append(1) or begin()
        for step in range(3):
            x, y = batch(rank, step)
            (model(x).squeeze(1) - y).square().mean().backward()
            optimizer.step()
        assert rounds  # and pause() takes part in the last one, which a rank may have begun before its last step
        model.bagua.pause()
        model.bagua.resume()
        model.bagua.pause()  # so this one's is the first that all begin with the weights of now
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        for theirs in bagua.get_default_group().all_gather_object(mine):
            torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-6)  # what is added to each is rounded


def test_async_begins_rounds_with_an_optimizer_that_was_made_anew(pool2):
    pool2.run(_rounds_of_async)


def _nan_under_a_codec(rank, world_size, algorithm, passed):
    """No matter which optimizer was passed: a step with a NaN of rank 1 is refused, on all ranks."""
    with process_group():
        model = make_net()
        first = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        bagua.with_bagua(model, first if passed else (), algorithm=algorithm)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        for _ in range(2):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            optimizer.zero_grad()
            factor = float("nan") if rank == 1 else 0.0
            (loss_of(model, batch(rank, 1)) + factor * model.wide.weight.sum()).backward()
            with pytest.raises(InvalidArgument, match="NaN or Inf"):
                optimizer.step()
            assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
        optimizer.zero_grad()
        loss_of(model, batch(rank, 1)).backward()
        optimizer.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("algorithm", slow_but(["bytegrad", "qsgd"], "bytegrad"))
def test_the_guard_against_nan_follows(pool2, algorithm, passed):
    pool2.run(_nan_under_a_codec, args=(algorithm, passed))


def _of_others(rank, world_size, algorithm, culprits):
    """An optimizer of a part of the parameters, or of another kind."""
    is_lockstep = bagua.algorithms.get(algorithm).is_lockstep
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))

        def train(step):
            optimizer.zero_grad()
            loss_of(model, batch(rank, step)).backward()
            optimizer.step()

        for step in range(2):
            train(step)
        meet()
        trainable = [p for p in model.parameters() if p.requires_grad]
        stepped = trainable if algorithm in OWN_KIND else [model.narrow.weight, model.scale]
        before = model.narrow.weight.detach().clone()
        with pytest.raises(BaguaError) as caught:
            if rank in culprits:
                torch.optim.SGD(stepped, lr=0.01).step()
            # Without lockstep a rank makes any number of steps before the other one makes its mistake.
            for step in range(20) if is_lockstep else itertools.count():
                is_told = bagua.get_default_group().failure() is not None
                train(step)
                assert not is_told, "a step after the group has ended"
        if rank in culprits:
            assert torch.equal(model.narrow.weight, before)
        return str(caught.value)


@pytest.mark.parametrize("culprits", [(0, 1), (1,)])
@pytest.mark.parametrize("algorithm", slow_but([*OF_WEIGHTS, *OWN_KIND], "local_sgd", "async_averaging"))
def test_an_optimizer_that_takes_no_place_is_refused_on_all_ranks(pool2, algorithm, culprits):
    for message in pool2.run(_of_others, args=(algorithm, culprits)):
        expected = "steps with bagua.optim.QAdam" if algorithm in OWN_KIND else "steps 'scale' and 1 more is none"
        assert expected in message


def _alone(rank, world_size, algorithm):
    """Rank 1 alone makes its optimizer anew: its moments are gone, and the others would not know."""
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model, **_options_of(algorithm))
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
        with pytest.raises(BaguaError) as caught:
            for step in range(4):
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
                if rank == 1 and step == 1:
                    optimizer = make_optimizer(algorithm, model, **_options_of(algorithm))
        if rank == 1:
            assert "made anew" in str(caught.value)
            assert "same step on all ranks" in str(caught.value)


@pytest.mark.parametrize("algorithm", slow_but([n for n in (*OF_WEIGHTS, *OWN_KIND) if n in IN_LOCKSTEP], "local_sgd"))
def test_a_rank_that_makes_its_optimizer_anew_alone_is_noticed(pool2, algorithm):
    pool2.run(_alone, args=(algorithm,))


def _unlike(rank, world_size):
    with process_group():
        model = torch.nn.Linear(16, 1)
        bagua.with_bagua(model, torch.optim.SGD(model.parameters(), lr=0.01), algorithm="local_sgd")
        kind = (torch.optim.SGD, torch.optim.Adam)[rank]
        optimizer = kind(model.parameters(), lr=0.01)
        model(batch(rank, 0)[0]).sum().backward()
        with pytest.raises(InvalidArgument, match="disagree about optimizer 0: rank 0 has SGD .* rank 1 has Adam"):
            optimizer.step()


def test_optimizers_that_are_made_anew_unlike_each_other(pool2):
    pool2.run(_unlike)


def _is_freed(rank, world_size):
    with process_group():
        model = torch.nn.Linear(16, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd")
        old = weakref.ref(optimizer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(batch(rank, 0)[0]).sum().backward()
        optimizer.step()
        gc.collect()
        assert old() is None
        assert _global_optimizer_pre_hooks and _global_optimizer_post_hooks
        other = bagua.with_bagua(torch.nn.Linear(2, 2))
        model.bagua.remove()
        assert _global_optimizer_pre_hooks
        kept = weakref.ref(other)
        del other
        gc.collect()
        assert kept() is None
        bagua.with_bagua(model)
        model.bagua.remove()
        assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks


def test_nothing_is_kept_of_an_old_optimizer_or_model():
    bagua.testing.spawn(_is_freed, 2)


class Derived(torch.optim.SGD):
    """Calls the step of its base class."""

    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Wraps another optimizer, and changes its parameters once more after its step."""

    def __init__(self, params, lr):
        self.inner = torch.optim.SGD(params, lr=lr)
        super().__init__(self.inner.param_groups, {})

    def step(self, closure=None):
        loss = self.inner.step(closure)
        with torch.no_grad():
            for options in self.param_groups:
                for parameter in options["params"]:
                    parameter.mul_(0.99)
        return loss


def _steps_in_steps(rank, world_size, kind, algorithm, raises):
    with process_group():
        model = torch.nn.Linear(16, 1)
        optimizer = kind(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        calls = []
        for name in ("before_optimizer_step", "after_optimizer_step"):
            setattr(model.bagua.algorithm, name, lambda optimizer, *_, name=name: calls.append((name, optimizer)))
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step)[0]).sum().backward()
            if raises and step == 1:  # inside the step, which torch's post hooks never hear of
                lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], "no number"
                with pytest.raises(TypeError) as caught:
                    optimizer.step()
                optimizer.param_groups[0]["lr"] = lr
                assert calls.pop() == ("before_optimizer_step", optimizer)
            optimizer.step()
        assert caught.value if raises else True  # which keeps the frames of the step that raised alive
        assert calls == [("before_optimizer_step", optimizer), ("after_optimizer_step", optimizer)] * 3


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived, Around])
@pytest.mark.parametrize("algorithm", slow_but(["gradient_allreduce", "local_sgd"], "local_sgd"))
def test_a_step_within_a_step_is_one(pool2, algorithm, kind, raises):
    pool2.run(_steps_in_steps, args=(kind, algorithm, raises))


def _in_backward(rank, world_size, algorithm, how, local):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
        loss_of(model, batch(rank, 0)).backward()
        meet()
        if how == "hook":
            small = torch.optim.SGD([model.narrow.weight], lr=0.01)
            model.narrow.weight.register_post_accumulate_grad_hook(lambda _: small.step())
        elif how == "whole":
            model.narrow.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        else:
            from torch.distributed.optim import _apply_optimizer_in_backward

            parameters = [p for p in model.parameters() if p.requires_grad]
            _apply_optimizer_in_backward(torch.optim.SGD, parameters, {"lr": 0.01})
        with pytest.raises(BaguaError, match="SGD.step was called inside backward|QAdam.step was called inside"):
            if local:
                with model.bagua.no_sync():
                    loss_of(model, batch(rank, 1)).backward()
            loss_of(model, batch(rank, 1)).backward()


@pytest.mark.parametrize("how, local", [("hook", False), ("hook", True), ("whole", False), ("torch", False)])
@pytest.mark.parametrize("algorithm", slow_but(["gradient_allreduce", "qadam", "local_sgd"], "gradient_allreduce"))
def test_an_optimizer_in_backward_is_refused(pool2, algorithm, how, local):
    pool2.run(_in_backward, args=(algorithm, how, local))


def _of_local_gradients(rank, world_size, algorithm, where, culprits):
    with process_group():
        model = make_net()
        optimizer = make_optimizer(algorithm, model)
        bagua.with_bagua(model, optimizer, algorithm=algorithm)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for to_none in (True, False):  # dropped gradients are none
            with model.bagua.no_sync():
                loss_of(model, batch(rank, 1)).backward()
            optimizer.zero_grad(set_to_none=to_none)
            loss_of(model, batch(rank, 1)).backward()
            optimizer.zero_grad(set_to_none=to_none)
        with model.bagua.no_sync():  # and those that are synchronised in the end are local no more
            loss_of(model, batch(rank, 1)).backward()
        loss_of(model, batch(rank, 1)).backward()
        optimizer.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer.zero_grad()
        with pytest.raises(BaguaError, match=r"no_sync\(\) has left unsynchronised, of 'scale' and 11 more"):
            if rank in culprits:
                with model.bagua.no_sync():
                    loss_of(model, batch(rank, 2)).backward()
                    if where == "inside":
                        optimizer.step()
                optimizer.step()
            loss_of(model, batch(rank, 3)).backward()
            optimizer.step()
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("where, culprits", [("inside", (0, 1)), ("after", (0, 1)), ("after", (1,))])
@pytest.mark.parametrize("algorithm", slow_but(OF_GRADIENTS, "gradient_allreduce"))
def test_a_step_of_gradients_that_no_sync_has_left(pool2, algorithm, where, culprits):
    pool2.run(_of_local_gradients, args=(algorithm, where, culprits))


def _weights_without_sync(rank, world_size, algorithm):
    """Where weights are exchanged gradients are local anyway: the place of backward() changes the overlap alone."""
    with process_group():
        results = []
        for is_local in (True, False):
            model = make_net()
            optimizer = make_optimizer(algorithm, model)
            bagua.with_bagua(model, optimizer, algorithm=algorithm, **OPTIONS.get(algorithm, {}))
            for step in range(5):
                optimizer.zero_grad()
                model.bagua.step.synchronises = not is_local
                loss_of(model, batch(rank, step)).backward()
                optimizer.step()
            results.append(model.state_dict())
        assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


@pytest.mark.parametrize("algorithm", [name for name in OF_WEIGHTS if name in IN_LOCKSTEP])
def test_steps_in_no_sync_where_weights_are_exchanged(pool2, algorithm):
    pool2.run(_weights_without_sync, args=(algorithm,))


class _Wrapper(torch.optim.Optimizer):
    """As Lookahead or SAM: an optimizer with hooks of its own around the one that has the state."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.param_groups, self.inner = inner.param_groups, inner

    def step(self, closure=None):
        return self.inner.step(closure)


def _wrapped(rank, world_size, kind):
    """The optimizer inside stays the one whose moments and warm-up count: the wrapper has none."""
    algorithm, options = {"momentum": ("local_sgd", {"sync_every": 1}), "qadam": ("qadam", {"warmup_steps": 2})}[kind]
    with process_group():
        models = make_net(), make_net()
        for model, around in zip(models, (_Wrapper, lambda inner: inner), strict=True):
            inner = make_optimizer(algorithm, model, **_options_of(algorithm))
            bagua.with_bagua(model, inner, algorithm=algorithm, **options)
            outer = around(inner)
            for step in range(4):
                inner.zero_grad()
                loss_of(model, batch(rank, step)).backward()
                outer.step()
            if kind == "momentum":
                moments = {str(i): state["momentum_buffer"] for i, state in enumerate(inner.state.values())}
                assert moments
                assert_equal_on_all_ranks(moments)
            model.bagua.remove()
        for mine, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(mine, plain)


@pytest.mark.parametrize("kind", ["momentum", "qadam"])
def test_an_optimizer_around_the_one_that_is_followed(pool2, kind):
    pool2.run(_wrapped, args=(kind,))


class _Polyak(torch.optim.SGD):
    """Its step takes a number, where others take a closure."""

    def step(self, loss_value):
        for options in self.param_groups:
            options["lr"] = 0.01 * loss_value
        return super().step()


def _numbers(rank, world_size):
    with process_group():
        model = make_net()
        optimizer = _Polyak(model.parameters(), lr=0.01)
        bagua.with_bagua(model, optimizer)
        loss_of(model, batch(rank, 0)).backward()
        optimizer.step(2.0)
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert_equal_on_all_ranks(dict(model.named_parameters()))


def test_an_argument_of_step_that_is_no_closure(pool2):
    pool2.run(_numbers)


def _left_over(rank, world_size, case):
    """Gradients of each rank's own, which nobody has synchronised yet when the model is wrapped, or wrapped again."""
    with process_group():
        model = make_net()
        optimizer = make_optimizer("gradient_allreduce", model)
        if case == "wrapped again":
            bagua.with_bagua(model, optimizer)
            with model.no_sync():
                loss_of(model, batch(rank, 0)).backward()
        elif case == "weights before":
            bagua.with_bagua(model, optimizer, algorithm="local_sgd")
            loss_of(model, batch(rank, 0)).backward()
        else:
            loss_of(model, batch(rank, 0)).backward()
        bagua.with_bagua(model, optimizer, algorithm="bytegrad")
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with pytest.raises(BaguaError, match="would use gradients that no_sync"):
            optimizer.step()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("case", ["wrapped", "wrapped again", "weights before"])
def test_a_step_of_gradients_from_before_the_wrap(pool2, case):
    pool2.run(_left_over, args=(case,))


def _two_models(rank, world_size, with_closure):
    """One optimizer steps both: what one of them refuses, the other knows nothing of, whichever was wrapped first."""
    with process_group():
        for is_refused_first in (False, True):
            models = [make_net(seed) for seed in range(2)]
            optimizer = torch.optim.SGD([p for model in models for p in model.parameters() if p.requires_grad], lr=0.01)
            wraps = [({"algorithm": "decentralized"}, models[0]), ({"algorithm": "bytegrad"}, models[1])]
            for options, model in reversed(wraps) if is_refused_first else wraps:
                bagua.with_bagua(model, optimizer, bucket_bytes=64 * 1024, **options)
            calls = []
            algorithm = models[0].bagua.algorithm
            hook = algorithm.before_optimizer_step
            algorithm.before_optimizer_step = lambda *args, hook=hook, calls=calls: calls.append(1) or hook(*args)

            def closure(step, models=models, optimizer=optimizer):
                optimizer.zero_grad()
                data = batch(rank, step)
                for model in models:
                    bad = float("nan") if step == 1 and rank == 1 and model is models[1] else 1.0
                    (loss_of(model, data) * bad).backward()

            def train(step, closure=closure, optimizer=optimizer):
                if with_closure:
                    optimizer.step(lambda: closure(step))
                else:
                    closure(step)
                    optimizer.step()

            train(0)
            with pytest.raises(InvalidArgument, match="NaN or Inf on some rank"):
                train(1)
            assert len(calls) == 1
            train(2)
            assert len(calls) == 2
            assert_equal_on_all_ranks(dict(models[1].named_parameters()))
            for model in models:
                model.bagua.remove()


@pytest.mark.parametrize("with_closure", [False, True])
def test_what_one_of_two_models_of_an_optimizer_refuses_leaves_the_other_alone(pool2, with_closure):
    pool2.run(_two_models, args=(with_closure,))


class MayForget(torch.optim.SGD):
    """Does not call its closure where it is told so."""

    forgets = False

    def step(self, closure=None):
        return super().step(None if self.forgets else closure)


def _two_groups(rank, world_size, where):
    """What ends the group of one model on rank 1 ends that of the other, too, in which rank 0 waits for rank 1."""
    for is_refused_first in (False, True):
        with process_group():
            models = [torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)]
            optimizer = MayForget([p for model in models for p in model.parameters()], lr=0.1)
            algorithms = ["local_sgd" if where == "after" else "gradient_allreduce", "decentralized"]
            options = [{"sync_every": 1000} if where == "after" else {}, {}]
            for index in (0, 1) if is_refused_first else (1, 0):
                group = bagua.new_group(range(world_size), timeout=TIMEOUT_S)
                bagua.with_bagua(models[index], optimizer, group=group, algorithm=algorithms[index], **options[index])

            def closure(models=models, optimizer=optimizer):
                optimizer.zero_grad()
                for model in models:
                    model(torch.ones(2, 3)).sum().backward()
                if rank == 1 and where != "after":
                    with models[0].bagua.no_sync():
                        models[0](torch.ones(2, 3)).sum().backward()

            optimizer.forgets = rank == 1 and where == "after"
            told = "closure" if where == "after" else "no_sync"
            with pytest.raises(BaguaError, match=told) as caught:
                if where == "before":
                    closure()
                    optimizer.step()
                else:
                    optimizer.step(closure)
                for model in models:  # rank 0, if no wait of its own has told it yet
                    bagua.barrier(group=model.bagua.group)
            assert caught.value.rank == 1 and (type(caught.value) is InvalidArgument) == (rank == 1)
            for model in models:
                with pytest.raises(BaguaError, match=told):
                    bagua.barrier(group=model.bagua.group)
            meet()


@pytest.mark.parametrize("where", ["before", "in the closure", "after"])
def test_what_ends_the_group_of_one_of_two_models_of_an_optimizer_ends_the_others(pool2, where):
    pool2.run(_two_groups, args=(where,))
