"""qsgd: the mean over many steps and ranks is that of the gradients, and the same seed gives the same bits."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in


def _average_error(rank, world_size, bits, seed, num_steps=256):
    """The error of the mean of N results for the same gradients, for N = 1, 16, 256, relative to their size."""
    with process_group():
        model = torch.nn.Linear(512, 16, bias=False)
        bagua.with_bagua(model, algorithm="qsgd", bits=bits, seed=seed)
        per_rank = [torch.randn(16, 512, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
        mean = sum(grad.double() for grad in per_rank) / world_size
        total = torch.zeros(16, 512, dtype=torch.float64)
        errors = []
        for count in range(1, num_steps + 1):
            model.zero_grad()
            (model.weight * per_rank[rank]).sum().backward()
            total += model.weight.grad.double()
            if count in (1, 16, 256):
                errors.append(float((total / count - mean).norm() / mean.norm()))
        assert_equal_on_all_ranks({"grad": model.weight.grad})
        return errors, model.weight.grad


@fast_in("bits", [2], [8, 4, 2])
def test_is_unbiased_end_to_end(pool2, bits):
    (errors, _), *_ = pool2.run(_average_error, args=(bits, 0))
    for first, last in [(0, 1), (1, 2)]:  # a sixteenth of the variance: a quarter of the error, give or take
        assert 3.2 < errors[first] / errors[last] < 5.0, errors


def test_the_seed_decides(pool2):
    first, again, other = (pool2.run(_average_error, args=(4, seed, 2))[0][1] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def _bytes(rank, world_size, bits):
    with process_group():
        model = bagua.with_bagua(torch.nn.Linear(1024, 1024, bias=False), algorithm="qsgd", bits=bits)
        for _ in range(3):
            model(torch.ones(2, 1024)).sum().backward()
        assert str(model.bagua.buckets[0].declaration) == f"all_reduce, qsgd:bits={bits}"
        return model.bagua.timeline().steps[-1].bytes_sent


@fast_in("bits", [4], [8, 4, 2])
def test_sends_so_many_bits(pool2, bits):
    for sent in pool2.run(_bytes, args=(bits,)):
        assert sent == pytest.approx(1024 * 1024 * bits / 8, rel=0.02)


def test_options():
    with pytest.raises(InvalidArgument, match="bits is 3, expected 8, 4 or 2"):
        bagua.algorithms.create("qsgd", {"bits": 3})
    with pytest.raises(InvalidArgument, match="with error_feedback=True diverges"):
        bagua.algorithms.create("qsgd", {"bits": 2, "error_feedback": True})
    with pytest.raises(InvalidArgument, match="seed is -1, expected 0 to"):
        bagua.algorithms.create("qsgd", {"seed": -1})
    with pytest.raises(InvalidArgument, match="state_dtype is 'float16', expected 'float32' or 'bfloat16'"):
        bagua.algorithms.create("qsgd", {"state_dtype": "float16"})
    with pytest.raises(InvalidArgument, match="without error_feedback=True there is no state"):
        bagua.algorithms.create("qsgd", {"state_dtype": "bfloat16"})
    for algorithm in ("bytegrad", "low_precision_decentralized"):
        with pytest.raises(InvalidArgument, match="codec 'minmax_uint8' draws nothing at random"):
            bagua.algorithms.create(algorithm, {"seed": 3})
