"""Real numbers as integers modulo 2^bits, which add up exactly and in any order: what masked and modular sums are over.

A value v becomes round(v * 2^fraction_bits) modulo 2^bits, held in int64, from 0 to 2^bits - 1. int64 wraps modulo
2^64, which 2^bits divides, so sums may overflow before ``wrap``. A sum of numbers modulo 2^bits is the sum of the
numbers where that is in range, so the range of each is that of the sum divided by how many there are: what exceeds it
raises.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument

Tree = Any  # a pytree of tensors
_PACKED_AT_ONCE = 1 << 16  # codes, each of which takes 64 bytes meanwhile


def _check(name: str, number: Any, low: int, high: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
        raise InvalidArgument(f"{name}={number!r}, expected an integer from {low} to {high}")


@dataclasses.dataclass(frozen=True)
class FixedPoint:
    """A coding of real numbers as integers modulo 2^bits.

    A sum of n encoded values differs by at most ``tolerance(n)`` from the sum of the values, and by the rounding of the
    result to its dtype, half a unit in the last place.

    Args:
        bits: of the modulus, 2 to 62.
        fraction_bits: of them behind the point, 0 to bits - 2: the step is 2**-fraction_bits.

    Raises:
        InvalidArgument: another number of bits.

    Example:
        >>> import torch
        >>> coding = FixedPoint(bits=16, fraction_bits=8)
        >>> codes = coding.encode(torch.tensor([[0.5, -1.25], [2.0, 0.25]]), num_terms=2)
        >>> codes.tolist()
        [[128, 65216], [512, 64]]
        >>> coding.decode(coding.wrap(codes.sum(0)), torch.zeros(2))
        tensor([ 2.5000, -1.0000])
        >>> coding.largest(2), coding.tolerance(2)
        (63.99609375, 0.00390625)
    """

    bits: int = 62
    fraction_bits: int = 32

    def __post_init__(self) -> None:
        _check("bits", self.bits, 2, 62)
        _check("fraction_bits", self.fraction_bits, 0, self.bits - 2)

    @property
    def modulus(self) -> int:
        return 1 << self.bits

    def largest(self, num_terms: int) -> float:
        """The largest magnitude of a value of which `num_terms` are added up."""
        return math.ldexp(self.largest_code(num_terms), -self.fraction_bits)

    def tolerance(self, num_terms: int) -> float:
        """The largest error of a sum of so many values: half a step each."""
        return math.ldexp(num_terms, -self.fraction_bits - 1)

    def encode(self, value: Tree, num_terms: int) -> Tree:
        """The values' codes, int64 from 0 to 2**bits - 1, of the same shapes.

        Args:
            value: floating tensors, not under any transform of torch.func.
            num_terms: how many such values are added up at most.

        Raises:
            InvalidArgument: a tensor is not floating, or has a value that is not finite or beyond ``largest``.
        """
        largest = self.largest_code(num_terms)

        def encode(path: tuple, tensor: torch.Tensor) -> torch.Tensor:
            where = f" at {pytree.keystr(path)}" if path else ""
            if not tensor.is_floating_point():
                raise InvalidArgument(f"{tensor.dtype}{where} in fixed point: expected floating values")
            scaled = tensor.detach().to(torch.float64).mul(2.0**self.fraction_bits).round_()
            found = float(scaled.abs().max()) if scaled.numel() else 0.0
            if not found <= largest:
                raise InvalidArgument(
                    f"a value of magnitude {math.ldexp(found, -self.fraction_bits):.6g}{where} is out of the range of "
                    f"fixed point, {self.largest(num_terms):.6g} for a sum of {num_terms} terms modulo 2^{self.bits} "
                    f"with {self.fraction_bits} bits behind the point: clip the values, or give more bits or fewer "
                    "behind the point"
                )
            return self.wrap(scaled.to(torch.int64))

        return pytree.tree_map_with_path(encode, value)

    def wrap(self, codes: torch.Tensor) -> torch.Tensor:
        """Modulo 2**bits: int64 from 0 to 2**bits - 1."""
        return codes & (self.modulus - 1)

    def packed_bytes(self, numel: int) -> int:
        """Returns the bytes that so many codes take."""
        return (numel * self.bits + 7) // 8

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Returns int64 codes ``[n]``, from 0 to 2**bits - 1, as uint8 ``[packed_bytes(n)]``: `bits` of each."""
        packed = numpy.empty(self.packed_bytes(codes.numel()), dtype=numpy.uint8)
        for begin in range(0, codes.numel(), _PACKED_AT_ONCE):
            part = codes[begin : begin + _PACKED_AT_ONCE].contiguous().numpy().astype("<i8").view(numpy.uint8)
            bits = numpy.unpackbits(part.reshape(-1, 8), axis=1, bitorder="little")[:, : self.bits]
            at = begin * self.bits // 8  # whole bytes, as parts have a multiple of 8 codes
            of_part = numpy.packbits(bits.reshape(-1), bitorder="little")
            packed[at : at + len(of_part)] = of_part
        return torch.from_numpy(packed)

    def unpack(self, packed: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns the int64 codes ``[numel]`` of what ``pack`` returned."""
        codes = numpy.empty(numel, dtype="<i8")
        data = packed.numpy()
        for begin in range(0, numel, _PACKED_AT_ONCE):
            num = min(_PACKED_AT_ONCE, numel - begin)
            at = begin * self.bits // 8
            bits = numpy.unpackbits(data[at : at + self.packed_bytes(num)], bitorder="little")[: num * self.bits]
            wide = numpy.zeros((num, 64), dtype=numpy.uint8)
            wide[:, : self.bits] = bits.reshape(num, self.bits)
            codes[begin : begin + num] = numpy.packbits(wide, axis=1, bitorder="little").view("<i8").reshape(-1)
        return torch.from_numpy(codes.astype(numpy.int64))

    def decode(self, codes: Tree, like: Tree) -> Tree:
        """The values that the codes stand for, from -2**(bits - 1) to 2**(bits - 1) - 1 steps.

        Args:
            codes: int64; those that went beyond 0 to 2**bits - 1 are wrapped first.
            like: tensors whose dtypes the values get, in the same structure.
        """

        def decode(code: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
            half = self.modulus // 2
            centred = self.wrap(code + half) - half
            return centred.to(torch.float64).mul_(2.0**-self.fraction_bits).to(one.dtype)

        return pytree.tree_map(decode, codes, like)

    def largest_code(self, num_terms: int) -> int:
        """`largest` in steps: that of integers, which need no bits behind the point."""
        if isinstance(num_terms, bool) or not isinstance(num_terms, int) or num_terms < 1:
            raise InvalidArgument(f"num_terms={num_terms!r}, expected how many are added up, at least 1")
        return (self.modulus // 2 - 1) // num_terms
