"""Gradients that are encoded where autograd has put them: the same bits as from the bucket, and never too many."""

import itertools
from types import SimpleNamespace

import torch

import bagua
from bagua.algorithms import Declaration
from bagua.buckets import Bucket, Member
from bagua.data_parallel.zero_copy import ZeroCopy
from tests.conformance.training import assert_equal_on_all_ranks, batch, loss_of, make_net, process_group
from tests.distributed.worlds import fast_in

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
        views = [member.view for member in model.bagua.reducer.storage.members]
        assert all(p.grad is view for p, view in zip(model.bagua.reducer.storage.parameters, views, strict=True))
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
    [(0, 1, False), (1, 150_000, True), (2, 25_000_000, True), (3, 150_000, False)],
    list(itertools.product(range(len(OPTIONS)), SIZES, [False, True])),
)
def test_the_same_bits_as_copying(pool2, kind, bucket_bytes, accumulates):
    pool2.run(_equals_copying, args=(*OPTIONS[kind], bucket_bytes, accumulates))


class Wide(torch.nn.Module):
    """Has eight square layers of 256 KB of weights each."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))

    def forward(self, x):
        return self.layers(x)


def _limit(rank, world_size, bucket_layers):
    with process_group():
        layer_bytes = 256 * 256 * 4
        model = bagua.with_bagua(Wide(), algorithm="bytegrad", bucket_bytes=bucket_layers * layer_bytes)
        seen = []

        def look(_):
            seen.append(sum(grad.nbytes for grad in model.bagua.reducer._zero_copy._in_place.values()))

        for parameter in model.parameters():  # behind bagua's hooks, which are older
            parameter.register_post_accumulate_grad_hook(look)
        for number in range(4):  # the first backward of each of two layouts copies all
            seen.clear()
            model.zero_grad()
            model(torch.ones(4, 256)).sum().backward()
            two_buckets = 2 * max(bucket.num_bytes for bucket in model.bagua.buckets)
            assert len(seen) == 8 and max(seen) <= max(8 * layer_bytes // 4, two_buckets)
            assert max(seen) == 0 if number == 0 else max(seen) >= layer_bytes or number == 1
            zero_copy = model.bagua.reducer._zero_copy
            assert not zero_copy._in_place and zero_copy._in_place_bytes == 0
            assert all(bucket.take_segments() is None for bucket in model.bagua.buckets)


@fast_in("bucket_layers", [2], [1, 2])
def test_what_is_read_in_place_is_limited(pool2, bucket_layers):
    pool2.run(_limit, args=(bucket_layers,))


@fast_in("num_buckets", [12], [3, 8, 12])
def test_what_has_come_makes_room_for_the_next(num_buckets):
    """Memory is released at the moment in which it is needed, not only when the next bucket leaves."""
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
