"""The forms that an algorithm's ``communicate`` may have, and what follows from what it sends; with plug-ins."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import bagua
from bagua import ReduceOp
from bagua.algorithms import Algorithm, ParameterState
from bagua.errors import BaguaError, InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.meeting import meet

NUM_LAYERS = 6


class Layers(torch.nn.Module):
    """Has square layers of a bucket each, whose gradients become ready in another order on each rank."""

    def __init__(self, order=range(NUM_LAYERS)):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8, bias=False) for _ in range(NUM_LAYERS))
        self.order = list(order)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)
        return x


def _layers(rank, algorithm, optimizer=None, **options):
    """Returns a wrapped model, with an order of its own on every rank."""
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
        assert torch.equal(model.weight.grad, torch.full((3, 3), 6.0))  # waited for, though it gave no Work


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
        bagua.with_bagua(model, algorithm=Coded(looks=looks))
        (bucket,) = model.bagua.buckets
        assert str(bucket.declaration) == "not sent yet"
        gradients = []
        for step in range(3):
            x = torch.randn(4, 50, generator=torch.Generator().manual_seed(step + 10 * rank)) + 3
            model.zero_grad()
            model(x).sum().backward()
            (bucket,) = model.bagua.buckets
            assert bucket.declaration.codec == "minmax_uint8"
            assert bucket.declaration.is_zero_copy == (not looks)
            gradients += [p.grad.clone() for p in model.parameters()]
            assert_equal_on_all_ranks({name: p.grad for name, p in model.named_parameters()})
        return gradients


def test_from_a_codec_in_what_is_sent_all_else_follows(pool2):
    """Cleared padding, gradients that are not copied, and the declaration of the bucket."""
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
class Asks(Algorithm):
    name = "asks"

    def parameter_state(self):
        return {"q": ParameterState(shape=lambda p: (2,))}

    def communicate(self, bucket, group):
        with pytest.raises(InvalidArgument, match=r"state\('nothing'\).*describes 'q'"):
            bucket.state("nothing")
        with pytest.raises(InvalidArgument, match=r"state\('q'\) has a shape of its own.*pass the member"):
            bucket.state("q")
        assert bucket.state("q", bucket.members[0]).shape == (2,)
        return group.all_reduce(bucket)

    def after_backward(self, buckets, group):
        buckets[0].state("q", buckets[0].members[0])


def _asks(rank, world_size):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(3, 3), algorithm=Asks())
        with pytest.raises(BaguaError, match=r"bucket.state\('q'\) is for communicate"):
            model(torch.ones(2, 3)).sum().backward()


def test_states_are_for_communicate(pool2):
    pool2.run(_asks)


@dataclasses.dataclass(kw_only=True)
class Waits(Algorithm):
    """Sends nothing before it is resumed for the first time; in every other step something else is complete then."""

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
