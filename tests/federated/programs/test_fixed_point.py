"""Fixed point modulo 2^bits against Python's integers, which are exact."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from bagua.errors import InvalidArgument
from bagua.federated.programs.fixed_point import FixedPoint


@pytest.mark.parametrize("bits, fraction_bits", [(62, 32), (8, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_is_that_of_the_numbers(bits, fraction_bits, dtype):
    coding, num_terms, chance = FixedPoint(bits, fraction_bits), 3, random.Random(1)
    largest = coding.largest(num_terms)
    rows = [[largest * chance.uniform(-0.999, 0.999) for _ in range(20)] for _ in range(num_terms)]
    terms = torch.tensor(rows, dtype=dtype)
    codes = coding.encode({"x": terms}, num_terms)["x"]
    step = Fraction(1, 2**fraction_bits)
    for i in range(num_terms):
        for j in range(20):
            assert int(codes[i, j]) == round(Fraction(float(terms[i, j])) / step) % 2**bits
    found = coding.decode(codes.sum(0), torch.zeros(20, dtype=dtype))
    masks = [chance.randrange(2**bits) for _ in range(20)]
    masked = coding.wrap(codes[0] + torch.tensor(masks))
    others = coding.wrap(codes[1] + codes[2] - torch.tensor(masks))
    assert torch.equal(coding.decode(masked + others, found), found)
    for j in range(20):
        exact = sum(Fraction(float(terms[i, j])) for i in range(num_terms))
        rounding = Fraction(torch.finfo(dtype).eps) / 2 * abs(exact)
        error = abs(Fraction(float(found[j])) - exact)
        assert error <= Fraction(coding.tolerance(num_terms)) * (1 + Fraction(1, 2**20)) + rounding


def test_the_ends_of_the_range():
    coding = FixedPoint(bits=8, fraction_bits=2)
    assert coding.largest(1) == 127 / 4 and coding.largest(3) == 42 / 4 and coding.tolerance(3) == 3 / 8
    ends = torch.tensor([10.5, -10.5, 10.62])  # the last is rounded down to the end
    assert coding.encode(ends, 3).tolist() == [42, 256 - 42, 42]
    assert coding.decode(coding.encode(ends, 3) * 3, ends).tolist() == [31.5, -31.5, 31.5]
    for bad in (10.75, -10.75, float("nan"), float("inf"), 1e300):
        with pytest.raises(InvalidArgument, match=r"at \['w'\] is out of the range .*, 10.5 for a sum of 3"):
            coding.encode({"w": torch.tensor([0.0, bad], dtype=torch.float64)}, 3)
    full = FixedPoint(bits=62, fraction_bits=0)
    with pytest.raises(InvalidArgument, match="out of the range"):  # as float64, 2^61 - 1 would be 2^61
        full.encode(torch.tensor(2.0**61, dtype=torch.float64), 1)
    assert full.encode(torch.zeros(0), 1).shape == (0,)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: FixedPoint(bits=63), "bits=63, expected an integer from 2 to 62"),
        (lambda: FixedPoint(bits=16, fraction_bits=15), "fraction_bits=15, expected an integer from 0 to 14"),
        (lambda: FixedPoint().encode([torch.ones(1, dtype=torch.int64)], 1), r"torch.int64 at \[0\] in fixed point"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


@pytest.mark.parametrize("bits", [2, 7, 8, 33, 62])
@pytest.mark.parametrize("numel", [0, 1, 13, (1 << 16) + 5])
def test_packed_codes_take_their_bits(bits, numel):
    coding = FixedPoint(bits, 0)
    draw = random.Random(bits)
    codes = [draw.randrange(1 << bits) for _ in range(numel)]
    packed = coding.pack(torch.tensor(codes, dtype=torch.int64))
    assert packed.dtype == torch.uint8 and len(packed) == coding.packed_bytes(numel) == -(-numel * bits // 8)
    assert coding.unpack(packed, numel).tolist() == codes
    number = sum(code << (place * bits) for place, code in enumerate(codes[:100]))  # the first one in the lowest bits
    assert int.from_bytes(bytes(packed.tolist()), "little") % (1 << (bits * len(codes[:100]))) == number
