"""What collectives must give, in plain loops over ranks. Every rank and element has a value of its own."""

from __future__ import annotations

import functools

import torch

import bagua
from bagua import _C, ReduceOp

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)

_ARITHMETIC = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


def ops_of(dtype: torch.dtype) -> tuple[ReduceOp, ...]:
    """The operators that have a meaning for a type."""
    if dtype.is_floating_point:
        return (*_ARITHMETIC, ReduceOp.AVG)
    if dtype is torch.bool:
        return (ReduceOp.MIN, ReduceOp.MAX, *_BITWISE)
    return (*_ARITHMETIC, *_BITWISE)


@functools.lru_cache(maxsize=64)
def values(rank: int, world_size: int, numel: int, dtype: torch.dtype, small: bool = False) -> torch.Tensor:
    """x[rank][i] = i * world_size + rank, made small enough for narrow types. Not to be changed (cached).

    `small` keeps the product over ranks exact in f32; whole numbers of a narrow type wrap around, as they should.
    """
    x = torch.arange(numel, dtype=torch.int64) * world_size + rank
    if dtype is torch.bool:
        return x % 3 == 0
    if dtype.is_floating_point:
        if small:
            x = x % 7 + 1
        # The sum of four is a whole number that the type can hold.
        return (x % {torch.float16: 61, torch.bfloat16: 61, torch.float32: 4194301}.get(dtype, 1 << 50)).to(dtype)
    return (x * 2654435761).to(dtype)


def reduced(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """The reduction over ranks, exact or in f64, rounded once to the type of the inputs."""
    dtype = inputs[0].dtype
    if dtype is torch.bool:
        return _fold([x.to(torch.int64) for x in inputs], op).to(torch.bool)
    if not dtype.is_floating_point:
        return _fold([x.to(torch.int64) for x in inputs], op).to(dtype)
    total = _fold([x.to(torch.float64) for x in inputs], op)
    if op is ReduceOp.AVG:
        total /= len(inputs)
    return total.to(dtype)


def _fold(inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = inputs[0].clone()
    for x in inputs[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total += x
        elif op is ReduceOp.PRODUCT:
            total *= x
        elif op is ReduceOp.MIN:
            total = torch.minimum(total, x)
        elif op is ReduceOp.MAX:
            total = torch.maximum(total, x)
        elif op is ReduceOp.BAND:
            total &= x
        elif op is ReduceOp.BOR:
            total |= x
        else:
            total ^= x
    return total


def assert_reduced(actual: torch.Tensor, inputs: list[torch.Tensor], op: ReduceOp, what: str) -> None:
    """Exact; AVG, which divides, within one unit in the last place."""
    expected = reduced(inputs, op)
    if op is not ReduceOp.AVG:
        assert_same(actual, expected, what)
        return
    bound = torch.finfo(expected.dtype).eps * expected.double().abs()
    wrong = (actual.double() - expected.double()).abs() > bound
    assert not wrong.any(), _difference(actual, expected, wrong, what)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, f"{what}: {actual.shape} {actual.dtype}"
    if not torch.equal(actual, expected):
        raise AssertionError(_difference(actual, expected, actual != expected, what))


def _difference(actual: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, what: str) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {at}: {actual[at]}, expected {expected[at]}"


def neighbor_weights(topology, n, i, s):
    """Row i of neighbor_average's matrix among n ranks at step s, from the definitions."""
    row = [0.0] * n
    if topology == "all":
        return [1.0 / n] * n
    if topology == "ring":
        for j in {(i - 1) % n, i, (i + 1) % n}:
            row[j] = 1.0 / len({(i - 1) % n, i, (i + 1) % n})
    elif topology == "shift_one":
        if n % 2 == 0:
            partner = (s + i) % (n // 2) + n // 2 if i < n // 2 else (i - n // 2 - s) % (n // 2)
        else:
            partner = (s - i) % n  # a round-robin tournament: who would meet itself rests
        row[i] += 0.5
        row[partner] += 0.5
    elif topology == "matching":
        order, state = list(range(n)), s
        for last in range(n - 1, 0, -1):  # Fisher and Yates, with the numbers of splitmix64
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
            drawn = (mixed ^ (mixed >> 31)) % (last + 1)
            order[last], order[drawn] = order[drawn], order[last]
        position = order.index(i)
        row[i] += 0.5
        row[order[position ^ 1] if position ^ 1 < n else i] += 0.5
    else:
        num_distances = (n - 1).bit_length()
        row[i] += 0.5
        row[(i - 2 ** (s % num_distances)) % n if num_distances else i] += 0.5
    return row


def compressed_sum(codec: str, inputs: list[torch.Tensor], op: ReduceOp, seed: int = 0) -> torch.Tensor:
    """What all_reduce with a codec must give, to the bit: Q(sum over ranks of Q(x)), a whole tensor at a time.

    The sum is that of the decoded values in float32, in the order of the ranks. Each rank encodes its stripe of it: of
    the whole blocks, the first ranks have one more.
    """
    coder, n, numel, dtype = bagua.codecs.get(codec), len(inputs), inputs[0].numel(), inputs[0].dtype
    total = decoded_sum(codec, inputs, op, [_C.derive_key(_C.derive_key(seed, sender), 0) for sender in range(n)])
    result = torch.empty(numel)
    num_blocks, begin = -(-numel // coder.block_numel), 0
    for owner in range(n):
        key = _C.derive_key(_C.derive_key(seed, owner), 1)
        end = min(begin + (num_blocks // n + (owner < num_blocks % n)) * coder.block_numel, numel)
        result[begin:end] = coder.decode(coder.encode(total, key=key), numel, torch.float32)[begin:end]
        begin = end
    assert begin == numel
    return result.to(dtype)


def decoded_sum(codec: str, inputs: list[torch.Tensor], op: ReduceOp, keys: list[int]) -> torch.Tensor:
    """The float32 sum or average of what the codec makes of each input, in their order."""
    coder, total = bagua.codecs.get(codec), torch.zeros(inputs[0].numel())
    for x, key in zip(inputs, keys, strict=True):
        coder.decode_add(coder.encode(x.contiguous(), key=key), total, x.dtype)
    return (total.double() * (1.0 / len(inputs))).float() if op is ReduceOp.AVG else total
