"""Every registered codec keeps the bound that it declares."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument

CODECS = [*map(bagua.codecs.get, bagua.codecs.available()), *(bagua.codecs.get("qsgd", bits=bits) for bits in (4, 2))]
pytestmark = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)


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


def test_a_replay_gives_the_same_bytes(codec):
    """With the same key, or after the same manual_seed; with other ones only where nothing is left to chance."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    assert torch.equal(codec.encode(x, key=7), codec.encode(x, key=7))
    assert torch.equal(codec.encode(x, key=7), codec.encode(x, key=8)) != codec.is_random
    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        runs.append([codec.encode(x), codec.encode(x)])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))
    assert torch.equal(*runs[0]) != codec.is_random
    with pytest.raises(InvalidArgument, match="key is -1, expected 0 to"):
        codec.encode(x, key=-1)


def test_the_mean_of_many_comes_closer(codec):
    """Random rounding has no bias: the error of a mean of N falls as 1 / sqrt(N); what is not random stays as it is."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    errors = {}
    for count in (64, 1024):
        decoded = [codec.decode(codec.encode(x, key=key), 3000, x.dtype).double() for key in range(count)]
        errors[count] = float((sum(decoded) / count - x.double()).norm())
    assert errors[1024] == pytest.approx(errors[64] / (4 if codec.is_random else 1), rel=0.15)


def test_its_spec_names_it(codec):
    assert bagua.codecs.get(codec.spec).spec == codec.spec
    x = torch.ones(5)
    group_codec = codec.with_seed(2**64 - 1)
    assert (group_codec.spec, group_codec.seed) == (codec.spec, 2**64 - 1)
    with pytest.raises(InvalidArgument, match=r"seed -1 is not an integer from 0 to 2\*\*64 - 1"):
        codec.with_seed(-1)
    with pytest.raises(InvalidArgument, match=f'codec "{codec.name}" has no option "depth"'):
        bagua.codecs.get(codec.name, depth=3)
    assert torch.equal(bagua.codecs.get(codec.spec).encode(x, key=1), codec.encode(x, key=1))


def test_bad_options_of_qsgd(codec):
    if codec.spec == "qsgd":
        with pytest.raises(InvalidArgument, match='codec "qsgd": bits is 3, expected one of 8, 4, 2'):
            bagua.codecs.get("qsgd", bits=3)
        with pytest.raises(InvalidArgument, match="options are given as name:option=value"):
            bagua.codecs.get("qsgd:4")
