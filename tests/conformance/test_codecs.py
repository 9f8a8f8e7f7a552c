"""Every registered codec keeps the bound that it declares, and the one that its definition gives it."""

from __future__ import annotations

import math

import pytest
import torch

import bagua
from bagua import _C
from bagua.distributed.process_group import dtype_code
from bagua.errors import InvalidArgument
from tests.codec_specs import ROUNDINGS, SPECS
from tests.distributed.worlds import in_turns

CODECS = [bagua.codecs.get(spec) for spec in SPECS]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BLOCK = 2048
SIZES = (0, 1, 3, 31, 32, 33, 1023, 1024, 1025, 2047, 2048, 2049, 10_000)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.spec)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def in_pairs(first):
    """Each codec with one of the types, which take turns, the first one at ``first``; all with all are slow."""
    return in_turns("codec, dtype", CODECS, DTYPES[first:] + DTYPES[:first])


def _samples(dtype):
    generator = torch.Generator().manual_seed(1)
    largest = torch.finfo(dtype).max
    for numel in SIZES:
        normal = torch.randn(numel, generator=generator)
        yield normal.to(dtype)
        yield (normal * 1e-6).to(dtype)
        yield (normal * 2.5e-6).to(dtype)  # a few units in the last place of float16
        yield (normal * 1e-42).to(dtype)  # and of float32
        yield (normal + 1000).to(dtype)
        yield (normal.clamp(-1, 1).double() * largest * 0.49).to(dtype)


def _passed_through(codec, x, key=0):
    return codec.decode(codec.encode(x, key=key), x.numel(), x.dtype)


@in_pairs(0)
def test_error_is_within_the_bound(codec, dtype):
    for x in _samples(dtype):
        decoded, bound = _passed_through(codec, x), codec.error_bound(x)
        bounded = bound.isfinite()  # a cast may overflow
        assert bool(bounded.all()) or codec.block_numel == 1
        assert torch.equal(decoded.isfinite(), bounded)
        excess = ((decoded.double() - x.double()).abs() - bound)[bounded]
        assert excess.numel() == 0 or float(excess.max()) <= 0, f"{x.numel()} elements up to {float(x.abs().max())}"


@every_dtype
@pytest.mark.parametrize("spec, wire", [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_casts_overflow_as_torchs_do(spec, wire, dtype):
    codec, largest = bagua.codecs.get(spec), torch.finfo(dtype).max
    x = torch.tensor([1e38, -1e38, 65504, 65519, 65520, -65536, largest, -largest, 1, math.inf, math.nan]).to(dtype)
    assert torch.equal(_passed_through(codec, x).nan_to_num(7), x.to(wire).to(dtype).nan_to_num(7))
    assert torch.equal(_passed_through(codec, x).isinf(), x.to(wire).to(dtype).isinf())


WIRE_BYTES = {  # of one block of n elements
    "fp16": lambda n: 2 * n,
    "bf16": lambda n: 2 * n,
    "fp4_e2m1": lambda n: 4 + math.ceil(n / 2),
    "fp4_e3m0": lambda n: 4 + math.ceil(n / 2),
    "fp8_e4m3": lambda n: 4 + n,
    "fp8_e5m2": lambda n: 4 + n,
    "minmax_uint8": lambda n: 8 + n,
    "qsgd": lambda n: 4 + n + n % 2,
    "qsgd:bits=4": lambda n: 4 + math.ceil(n / 2),
    "qsgd:bits=2": lambda n: 4 + math.ceil(n / 4),
    "onebit": lambda n: 4 + math.ceil(n / 8),
    "centroid": lambda n: 8 + math.ceil(n / 4),
    "topk": lambda n: 6 * min(32, n),
    "topk:k=8": lambda n: 6 * min(8, n),
    "topk:k=256": lambda n: 6 * min(256, n),
    "topk:chunk=4096": lambda n: math.ceil(44 * min(32, n) / 8),
    "topk:chunk=4096,dct=1": lambda n: math.ceil(44 * min(32, n) / 8),
    "topk:chunk=4096,k=64,bits=2": lambda n: 4 + math.ceil(min(64, n) / 4) + math.ceil(12 * min(64, n) / 8),
}


@every_codec
def test_wire_bytes(codec):
    for dtype in DTYPES:
        for numel in (*SIZES, 3 * BLOCK, 10**6):
            block = max(BLOCK, codec.block_numel)  # of a cast, which has none, any
            blocks = [block] * (numel // block) + ([numel % block] if numel % block else [])
            assert codec.wire_bytes(numel, dtype) == sum(map(WIRE_BYTES[codec.spec], blocks))
            if numel <= 10_000:
                assert codec.encode(torch.ones(numel, dtype=dtype)).numel() == codec.wire_bytes(numel, dtype)


@in_pairs(1)
def test_constants_and_zeros_are_exact(codec, dtype):
    for value in (0.0, -1.5, 0.09375):
        x = torch.full((5000,), value, dtype=dtype)
        assert torch.equal(_passed_through(codec, x), x) == (codec.keeps_constants or value == 0)


@in_turns("spec, dtype", ROUNDINGS, DTYPES)
def test_zeros_among_other_values_are_exact(spec, dtype):
    """Wherever min <= 0 <= max, so that what never had a gradient never moves."""
    codec = bagua.codecs.get(spec)
    for shift in (-3.0, 0.0, 0.7, 3.0):  # the values around the zeros lean to one side
        for x in _samples(dtype):
            x = ((x.double() + shift * x.double().abs()) / (1 + abs(shift))).to(dtype)
            x[::3] = 0
            for block, decoded in zip(x.split(BLOCK), _passed_through(codec, x).split(BLOCK), strict=True):
                assert bool((decoded[block == 0] == 0).all())


@in_turns("codec, value", CODECS, [math.nan, math.inf, -math.inf])
def test_nan_and_inf_mark_their_block_and_are_counted(codec, value):
    n = codec.block_numel
    clean = torch.randn(3 * n, generator=torch.Generator().manual_seed(4))
    expected = _passed_through(codec, clean)
    for dtype in DTYPES:
        for at in (n, 2 * n - 1):
            x = clean.clone().to(dtype)
            x[at] = value
            encoded = torch.empty(codec.wire_bytes(3 * n, dtype), dtype=torch.uint8)
            source, destination = x.data_ptr(), encoded.data_ptr()
            assert _C.codec_encode(codec.spec, source, dtype_code(dtype), 3 * n, destination, 0) == 1
            assert torch.equal(encoded, codec.encode(x, key=0))
            decoded = codec.decode(encoded, 3 * n, dtype)
            lost = torch.isinf if n == 1 and math.isinf(value) else torch.isnan  # a cast keeps Inf
            assert bool(lost(decoded[n : 2 * n]).all())
            if dtype == torch.float32:
                assert torch.equal(decoded[:n], expected[:n]) and torch.equal(decoded[2 * n :], expected[2 * n :])
            assert bool(decoded[:n].isfinite().all()) and bool(decoded[2 * n :].isfinite().all())
            total = torch.zeros(3 * n)
            codec.decode_add(encoded, total, dtype)
            assert bool(lost(total[n : 2 * n]).all())
            assert bool(total[:n].isfinite().all()) and bool(total[2 * n :].isfinite().all())


@in_pairs(2)
def test_decode_add_adds_in_float32(codec, dtype):
    for x in _samples(dtype):
        encoded = codec.encode(x)
        total = torch.linspace(-1, 1, x.numel())
        expected = total.double() + x.double()
        codec.decode_add(encoded, total, dtype)
        # Beside the codec's own error half an ulp of the sum.
        bound = codec.error_bound(x)
        bound = bound + (expected.abs() + bound) * 2.0**-24 + 2.0**-149
        assert bool(((total.double() - expected).abs() <= bound).all())


@in_pairs(1)
def test_reduce_encode_is_encode_of_the_sum(codec, dtype):
    """Added by decode_add in the order of the messages; the mean is the sum times 1 / count."""
    for numel in (0, 1, 100, codec.block_numel + 3):
        generator = torch.Generator().manual_seed(numel)
        for count in (1, 3):
            rows = [codec.encode(torch.randn(numel, generator=generator).to(dtype), key=r) for r in range(count)]
            total = torch.zeros(numel)
            for row in rows:
                codec.decode_add(row, total, dtype)
            for average in (False, True):
                expected = codec.encode(total / count if average else total, key=9)
                found = codec.reduce_encode(torch.stack(rows), numel, dtype, average=average, key=9)
                assert torch.equal(found, expected)


def test_what_cannot_be_encoded():
    codec = bagua.codecs.get("minmax_uint8")
    with pytest.raises(InvalidArgument, match=r"does not encode torch.float64; it encodes torch.float32"):
        codec.encode(torch.ones(3, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match="contiguous"):
        codec.encode(torch.ones(4, 4).t())
    with pytest.raises(InvalidArgument, match=r"elements of torch.float32 is a contiguous tensor of"):
        codec.decode(torch.zeros(3, dtype=torch.uint8), 100, torch.float32)
    with pytest.raises(InvalidArgument, match=r"elements of torch.float32 is a contiguous tensor of"):
        codec.decode_add(torch.zeros(3, dtype=torch.uint8), torch.zeros(100))
    with pytest.raises(InvalidArgument, match=r"adds to a contiguous tensor of torch.float32, got torch.float16"):
        codec.decode_add(codec.encode(torch.ones(4)), torch.zeros(4, dtype=torch.float16))
    message = codec.encode(torch.ones(4))
    for wrong in (message, torch.zeros(0, message.numel(), dtype=torch.uint8)):
        with pytest.raises(InvalidArgument, match=r"messages have the shape .*, expected \(how many"):
            codec.reduce_encode(wrong, 4)
    with pytest.raises(InvalidArgument, match=r"elements of torch.float32 is a contiguous tensor of"):
        codec.reduce_encode(torch.zeros(2, 3, dtype=torch.uint8), 100)
    with pytest.raises(InvalidArgument, match="messages have strides"):
        codec.reduce_encode(message.expand(2, message.numel()), 4)


@every_codec
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


@in_pairs(2)
def test_messages_can_be_cut_between_blocks(codec, dtype):
    """The code of a block depends on the block, and with a random codec on its place, not on the number that follow."""
    block = max(BLOCK, codec.block_numel)
    x = torch.randn(5 * block + 100, generator=torch.Generator().manual_seed(6)).to(dtype)
    encoded = codec.encode(x, key=9)
    decoded = codec.decode(encoded, x.numel(), dtype)
    for cut in range(block, x.numel(), block):
        cut_bytes = codec.wire_bytes(cut, dtype)
        assert torch.equal(codec.encode(x[:cut], key=9), encoded[:cut_bytes])
        assert torch.equal(codec.decode(encoded[cut_bytes:], x.numel() - cut, dtype), decoded[cut:])
        assert torch.equal(codec.encode(x[cut:], key=9), encoded[cut_bytes:]) != codec.is_random


@pytest.mark.parametrize(
    ("spec", "wire", "largest"), [("fp8_e4m3", torch.float8_e4m3fn, 448), ("fp8_e5m2", torch.float8_e5m2, 57344)]
)
@every_dtype
def test_fp8_rounds_as_torchs_casts_do(spec, wire, largest, dtype):
    """The cast of a block that is scaled so that its norm is the largest number; and back."""
    codec = bagua.codecs.get(spec)
    for x in _samples(dtype):
        message, parts = codec.encode(x), []
        decoded = codec.decode(message, x.numel(), torch.float32)
        for block, got in zip(x.float().split(BLOCK), decoded.split(BLOCK), strict=True):
            if not block.numel():
                continue
            norm = block.abs().max()
            scale = 2.0**100 if norm < 2.0**-80 else 1.0
            scaled = norm.double() * scale
            units = (largest / scaled).float() if norm > 0 else 0.0
            codes = (block * scale * units).to(wire)
            parts += [norm.reshape(1).view(torch.uint8), codes.view(torch.uint8)]
            expected = codes.float() * (scaled / largest).float() / scale
            is_largest = codes.float().abs() == largest
            assert torch.equal(got, torch.where(is_largest, norm.copysign(block), expected))
        assert torch.equal(message, torch.cat([torch.empty(0, dtype=torch.uint8), *parts]))


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.is_random], ids=lambda codec: codec.spec)
def test_the_mean_of_many_comes_closer(codec):
    """Random rounding has no bias: the error of a mean of N falls as 1 / sqrt(N)."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(3))
    errors = {}
    for count in (64, 1024):
        decoded = [_passed_through(codec, x, key).double() for key in range(count)]
        errors[count] = float((sum(decoded) / count - x.double()).norm())
    assert errors[1024] == pytest.approx(errors[64] / 4, rel=0.15)


@pytest.mark.parametrize(("spec", "num_levels"), [("qsgd", 127), ("qsgd:bits=4", 7), ("qsgd:bits=2", 1)])
def test_qsgd_is_off_by_less_than_a_step(spec, num_levels):
    """A step is the block's norm over the levels, and what is decoded one of the two levels around the value."""
    x = torch.randn(3 * BLOCK + 50, generator=torch.Generator().manual_seed(8))
    for key in range(20):
        decoded = _passed_through(bagua.codecs.get(spec), x, key)
        for block, got in zip(x.double().split(BLOCK), decoded.double().split(BLOCK), strict=True):
            step = float(block.abs().max()) / num_levels
            position, level = block / step, got / step
            assert bool(((level - level.round()).abs() < 1e-4).all())
            assert bool(((level.round() >= position.floor() - 1e-4) & (level.round() <= position.ceil() + 1e-4)).all())
            assert level.round().unique().numel() > num_levels or block.numel() < BLOCK


def _lost_and_sent(codec, x):
    """Yields for each block the squares of the errors, of the elements, and its elements, in float64 loops."""
    decoded = _passed_through(codec, x)
    for begin in range(0, x.numel(), codec.block_numel):
        block = x[begin : begin + codec.block_numel].double().tolist()
        got = decoded[begin : begin + codec.block_numel].double().tolist()
        lost = math.fsum((a - b) ** 2 for a, b in zip(block, got, strict=True))
        yield lost, math.fsum(a * a for a in block), block


@every_dtype
def test_onebit_contracts(dtype):
    """|x - C(x)|^2 = |x|^2 - |x|_1^2 / d of a block of d elements, what no other scale of its signs does better."""
    generator = torch.Generator().manual_seed(10)
    for numel in (1, 100, 2 * BLOCK + 77):
        x = torch.randn(numel, generator=generator).to(dtype)
        for lost, squares, block in _lost_and_sent(bagua.codecs.get("onebit"), x):
            kept = math.fsum(map(abs, block)) ** 2 / len(block)
            # The scale is rounded to the type; away from the best scale the loss grows with the square.
            rounding = (kept * torch.finfo(dtype).eps ** 2) + 1e-7 * squares
            assert lost == pytest.approx(squares - kept, abs=rounding)
            assert lost <= (1 - 1 / len(block)) * squares + rounding


@in_turns("options, dtype", [{"k": 8}, {"k": 32}, {"k": 256}, {"k": 64, "chunk": 4096}], DTYPES)
def test_topk_contracts(options, dtype):
    """|x - C(x)|^2 are the squares of all but the k largest, at most (1 - k / d) |x|^2 of a block of d elements."""
    codec, k = bagua.codecs.get("topk", **options), options["k"]
    generator = torch.Generator().manual_seed(11)
    for numel in (1, 100, 2 * codec.block_numel + 77):
        for x in (torch.randn(numel, generator=generator).to(dtype), torch.ones(numel, dtype=dtype)):
            for lost, squares, block in _lost_and_sent(codec, x):
                largest_first = sorted(map(abs, block), reverse=True)
                assert lost == pytest.approx(math.fsum(a * a for a in largest_first[k:]), rel=1e-12)
                assert lost <= max(0, 1 - k / len(block)) * squares * (1 + 1e-12)


@every_codec
def test_contractions_say_so(codec):
    """Repeated with feedback nothing is lost; without, a contraction gives the same small part every time."""
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(12))
    lost = float((_passed_through(codec, x) - x).norm() / x.norm())
    assert codec.needs_error_feedback == (not codec.is_random and lost > 0.25)
    if not codec.needs_error_feedback:
        return
    residual, total = torch.zeros(BLOCK), torch.zeros(BLOCK)
    rounds = 600
    for _ in range(rounds):
        sent = _passed_through(codec, x + residual)
        residual = x + residual - sent
        total += sent
    assert float((total / rounds - x).norm() / x.norm()) < lost / 4


@every_codec
def test_its_spec_names_it(codec):
    assert bagua.codecs.get(codec.spec).spec == codec.spec
    group_codec = codec.with_seed(2**64 - 1)
    assert (group_codec.spec, group_codec.seed) == (codec.spec, 2**64 - 1)
    with pytest.raises(InvalidArgument, match=r"seed -1 is not an integer from 0 to 2\*\*64 - 1"):
        codec.with_seed(-1)
    with pytest.raises(InvalidArgument, match=f'codec "{codec.name}" has no option "depth"'):
        bagua.codecs.get(codec.name, depth=3)


@pytest.mark.parametrize(
    ("name", "option", "default", "others"),
    [("qsgd", "bits", 8, (4, 2)), ("topk", "k", 32, (8,)), ("topk", "chunk", 2048, (4096,))],
)
def test_options(name, option, default, others):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(13))
    encoded = bagua.codecs.get(name).encode(x, key=1)
    assert torch.equal(bagua.codecs.get(name, **{option: default}).encode(x, key=1), encoded)
    assert bagua.codecs.get(f"{name}:{option}={default}").spec == name
    for other in others:
        spec = f"{name}:{option}={other}"
        assert bagua.codecs.get(name, **{option: other}).spec == spec
        assert bagua.codecs.get(spec).encode(x, key=1).numel() < encoded.numel()


def test_bad_options():
    with pytest.raises(InvalidArgument, match='codec "qsgd": bits is 3, expected one of 8, 4, 2'):
        bagua.codecs.get("qsgd", bits=3)
    with pytest.raises(InvalidArgument, match='codec "topk": k is 33, expected one of 32, 8, 16, 64, 128, 256'):
        bagua.codecs.get("topk", k=33)
    for option in ("bits=2", "dct=1"):
        with pytest.raises(InvalidArgument, match=f'codec "topk": {option} needs chunk=4096; give that too'):
            bagua.codecs.get(f"topk:{option}")
    with pytest.raises(InvalidArgument, match="options are given as name:option=value"):
        bagua.codecs.get("qsgd:4")
    with pytest.raises(InvalidArgument, match="'qsgd:bits=4' has options in its name and bits=2 beside it"):
        bagua.codecs.get("qsgd:bits=4", bits=2)
    for option in ("bits=2", "bits=4"):
        with pytest.raises(InvalidArgument, match='codec "qsgd" has the option "bits" twice; give it once'):
            bagua.codecs.get(f"qsgd:bits=4,{option}")
        with pytest.raises(InvalidArgument, match=f'codec "qsgd": bits is 4:{option}, expected one of 8, 4, 2'):
            bagua.codecs.get(f"qsgd:bits=4:{option}")
    for name in (None, 4, ["qsgd"]):
        with pytest.raises(InvalidArgument, match=rf"codec .* is a {type(name).__name__}, expected one of bf16, "):
            bagua.codecs.get(name)
