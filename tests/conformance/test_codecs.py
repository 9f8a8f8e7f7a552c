"""Every registered codec keeps the bound that it declares."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument

CODECS = [bagua.codecs.get(name) for name in bagua.codecs.available()]
pytestmark = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def _samples(dtype):
    generator = torch.Generator().manual_seed(1)
    largest = torch.finfo(dtype).max
    for numel in (0, 1, 3, 31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049, 10_000):
        normal = torch.randn(numel, generator=generator)
        yield normal.to(dtype)
        yield (normal * 1e-6).to(dtype)
        yield (normal + 1000).to(dtype)
        yield (normal.clamp(-1, 1).double() * largest * 0.49).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_is_within_the_bound(codec, dtype):
    for x in _samples(dtype):
        encoded = codec.encode(x)
        assert encoded.numel() == codec.wire_bytes(x.numel(), dtype)
        decoded = codec.decode(encoded, x.numel(), dtype)
        assert bool(decoded.isfinite().all())
        excess = (decoded.double() - x.double()).abs() - codec.error_bound(x)
        assert x.numel() == 0 or float(excess.max()) <= 0, f"{x.numel()} elements up to {float(x.abs().max())}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_constants_and_zeros_are_exact(codec, dtype):
    for value in (0.0, -1.5, 0.09375):
        x = torch.full((5000,), value, dtype=dtype)
        assert torch.equal(codec.decode(codec.encode(x), 5000, dtype), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_make_their_block_nan(codec, value):
    x = torch.ones(3 * codec.block_numel)
    x[codec.block_numel] = value
    decoded = codec.decode(codec.encode(x), x.numel(), x.dtype)
    assert bool(decoded[codec.block_numel : 2 * codec.block_numel].isnan().all())
    assert bool((decoded[: codec.block_numel] == 1).all())
    assert bool((decoded[2 * codec.block_numel :] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_decode_add_adds_in_float32(codec, dtype):
    for x in _samples(dtype):
        encoded = codec.encode(x)
        total = torch.linspace(-1, 1, x.numel())
        expected = total.double() + x.double()
        codec.decode_add(encoded, total, dtype)
        # Beside the codec's own error half an ulp of the sum.
        bound = codec.error_bound(x) + expected.abs() * 2.0**-23 + 2.0**-149
        assert bool(((total.double() - expected).abs() <= bound).all())


def test_what_cannot_be_encoded(codec):
    with pytest.raises(InvalidArgument, match=r"does not encode torch.float64; it encodes torch.float32"):
        codec.encode(torch.ones(3, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match="contiguous"):
        codec.encode(torch.ones(4, 4).t())
    with pytest.raises(InvalidArgument, match=r"elements of torch.float32 is a contiguous CPU tensor of"):
        codec.decode(torch.zeros(3, dtype=torch.uint8), 100, torch.float32)
    with pytest.raises(InvalidArgument, match=r"elements of torch.float32 is a contiguous CPU tensor of"):
        codec.decode_add(torch.zeros(3, dtype=torch.uint8), torch.zeros(100))
    with pytest.raises(InvalidArgument, match=r"adds to a contiguous CPU tensor of torch.float32, got torch.float16"):
        codec.decode_add(codec.encode(torch.ones(4)), torch.zeros(4, dtype=torch.float16))
