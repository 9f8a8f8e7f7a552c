"""What every codec offers to Python: sizes, encode, decode and its error bound. The maths is in csrc/codecs.

A codec maps float32, float16 or bfloat16 to bytes, block by block; scale and codes of a block stand
together. Finite input gives finite output within the bound. A NaN or Inf makes its block decode to
NaN, never to ordinary numbers. A codec is stateless. Its options are the keyword-only fields of its class.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch

from bagua import _C
from bagua.distributed.process_group import dtype_code
from bagua.distributed.tensors import address_of
from bagua.errors import InvalidArgument


class SeededCodec(NamedTuple):
    """What ``codec=`` of a collective accepts: a codec with the seed of its random rounding."""

    spec: str
    seed: int


class Codec:
    """One codec. Subclasses set ``name`` (by their file stem) and state their error bound.

    Example:
        >>> import bagua, torch
        >>> codec = bagua.codecs.get("minmax_uint8")
        >>> x = torch.linspace(-1, 1, 5000)
        >>> bytes_ = codec.encode(x)
        >>> bytes_.numel() == codec.wire_bytes(5000, torch.float32)
        True
        >>> bool(((codec.decode(bytes_, 5000, torch.float32) - x).abs() <= codec.error_bound(x)).all())
        True
    """

    name: ClassVar[str] = ""
    is_random: ClassVar[bool] = False  # rounds at random: the same values may give other bytes
    keeps_constants: ClassVar[bool] = True  # a block of one value comes back as it was
    # A contraction, whose loss is of the order of what is sent; an algorithm uses it with error feedback only.
    needs_error_feedback: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)

    @property
    def spec(self) -> str:
        """Its name and those of its options that are not the defaults: what ``codec=`` accepts.

        Example:
            >>> import bagua
            >>> bagua.codecs.get("qsgd").spec, bagua.codecs.get("qsgd", bits=4).spec
            ('qsgd', 'qsgd:bits=4')
        """
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        chosen = [f"{f.name}={getattr(self, f.name)}" for f in fields if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(chosen) if chosen else "")

    def with_seed(self, seed: int, *more: int) -> SeededCodec:
        """The codec for one collective call, drawing from `seed` and the rank: a replay then gives the same bits.

        Without, a codec that rounds at random draws from the number of the operation in its group, and the rank.

        Args:
            seed: 0 to 2**64 - 1; another one for every call.
            more: such as a step and the index of the call in it, so that `seed` may stay.
        """
        for part in (seed, *more):
            if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < 2**64:
                raise InvalidArgument(f"seed {part!r} is not an integer from 0 to 2**64 - 1")
        for part in more:
            seed = _C.derive_key(seed, part)
        return SeededCodec(self.spec, seed)

    @property
    def is_expansive(self) -> bool:
        """Whether what it loses is larger than what it encodes, so that error feedback would grow without bound."""
        return False

    @property
    def block_numel(self) -> int:
        """Elements per block; only the last block of a message may be shorter."""
        return _C.codec_block_numel(self.spec)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of an encoded message of ``numel`` elements of ``dtype``: a function of these two alone."""
        self._check_dtype(dtype)
        return _C.codec_wire_bytes(self.spec, numel, dtype_code(dtype))

    def encode(self, tensor: torch.Tensor, *, key: int | None = None) -> torch.Tensor:
        """The message for ``tensor``: 1-D uint8 of ``wire_bytes`` elements.

        Args:
            tensor: any shape, contiguous, on the CPU, of one of ``dtypes``.
            key: what a codec that rounds at random draws from, 0 to 2**64 - 1: the same key and values give the same
                bytes. By default a new one from torch's generator, which ``torch.manual_seed`` repeats.

        Raises:
            InvalidArgument: another dtype or device, not contiguous, or without memory.
        """
        self._check_dtype(tensor.dtype)
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise InvalidArgument(
                f"codec {self.name!r} encodes contiguous CPU tensors, got one on {tensor.device} "
                f"with strides {tuple(tensor.stride())}; pass tensor.cpu().contiguous()"
            )
        encoded = torch.empty(self.wire_bytes(tensor.numel(), tensor.dtype), dtype=torch.uint8)
        if key is None:
            key = int(torch.randint(2**63 - 1, ())) if self.is_random else 0
        if not 0 <= key < 2**64:
            raise InvalidArgument(f"key is {key}, expected 0 to 2**64 - 1")
        source, kind = address_of(tensor, "tensor"), dtype_code(tensor.dtype)
        _C.codec_encode(self.spec, source, kind, tensor.numel(), encoded.data_ptr(), key)
        return encoded

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The 1-D tensor of ``numel`` elements of ``dtype`` that ``encoded`` stands for.

        Args:
            encoded: what ``encode`` returned for a tensor of ``numel`` elements of the same dtype.

        Raises:
            InvalidArgument: ``encoded`` is not uint8, contiguous, on the CPU and ``wire_bytes(numel, dtype)`` long.
        """
        self._check_message(encoded, numel, dtype)
        decoded = torch.empty(numel, dtype=dtype)
        _C.codec_decode(self.spec, address_of(encoded, "encoded"), dtype_code(dtype), numel, decoded.data_ptr())
        return decoded

    def decode_add(self, encoded: torch.Tensor, total: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        """``total += decode(encoded, total.numel(), dtype)``, in one pass and in float32.

        Args:
            encoded: what ``encode`` returned for a tensor of ``total.numel()`` elements of ``dtype``.
            total: float32, contiguous, on the CPU; changed in place.

        Raises:
            InvalidArgument: either is not so.
        """
        if total.dtype != torch.float32 or not total.is_contiguous() or total.device.type != "cpu":
            raise InvalidArgument(
                f"decode_add adds to a contiguous CPU tensor of torch.float32, got {total.dtype} on {total.device} "
                f"with strides {tuple(total.stride())}"
            )
        self._check_message(encoded, total.numel(), dtype)
        message, sums = address_of(encoded, "encoded"), address_of(total, "total")
        _C.codec_decode_add(self.spec, message, dtype_code(dtype), total.numel(), sums)

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """Largest |decode(encode(tensor)) - tensor| per element for finite input: float64, shape of ``tensor``."""
        raise NotImplementedError(f"{type(self).__name__}.error_bound")

    def _check_message(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        expected_bytes = self.wire_bytes(numel, dtype)
        is_message = encoded.dtype == torch.uint8 and encoded.is_contiguous() and encoded.device.type == "cpu"
        if not is_message or encoded.numel() != expected_bytes:
            raise InvalidArgument(
                f"a {self.name!r} message of {numel} elements of {dtype} is a contiguous CPU tensor of "
                f"{expected_bytes} uint8, got {encoded.numel()} {encoded.dtype} on {encoded.device}"
            )

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self.dtypes:
            raise InvalidArgument(
                f"codec {self.name!r} does not encode {dtype}; it encodes {', '.join(map(str, self.dtypes))}"
            )


def half_ulp(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance of neighbouring values of ``dtype`` at each element's magnitude: float64, same shape.

    Example:
        >>> half_ulp(torch.tensor([1.0, 0.0]), torch.float16).tolist() == [2.0**-11, 2.0**-25]
        True
    """
    info = torch.finfo(dtype)
    magnitude = tensor.to(torch.float64).abs().clamp(min=info.smallest_normal)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent, m in [0.5, 1)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent - 1)
