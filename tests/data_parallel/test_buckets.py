"""The default sizes of buckets, and fill: gradients enter a bucket, whatever their type and layout."""

import itertools

import torch

import bagua
from bagua import _C
from bagua.buckets import ALIGN_BYTES, DEFAULT_BUCKET_BYTES, SMALL_BUCKET_BYTES, Member
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
OF_GRADIENTS = [1, 1, 2, 4, 8, 12, 6, 3, 1, 1, 1]


def test_sizes():
    """A model of 120 tensors of 1 MiB: a first bucket that leaves early, full ones, and little to send at the end."""
    numels = [2**18] * 120
    limits = (SMALL_BUCKET_BYTES, DEFAULT_BUCKET_BYTES, ALIGN_BYTES)
    _, _, bucket_numels = _C.plan_buckets(numels, [4] * 120, [0] * 120, list(range(120)), *limits)
    assert [numel // 2**18 for numel in bucket_numels] == [1, 1, 2, 4, 8, 16, 25, 25, 19, 9, 5, 2, 1, 1, 1]


class Forty(torch.nn.Module):
    """40 tensors of 1 MiB."""

    def __init__(self):
        super().__init__()
        self.tensors = torch.nn.ParameterList(torch.zeros(2**18) for _ in range(40))

    def forward(self):
        return sum(tensor.sum() for tensor in self.tensors)


def _sizes_by_what_is_exchanged(rank, world_size):
    with process_group():
        model = Forty()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for algorithm, options, sizes in [
            ("gradient_allreduce", {}, OF_GRADIENTS),
            ("decentralized", {}, [25, 15]),
            ("local_sgd", {"post_local_after": 1}, [25, 15]),  # weights in the main, after one step of gradients
            ("gradient_allreduce", {}, OF_GRADIENTS),
        ]:
            bagua.with_bagua(model, optimizer, algorithm=algorithm, **options)
            for step in range(3):  # the layout by registration, and by the order of the first step
                assert [bucket.num_bytes / 2**20 for bucket in model.bagua.buckets] == sizes, (algorithm, options)
                if step < 2:
                    model().backward()
                    optimizer.step()


def test_sizes_by_what_is_exchanged(pool2):
    """Weights are ready all at once: small buckets would only be more messages. The memory is the same throughout."""
    pool2.run(_sizes_by_what_is_exchanged)


def fill(view, grad):
    member = Member(0, "weight", torch.nn.Parameter(torch.zeros_like(view)), view)
    member.fill(grad, member.is_alike(grad))


@fast_in(
    "grad_dtype, dtype",
    [(DTYPES[i], DTYPES[(i + shift) % 4]) for i in range(4) for shift in (0, 1)],
    list(itertools.product(DTYPES, DTYPES)),
)
def test_types(grad_dtype, dtype):
    """Neighbours in the bucket stay as they are; conversion rounds as torch's does."""
    for numel in (0, 1, 7, 64, 1000, 70_001):
        flat = torch.full((numel + 20,), 7.0, dtype=dtype)
        grad = torch.randn(numel, dtype=torch.float64).to(grad_dtype)
        fill(flat[10 : 10 + numel], grad)
        assert torch.equal(flat[10 : 10 + numel], grad.to(dtype)), numel
        assert (flat[:10] == 7).all() and (flat[10 + numel :] == 7).all(), numel


def test_layouts():
    channels_last = torch.randn(4, 3, 5, 2).to(memory_format=torch.channels_last)
    grads = {
        "alike": channels_last,
        "transposed": torch.randn(4, 3, 2, 5).transpose(2, 3),
        "expanded": torch.randn(1, 3, 1, 1).expand(4, 3, 5, 2),
        "every other": torch.randn(8, 3, 5, 2)[::2],
        "lazily negative": torch._neg_view(channels_last),
    }
    for name, grad in grads.items():
        view = torch.zeros(4 * 3 * 5 * 2).as_strided((4, 3, 5, 2), channels_last.stride())
        fill(view, grad)
        assert torch.equal(view, grad), name


def test_memory_of_another_device_is_not_read():
    view = torch.zeros(8)
    member = Member(0, "weight", torch.nn.Parameter(torch.zeros(8)), view)
    assert member.is_alike(torch.ones(8))
    assert not member.is_alike(torch.ones(8, device="meta"))
