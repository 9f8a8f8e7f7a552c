"""bytegrad beside its oracle: the two-shot compressed mean in plain loops, and what it leaves uncompressed."""

from __future__ import annotations

import itertools

import pytest
import torch

import bagua
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in, in_turns

BLOCK = 2048
WITHOUT_FEEDBACK = [name for name in bagua.codecs.available() if not bagua.codecs.get(name).needs_error_feedback]


def quantise(values):
    """minmax_uint8 in float64, element by element: 255 steps from min to max, moved so that 0 is at one of them."""
    result = []
    for begin in range(0, len(values), BLOCK):
        block = values[begin : begin + BLOCK]
        low, high = min(block), max(block)
        step = (high - low) / 255
        first = -step * round(-low / step) if low < 0 < high else low
        for value in block:
            code = min(255, max(0, round((value - first) / step))) if step else 0
            result.append(min(high, max(low, first + step * code)))
    return result


def _two_shot(rank, world_size, rows, codec):
    with process_group():
        model = torch.nn.Linear(BLOCK, rows, bias=False)
        model = bagua.with_bagua(model, algorithm="bytegrad", codec=codec, min_compressed_bytes=0)
        generator = torch.Generator().manual_seed(3)
        per_rank = [torch.randn(rows, BLOCK, generator=generator) * 10.0**-r for r in range(world_size)]
        (model.weight * per_rank[rank]).sum().backward()
        actual = model.weight.grad
        mean = sum(grad.double() for grad in per_rank) / world_size
        bound = sum(bagua.codecs.get(codec).error_bound(grad) for grad in per_rank) / world_size
        bound += (
            bagua.codecs.get(codec).error_bound(
                (mean.abs() + bound).float() if codec != "minmax_uint8" else mean.float()
            )
            + 1e-6
        )
        # The second quantisation sees a range that the first may have widened by its own error.
        assert bool(((actual.double() - mean).abs() <= 1.05 * bound).all())
        assert_equal_on_all_ranks({"grad": actual})
        if codec == "minmax_uint8":
            first = [torch.tensor(quantise(grad.flatten().tolist())) for grad in per_rank]
            summed = sum(first) / world_size
            expected = torch.tensor(quantise(summed.tolist())).reshape(rows, BLOCK)
            # Rounding differs from float64 where a value lies on the edge between two codes: one step, rarely.
            step = (summed.max() - summed.min()) / 255
            off = (actual - expected).abs()
            assert float(off.max()) <= 1.01 * float(step)
            assert float((off > 1e-5).double().mean()) < 0.01


@in_turns("codec, rows", WITHOUT_FEEDBACK, [3, 1, 8])
def test_equals_the_oracle(pool2, codec, rows):
    pool2.run(_two_shot, args=(rows, codec))


class Padded(torch.nn.Module):
    """Odd sizes, so that its bucket has padding."""

    def __init__(self):
        super().__init__()
        self.parts = torch.nn.ParameterList([torch.zeros(3, 7 + i) for i in range(5)])


def _padding(rank, world_size):
    with process_group():
        model = bagua.with_bagua(Padded(), algorithm="bytegrad", min_compressed_bytes=0)
        for step in range(4):
            model.zero_grad()
            scale = 1000.0 * 0.001**step  # ever smaller: leftovers in the padding would swamp them
            sum((p * (scale * (rank + 2))).sum() for p in model.parts).backward()
            for parameter in model.parts:
                torch.testing.assert_close(parameter.grad, torch.full_like(parameter, 2.5 * scale), rtol=0.02, atol=0)


def test_padding_does_not_widen_a_block(pool2):
    pool2.run(_padding)


def _declared(rank, world_size):
    with process_group():
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 2), torch.nn.Linear(2, 2).double())
        model.bias, model.flat = (torch.nn.Parameter(torch.zeros(numel)) for numel in (65_536, 65_537))
        model = bagua.with_bagua(model, algorithm="bytegrad", bucket_bytes=33_000)
        assert {str(bucket.declaration) for bucket in model.bagua.buckets} == {"not sent yet"}
        sum(parameter.sum() for parameter in model.parameters()).backward()
        return {name: str(bucket.declaration) for bucket in model.bagua.buckets for name in bucket.names}


def test_what_travels_at_full_precision_is_declared(pool2):
    declared = pool2.run(_declared)[0]
    assert declared["0.weight"] == "all_reduce, minmax_uint8"
    assert declared["1.weight"] == "all_reduce, full precision (1024 bytes, below 16384)"
    assert declared["0.bias"] == declared["1.bias"] == "all_reduce, full precision (1-D parameters)"
    assert declared["bias"] == declared["0.bias"]
    assert declared["flat"] == "all_reduce, minmax_uint8"
    assert "codec minmax_uint8 does not encode torch.float64" in declared["2.weight"]


def _bytes(rank, world_size, algorithm):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(1024, 1024), algorithm=algorithm)
        for _ in range(3):
            model(torch.ones(2, 1024)).sum().backward()
        return model.bagua.timeline().steps[-1].bytes_sent


def test_sends_about_a_quarter_of_the_bytes(pool2):
    full = pool2.run(_bytes, args=("gradient_allreduce",))[0]
    coded = pool2.run(_bytes, args=("bytegrad",))[0]
    assert full == pytest.approx(4 * (1024 * 1024 + 1024), rel=0.01)
    assert coded < 0.27 * full


def _hierarchical_on_one_node(rank, world_size, algorithm):
    """Nothing is encoded, so a NaN stays where it stood."""
    with process_group():
        model = torch.nn.Linear(BLOCK, 8, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if algorithm == "qadam":
            optimizer = bagua.optim.QAdam(model.parameters(), lr=0.1, warmup_steps=1, eps=1.0)
        model = bagua.with_bagua(model, [optimizer], algorithm=algorithm, hierarchical=True)
        (model.weight * (1.0 + rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        per_rank = [torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(9 + r)) for r in range(world_size)]
        per_rank[0][0, 0] = per_rank[1][3, 5] = float("nan")
        (model.weight * per_rank[rank]).sum().backward()
        (bucket,) = model.bagua.buckets
        assert bucket.declaration.codec is None and "one node" in str(bucket.declaration), str(bucket.declaration)
        assert torch.equal(model.weight.grad.isnan(), sum(per_rank).isnan())
        assert torch.allclose(model.weight.grad, sum(per_rank) / world_size, equal_nan=True)


@fast_in("algorithm", ["qadam"], ["bytegrad", "qsgd", "qadam"])
def test_hierarchical_on_one_node(pool2, algorithm):
    pool2.run(_hierarchical_on_one_node, args=(algorithm,))


def _nan_on_one_rank(rank, world_size, codec, bad_rank):
    """It reaches all ranks of all nodes, those that lead their node and the others, whichever had it."""
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(BLOCK, 8), algorithm="bytegrad", codec=codec, hierarchical=True)
        for offset, value in ((0, float("nan")), (3 * BLOCK + 1000, float("nan")), (8 * BLOCK - 1, float("inf"))):
            model.zero_grad()
            factor = torch.ones(8, BLOCK)
            if rank == bad_rank:
                factor.view(-1)[offset] = value
            ((model.weight * factor).sum() + model.bias.sum()).backward()
            assert not model.weight.grad.view(-1)[offset].isfinite(), offset
            assert torch.equal(model.bias.grad, torch.ones(8))
            assert_equal_on_all_ranks({"grad": model.weight.grad})


@fast_in(
    "codec, bad_rank",
    [("minmax_uint8", 1)],
    list(itertools.product(["minmax_uint8", "bf16", "qsgd:bits=4"], [0, 1, 3])),
)
def test_a_nan_under_hierarchical_reaches_all_ranks(pool_of_two_nodes, codec, bad_rank):
    pool_of_two_nodes.run(_nan_on_one_rank, args=(codec, bad_rank), env={"BAGUA_SOCKET_IFNAME": "lo"})
