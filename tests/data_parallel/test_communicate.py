"""What an algorithm's ``communicate`` may be, and what follows from what it sends; with plug-ins of this file."""

from __future__ import annotations

import copy
import dataclasses
import random

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState, Stage
from bagua.errors import BaguaError, InvalidArgument
from bagua.testing import spawn
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.meeting import meet

NUM_LAYERS = 6


class Layers(torch.nn.Module):
    """Square layers, of which each has a bucket; their gradients become ready in another order on each rank."""

    def __init__(self, order=range(NUM_LAYERS)):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(NUM_LAYERS))
        self.order = list(order)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def _layers(rank, algorithm, optimizer=None, **options):
    """Wrapped, every rank with an order of its own; and what each rank's gradients are without bagua."""
    torch.manual_seed(0)
    order = list(range(NUM_LAYERS)) if rank == 0 else list(reversed(range(NUM_LAYERS)))
    model = Layers(order)
    return bagua.with_bagua(model, optimizer or (), algorithm=algorithm, bucket_bytes=8 * 8 * 4, **options)


def _backward(model, rank, step):
    model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).square().sum().backward()


def _local_gradients(model, rank, step):
    plain = Layers(model.order)
    plain.load_state_dict(model.state_dict())
    _backward(plain, rank, step)
    return [p.grad.clone() for p in plain.parameters()]


@dataclasses.dataclass(kw_only=True)
class InParts(Algorithm):
    """The mean, in as many all_reduces as the bucket's index says, one after the other; writes down when it goes on."""

    name = "in_parts"

    def __post_init__(self):
        super().__post_init__()
        self.log = []

    def communicate(self, bucket, group):
        self.log.append(("launched", bucket.index))
        for part in bucket.flat.chunk(bucket.index % 4) if bucket.index % 4 else ():
            yield group.all_reduce(part, ReduceOp.SUM)
            self.log.append(("went on", bucket.index))
        if bucket.index % 4 == 0:
            group.all_reduce(bucket)  # waited for at the end of backward
        else:
            bucket.flat.div_(group.size)


def _goes_on(rank, world_size):
    with process_group():
        algorithm = InParts()
        model = _layers(rank, algorithm)
        for step in range(3):
            expected = _local_gradients(model, rank, step)
            for grad in expected:
                bagua.all_reduce(grad)
            index_of = {name: bucket.index for bucket in model.bagua.buckets for name in bucket.names}
            algorithm.log.clear()
            _backward(model, rank, step)
            if step:  # the buckets of the first step are laid out anew after it
                for (name, parameter), total in zip(model.named_parameters(), expected, strict=True):
                    divisor = 1 if index_of[name] % 4 == 0 else world_size
                    torch.testing.assert_close(parameter.grad, total / divisor)
            assert bagua.get_default_group().all_gather_object(algorithm.log) == [algorithm.log] * world_size
        return algorithm.log


def test_a_generator_goes_on_at_the_same_place_on_all_ranks(pool2):
    log = pool2.run(_goes_on)[0]
    # Twice two launches after its own, and again; what is left goes on at the end of backward, in turns.
    assert log == [
        *[("launched", index) for index in (0, 1, 2, 3)],
        ("went on", 1),
        ("launched", 4),
        ("went on", 2),
        ("launched", 5),
        ("went on", 3),
        ("went on", 2),
        ("went on", 5),
        ("went on", 3),
        ("went on", 3),
    ]


@dataclasses.dataclass(kw_only=True)
class Fails(Algorithm):
    name = "fails"
    on: int = 1

    def communicate(self, bucket, group):
        yield group.all_reduce(bucket)
        if group.rank == self.on and bucket.index == 2:
            raise KeyError("on purpose")


def _fails(rank, world_size):
    with process_group():
        model = _layers(rank, Fails())
        with pytest.raises((BaguaError, KeyError)) as caught:
            _backward(model, rank, 0)
        return str(caught.value)


def test_what_a_generator_raises_ends_all_ranks(pool2):
    others, own = pool2.run(_fails)
    assert "communicate of algorithm 'fails' raised KeyError: 'on purpose'" in others
    assert own == "'on purpose'"


@dataclasses.dataclass(kw_only=True)
class Gives(Algorithm):
    name = "gives"
    what: str = "number"

    def communicate(self, bucket, group):
        work = group.all_reduce(bucket)
        return {"number": 5, "generator": (value for value in [5]), "again": iter_of(work), "none": None}[self.what]


def iter_of(work):
    while True:
        yield work


def _gives(rank, world_size):
    with process_group():
        gave = "communicate gave a int; expected a Work, None, or a generator"
        again = "communicate yields a Work again that it has yielded before"
        for what, message in {"number": gave, "generator": gave, "again": again}.items():
            group = bagua.new_group(range(world_size))
            model = bagua.with_bagua(torch.nn.Linear(3, 3), algorithm=Gives(what=what), group=group)
            meet()
            with pytest.raises(BaguaError, match=message):
                model(torch.ones(2, 3)).sum().backward()
        model = bagua.with_bagua(torch.nn.Linear(3, 3, bias=False), algorithm=Gives(what="none"))
        model(torch.full((2, 3), float(rank + 1))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((3, 3), 6.0))  # waited for, though nobody said so


def test_what_communicate_may_give(pool2):
    pool2.run(_gives)


@dataclasses.dataclass(kw_only=True)
class Coded(Algorithm):
    """A codec in one place only: in what is sent."""

    name = "coded"
    looks: bool = False  # at the gradients, before they are sent

    def communicate(self, bucket, group):
        what = bucket.flat if self.looks else bucket
        return group.all_reduce(what, ReduceOp.AVG, codec="minmax_uint8")


def _coded(rank, world_size, looks):
    with process_group():
        torch.manual_seed(0)
        model = torch.nn.Linear(50, 3)  # with padding between weight and bias
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=Coded(looks=looks))
        (bucket,) = model.bagua.buckets
        assert str(bucket.declaration) == ("not sent yet" if looks else "all_reduce, minmax_uint8")
        gradients = []
        for step in range(3):
            x = torch.randn(4, 50, generator=torch.Generator().manual_seed(step + 10 * rank)) + 3
            optimizer.zero_grad()
            model(x).sum().backward()
            (bucket,) = model.bagua.buckets
            assert bucket.declaration.codec == "minmax_uint8"
            assert bucket.declaration.is_zero_copy == (not looks)
            gradients += [p.grad.clone() for p in model.parameters()]
            assert_equal_on_all_ranks({name: p.grad for name, p in model.named_parameters()})
        optimizer.zero_grad()
        model(torch.full((4, 50), float("nan") if rank == 1 else 1.0)).sum().backward()
        with pytest.raises(InvalidArgument, match=r"NaN or Inf on some rank.*under codec 'minmax_uint8'"):
            optimizer.step()
        return gradients


def test_from_a_codec_in_what_is_sent_all_else_follows(pool2):
    """The guard against NaN, cleared padding, gradients that are not copied, and what is said of the bucket."""
    in_place, copied = (pool2.run(_coded, args=(looks,))[0] for looks in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(in_place, copied, strict=True))


@dataclasses.dataclass(kw_only=True)
class Changes(Algorithm):
    """Sends what is coded in one step as it is in the next, and looks at it in the one after that."""

    name = "changes"

    def __post_init__(self):
        super().__post_init__()
        self.step = 0

    def communicate(self, bucket, group):
        if self.step % 3 == 2:
            total = sum(float(member.parameter.grad.sum()) for member in bucket.members)
            assert total == float(bucket.flat.sum())
        return group.all_reduce(bucket, ReduceOp.AVG, codec=None if self.step % 3 == 1 else "bf16")

    def after_backward(self, buckets, group):
        self.step += 1


def _changes(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(64, 4, bias=False), algorithm=Changes())
        for step in range(7):
            model.zero_grad()
            model(torch.full((2, 64), float(step + rank))).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((4, 64), 2 * step + 1.0))
            assert model.weight.grad is model.bagua.buckets[0].members[0].view


def test_what_is_sent_may_change_from_step_to_step(pool2):
    pool2.run(_changes)


@dataclasses.dataclass(kw_only=True)
class Remembers(Algorithm):
    """Adds up gradients in two states: of the shape of the gradients, and of one number per parameter."""

    name = "remembers"

    def parameter_state(self):
        return {"total": ParameterState(torch.float64), "largest": ParameterState(shape=lambda p: (1,))}

    def communicate(self, bucket, group):
        yield group.all_reduce(bucket, ReduceOp.AVG)
        bucket.state("total").add_(bucket.flat)
        for member in bucket.members:
            assert bucket.state("total", member).shape == member.view.shape
            largest = bucket.state("largest", member)
            largest.copy_(torch.maximum(largest, member.view.abs().max()))


def _totals(model):
    states = model.bagua.state_dict()["parameters"]["states"]
    return {name: value.clone() for name, value in states["total"]["parameters"].items()}, {
        name: float(value) for name, value in states["largest"]["parameters"].items()
    }


def _remembers(rank, world_size):
    with process_group():
        torch.manual_seed(0)
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bagua.with_bagua(model, optimizer, algorithm=Remembers(), bucket_bytes=600)
        total = [torch.zeros(8, 8, dtype=torch.float64) for _ in range(NUM_LAYERS)]
        largest = [0.0] * NUM_LAYERS
        names = [name for name, _ in model.named_parameters()]
        for step in range(5):
            _backward(model, rank, step)
            if step == 1:
                continue  # no step follows that counts: its backward is followed by another one, which goes on from it
            if step == 3:
                optimizer.zero_grad()
                before = _totals(model)[1]
                model(torch.full((1, 8), float("nan") if rank else 1.0)).sum().backward()
                assert _totals(model)[1] == before  # NaN, so what it has left is forgotten with that of the one before
                continue
            optimizer.step()
            counted = [step - 1, step] if step == 2 else [step]
            for index in range(NUM_LAYERS):
                for one in counted:
                    grads = [_local_gradients(model, r, one)[index] for r in range(world_size)]
                    mean = sum(grads) / world_size
                    total[index] += mean
                    largest[index] = max(largest[index], float(mean.abs().max()))
            totals, found = _totals(model)
            for index, name in enumerate(names):
                torch.testing.assert_close(totals[name].view(8, 8), total[index], rtol=1e-5, atol=1e-6)
                assert found[name] == pytest.approx(largest[index])
        state = model.bagua.state_dict()
        before = _totals(model)
        other = Layers()
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        bagua.with_bagua(other, optimizer, algorithm=Remembers(), bucket_bytes=600)
        other.bagua.load_state_dict(state)
        after = _totals(other)
        assert after[1] == before[1] and all(torch.equal(after[0][name], before[0][name]) for name in names)


def test_states_of_parameters_are_the_librarys(pool2):
    pool2.run(_remembers)


@dataclasses.dataclass(kw_only=True)
class Asks(Algorithm):
    name = "asks"

    def parameter_state(self):
        return {"q": ParameterState(shape=lambda p: (2,))}

    def communicate(self, bucket, group):
        bucket.flat.zero_()
        with pytest.raises(InvalidArgument, match=r"state\('nothing'\).*describes 'q'"):
            bucket.state("nothing")
        with pytest.raises(InvalidArgument, match=r"state\('q'\) has a shape of its own.*pass the member"):
            bucket.state("q")
        assert bucket.state("q", bucket.members[0]).shape == (2,)


@dataclasses.dataclass(kw_only=True)
class AsksElsewhere(Asks):
    name = "asks_elsewhere"

    def communicate(self, bucket, group):
        bucket.flat.zero_()

    def after_optimizer_step(self, optimizer, buckets, group):
        buckets[0].state("q", buckets[0].members[0])


def _asks_elsewhere(rank, world_size):
    with process_group():
        model = torch.nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # No rank waits for another in a step that sends nothing: the failure of one may meet the other anywhere in it.
        with pytest.raises(BaguaError, match=r"bucket.state\('q'\) is for communicate"):
            bagua.with_bagua(model, optimizer, algorithm=AsksElsewhere())
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()


def test_states_are_for_communicate(pool2):
    pool2.run(_asks_elsewhere)


def test_states_that_are_not_there(pool2):
    def run(rank, world_size):
        with process_group():
            model = bagua.with_bagua(torch.nn.Linear(3, 3), algorithm=Asks())
            model(torch.ones(2, 3)).sum().backward()

    pool2.run(run)


@dataclasses.dataclass(kw_only=True)
class Waits(Algorithm):
    """Sends nothing before it goes on for the first time; in every other step something else is complete by then."""

    name = "waits"
    sends_another: bool = False

    def __post_init__(self):
        super().__post_init__()
        self.step = 0

    def communicate(self, bucket, group):
        if not self.sends_another:
            yield None
        elif self.step % 2:
            work = group.all_reduce(torch.ones(3))
            work.wait()
            yield work
        yield group.all_reduce(bucket, ReduceOp.AVG, codec="bf16")

    def after_backward(self, buckets, group):
        self.step += 1


def _waits(rank, world_size, sends_another):
    with process_group():
        model = _layers(rank, Waits(sends_another=sends_another))
        for step in range(4):
            expected = _local_gradients(model, rank, step)
            for grad in expected:
                bagua.all_reduce(grad, ReduceOp.AVG)
            _backward(model, rank, step)
            for grad, parameter in zip(expected, model.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, grad, rtol=0.02, atol=0.02)
            for bucket in model.bagua.buckets:
                is_alone = not sends_another or step % 2 == 0
                assert str(bucket.declaration) == f"all_reduce{'' if is_alone else ' + all_reduce'}, bf16"
                assert bucket.declaration.is_zero_copy == is_alone


@pytest.mark.parametrize("sends_another", [False, True])
def test_the_bucket_may_be_sent_after_something_else(pool2, sends_another):
    pool2.run(_waits, args=(sends_another,))


@dataclasses.dataclass(kw_only=True)
class LooksAtGradients(Algorithm):
    name = "looks_at_gradients"

    def communicate(self, bucket, group):
        yield group.all_reduce(bucket, ReduceOp.AVG, codec="bf16")
        for member in bucket.members:
            assert member.parameter.grad is member.view


def _looks_at_gradients(rank, world_size):
    with process_group():
        model = _layers(rank, LooksAtGradients())
        for step in range(3):
            _backward(model, rank, step)
            assert all(bucket.declaration.is_zero_copy for bucket in model.bagua.buckets)


def test_gradients_are_the_result_where_a_generator_goes_on(pool2):
    pool2.run(_looks_at_gradients)


def _copies(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(3, 3))
        group = copy.copy(model.bagua.algorithm.training.group)
        assert (group.rank, group.size) == (rank, world_size)


def test_the_group_may_be_copied_with_an_algorithm(pool2):
    pool2.run(_copies)


@dataclasses.dataclass(kw_only=True)
class InSubgroup(Algorithm):
    name = "in_subgroup"

    def attach(self, training):
        super().attach(training)
        self.others = training.group.subgroup("others", range(training.group.size), training.group.timeout)

    def communicate(self, bucket, group):
        for part in bucket.flat.chunk(2):
            self.others.all_reduce(part)


def _in_subgroup(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(1000, 1000, bias=False), algorithm=InSubgroup())
        model(torch.full((1, 1000), float(rank + 1))).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1000, 1000), 3.0))
        (bucket,) = model.bagua.buckets
        assert len(bucket.works) == 2 and str(bucket.declaration) == "all_reduce + all_reduce, full precision"


def test_what_is_started_in_a_subgroup_is_waited_for_too(pool2):
    pool2.run(_in_subgroup)


@dataclasses.dataclass(kw_only=True)
class Draws(Algorithm):
    name = "draws"

    def communicate(self, bucket, group):
        noise = torch.rand(()) + random.random()
        return group.all_reduce(bucket, codec="bf16" if noise >= 0 else None)


def _draws(rank, world_size):
    with process_group():
        model = torch.nn.Linear(3, 3)
        states = torch.get_rng_state(), random.getstate()
        bagua.with_bagua(model, algorithm=Draws())
        (bucket,) = model.bagua.buckets
        assert str(bucket.declaration) == "all_reduce, bf16"
        assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]


def test_to_know_what_will_be_sent_draws_no_random_numbers(pool2):
    pool2.run(_draws)


@dataclasses.dataclass(kw_only=True)
class Feeds(Algorithm):
    name = "feeds"
    what: str = ""

    def parameter_state(self):
        return {
            "shaped": ParameterState(shape=lambda p: (1,), is_scaled=True),
            "wide": ParameterState(torch.float64, is_scaled=True),
            "unscaled": ParameterState(),
        }

    def communicate(self, bucket, group):
        if self.what == "part":
            return group.all_reduce(bucket.flat[:64], codec="bf16", feedback="wide")
        return group.all_reduce(bucket, codec="bf16", feedback=self.what)


def _feeds(rank, world_size):
    messages = {
        "unknown": r"feedback='unknown'.*parameter_state\(\) describes 'shaped', 'wide', 'unscaled'",
        "shaped": "feedback='shaped' is to be a state of the shape of the gradients",
        "wide": "feedback='wide' is to be a state .* in float32 or bfloat16.*float64",
        "unscaled": "feedback='unscaled' is to be a state .* with is_scaled=True",
        "part": "feedback='wide' is for a bucket that all ranks reduce",
    }
    with process_group():
        for what, message in messages.items():
            group = bagua.new_group(range(world_size))
            model = bagua.with_bagua(torch.nn.Linear(64, 64), algorithm=Feeds(what=what), group=group)
            meet()
            with pytest.raises(BaguaError, match=message):
                model(torch.ones(1, 64)).sum().backward()


def test_feedback_that_cannot_be_kept_is_refused(pool2):
    pool2.run(_feeds)


@dataclasses.dataclass(kw_only=True)
class Spoils(Algorithm):
    """A codec is used, and yet the bucket is not what its all_reduce has left."""

    name = "spoils"
    how: str = "after it"

    def communicate(self, bucket, group):
        if self.how == "a part of it":  # the NaN lies elsewhere
            yield group.all_reduce(bucket.flat[:16], ReduceOp.AVG, codec="minmax_uint8")
            return
        sent = torch.ones(8) if self.how == "something else" else bucket
        work = group.all_reduce(sent, ReduceOp.AVG, codec="minmax_uint8")
        if self.how == "at its end":
            work.finish_with(lambda: bucket.flat[30].mul_(60_000.0))
            return
        yield work
        bucket.flat[30] = float("nan")


def _spoils(rank, world_size, how):
    with process_group():
        dtype = torch.float16 if how == "at its end" else torch.float32  # which alone overflows there
        model = torch.nn.Linear(64, 64, bias=False, dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm=Spoils(how=how))
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.full((1, 64), 2.0, dtype=dtype)
            x[0, 30] = float("nan") if how == "a part of it" else 2.0
            model(x).sum().backward()
            with pytest.raises(InvalidArgument, match="NaN or Inf on some rank"):
                optimizer.step()


@pytest.mark.parametrize("how", ["after it", "at its end", "something else", "a part of it"])
def test_the_guard_looks_at_all_that_a_codec_has_not_left(pool2, how):
    pool2.run(_spoils, args=(how,))


@dataclasses.dataclass(kw_only=True)
class Doubles(Algorithm):
    """In every other step doubles what it sends, by views that it has seen before."""

    name = "doubles"

    def __post_init__(self):
        super().__post_init__()
        self.step = 0

    def lay_out(self, buckets):
        self.views = [member.view for bucket in buckets for member in bucket.members]

    def communicate(self, bucket, group):
        def double():
            for view in self.views:
                view.mul_(2)

        return group.all_reduce(bucket, ReduceOp.AVG, codec="bf16", prepare=double if self.step % 2 else None)

    def after_backward(self, buckets, group):
        self.step += 1


def _doubles(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(64, 4, bias=False), algorithm=Doubles())
        for step in range(4):
            model.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
            assert torch.equal(model.weight.grad, torch.full((4, 64), 4.0 if step % 2 else 2.0))


def test_gradients_are_there_when_they_are_prepared(pool2):
    pool2.run(_doubles)


@dataclasses.dataclass(kw_only=True)
class InStages(Algorithm):
    name = "in_stages"
    gives: type = Stage

    def __post_init__(self):
        super().__post_init__()
        self.num_steps = 0

    def stage(self):
        return self.gives("late" if self.num_steps > 2 else "early")

    def communicate(self, bucket, group):
        return group.all_reduce(bucket)

    def after_optimizer_step(self, optimizer, buckets, group):
        self.num_steps += 1


def _steps_in_backward(rank, world_size):
    with process_group():
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
        bagua.with_bagua(model, list(optimizers.values()), algorithm=InStages())

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            before = model.bagua.buckets
            model(torch.ones(2, 3)).sum().backward()
        assert model.bagua.algorithm.num_steps == 12 and model.bagua.buckets == before


def test_a_stage_that_begins_in_a_single_ranks_backward_begins_at_its_end():
    spawn(_steps_in_backward, 1)


def _no_stage(rank, world_size):
    with process_group():
        with pytest.raises(InvalidArgument, match=r"stage\(\) gave a str, expected a bagua.algorithms.Stage"):
            bagua.with_bagua(torch.nn.Linear(3, 3), algorithm=InStages(gives=str))


def test_what_is_no_stage_is_refused(pool2):
    pool2.run(_no_stage)
