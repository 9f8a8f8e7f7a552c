"""Gradients that are encoded where autograd has put them: the same bits as by way of the bucket, and never too many."""

import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch

import bagua
from bagua.algorithms import Declaration
from bagua.buckets import Bucket, Member
from bagua.data_parallel.zero_copy import ZeroCopy
from bagua.testing import Pool
from tests.conformance.training import assert_equal_on_all_ranks, batch, loss_of, make_net, process_group
from tests.distributed.worlds import fast_in
from tests.meeting import wait_until

OPTIONS = [
    ("bytegrad", {}),
    ("bytegrad", {"codec": "topk", "error_feedback": True}),
    ("qsgd", {"bits": 4}),
    ("qadam", {"warmup_steps": 1}),
]


def _train(rank, algorithm, options, bucket_bytes, accumulates):
    model = make_net()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = bagua.optim.QAdam(parameters, lr=0.01) if algorithm == "qadam" else torch.optim.SGD(parameters, lr=0.01)
    bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=bucket_bytes, **options)
    gradients = []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 2)
        if accumulates and step % 2:
            with model.bagua.no_sync():
                loss_of(model, batch(rank, 10 + step)).backward()
        loss_of(model, batch(rank, step)).backward()
        gradients += [p.grad.clone() for p in parameters]
        views = [member.view for member in model.bagua.step.storage.members]
        assert all(p.grad is view for p, view in zip(model.bagua.step.storage.parameters, views, strict=True))
        optimizer.step()
    return gradients


def _equals_copying(rank, world_size, algorithm, options, bucket_bytes, accumulates):
    with process_group():
        in_place = _train(rank, algorithm, options, bucket_bytes, accumulates)
        keep = ZeroCopy.keep
        ZeroCopy.keep = lambda self, member, grad: False
        try:
            copied = _train(rank, algorithm, options, bucket_bytes, accumulates)
        finally:
            ZeroCopy.keep = keep
        assert all(torch.equal(a, b) for a, b in zip(in_place, copied, strict=True))
        assert_equal_on_all_ranks({str(place): gradient for place, gradient in enumerate(in_place)})


SIZES = [1, 150_000, 25_000_000]  # of buckets, in bytes


@fast_in(
    "kind, bucket_bytes, accumulates",
    [(0, 1, False), (0, 150_000, True), (1, 150_000, False), (1, 25_000_000, True), (2, 1, True), (3, 150_000, True)],
    list(itertools.product(range(len(OPTIONS)), SIZES, [False, True])),
)
def test_the_same_bits_as_copying(pool2, kind, bucket_bytes, accumulates):
    pool2.run(_equals_copying, args=(*OPTIONS[kind], bucket_bytes, accumulates))


class Wide(torch.nn.Module):
    """Eight square layers of 256 KB of weights each."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x):
        return self.layers(x)


def _behind_all_hooks(parameter, function):
    """Calls ``function(parameter)`` in backward when all hooks of the parameter have run; while what is returned lives.

    Those of the parameter itself run before bagua's.
    """
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_hook(lambda *_: function(parameter))
    return node


def _limit(rank, world_size, bucket_layers):
    with process_group():
        layer_bytes = 256 * 256 * 4
        model = bagua.with_bagua(Wide(), algorithm="bytegrad", bucket_bytes=bucket_layers * layer_bytes)
        seen = []

        def look(_):
            seen.append(sum(grad.nbytes for grad in model.bagua.step._zero_copy._in_place.values()))

        nodes = [_behind_all_hooks(parameter, look) for parameter in model.parameters()]
        for _ in range(2):  # in the first layout and in the second
            seen.clear()
            model.zero_grad()
            model(torch.ones(4, 256)).sum().backward()
            two_buckets = 2 * max(bucket.num_bytes for bucket in model.bagua.buckets)
            assert len(seen) == len(nodes) and layer_bytes <= max(seen) <= max(8 * layer_bytes // 4, two_buckets)
            zero_copy = model.bagua.step._zero_copy
            assert not zero_copy._in_place and zero_copy._in_place_bytes == 0
            assert all(bucket.take_segments() is None for bucket in model.bagua.buckets)


def _freed(rank, world_size):
    """The tensors that autograd made are gone as soon as the next bucket leaves, not at the end of backward."""
    with process_group():
        model = bagua.with_bagua(Wide(), algorithm="bytegrad", bucket_bytes=1)
        alive, looked = [], []

        def num_done():
            return sum(span.kind == "operation" for span in model.bagua.timeline().spans)

        def look(parameter):
            wait_until(lambda: num_done() >= before + len(looked) - 1, "what was sent before the last has come")
            looked.append(parameter)
            if parameter.grad.data_ptr() not in {member.view.data_ptr() for member in model.bagua.step.storage.members}:
                alive.append(weakref.ref(parameter.grad))

        counts = []

        def count(parameter):
            look(parameter)
            counts.append(sum(ref() is not None for ref in alive))

        nodes = [_behind_all_hooks(parameter, count) for parameter in model.parameters()]
        for _ in range(2):
            alive.clear()
            looked.clear()
            counts.clear()
            before = num_done()
            model.zero_grad()
            model(torch.ones(4, 256)).sum().backward()
            assert len(counts) == len(nodes) == 8 and max(counts) <= 2, counts


def test_what_is_read_in_place_is_freed_under_way(pool2):
    pool2.run(_freed)


@pytest.mark.parametrize("bucket_layers", [1, 2])
def test_what_is_read_in_place_is_limited(pool2, bucket_layers):
    pool2.run(_limit, args=(bucket_layers,))


@pytest.mark.parametrize("num_buckets", [3, 8, 12])
def test_what_has_come_makes_room_for_the_next(num_buckets):
    """At the moment in which it is needed, not only when the next bucket leaves."""
    buckets = []
    for index in range(num_buckets):
        flat = torch.zeros(32)
        members = [
            Member(2 * index + half, f"p{index}", torch.nn.Parameter(torch.zeros(16)), flat[16 * half :][:16])
            for half in (0, 1)
        ]
        buckets.append(Bucket(index, None, None, flat, members, []))
        buckets[-1].declaration = Declaration("all_reduce", codec="a codec", is_zero_copy=True)
    zero_copy = ZeroCopy(buckets)
    zero_copy.begin()
    num_kept = max(num_buckets // 4, 2)  # a quarter of the gradients, or two buckets, are the limit
    has_come = [False] * num_kept

    def is_kept(index):
        member = buckets[index // 2].members[index % 2]
        member.parameter.grad = torch.ones(16)
        return zero_copy.keep(member, member.parameter.grad)

    for bucket in buckets[:num_kept]:
        assert all(is_kept(member.index) for member in bucket.members)
        zero_copy.launch(bucket)
        assert bucket.take_segments() is not None
        bucket.works.append(SimpleNamespace(is_completed=lambda index=bucket.index: has_come[index]))
    next_index = 2 * num_kept
    assert not is_kept(next_index)
    has_come[0] = True
    assert is_kept(next_index) and is_kept(next_index + 1)
    assert all(member.parameter.grad is member.view for member in buckets[0].members)
    assert all(member.parameter.grad is not member.view for bucket in buckets[1:num_kept] for member in bucket.members)
    assert not is_kept(next_index)  # the second bucket is still under way


class Raises(torch.autograd.Function):
    """Raises in backward while it is told to."""

    is_on = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Raises.is_on:
            raise ArithmeticError("planned")
        return grad


def _single_rank_goes_on(rank, world_size):
    with process_group():
        layers = [torch.nn.Linear(256, 256) for _ in range(2)]
        model = torch.nn.ModuleList(layers)
        model.forward = lambda x: layers[1](Raises.apply(layers[0](x)))
        bagua.with_bagua(model, algorithm="bytegrad")
        x = torch.ones(2, 256)
        with pytest.raises(ArithmeticError):
            model(x).sum().backward()
        Raises.is_on = False
        model.zero_grad()
        model(x).sum().backward()
        expected = [torch.ones(2, 256)]
        assert torch.allclose(layers[1].bias.grad, expected[0].sum(0))
        views = [member.view for member in model.bagua.step.storage.members]
        assert all(p.grad is v for p, v in zip(model.bagua.step.storage.parameters, views, strict=True))


def test_a_backward_that_raised_leaves_nothing_behind():
    with Pool(1) as pool:
        pool.run(_single_rank_goes_on)
