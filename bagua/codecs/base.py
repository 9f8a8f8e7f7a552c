"""The interface of every codec to Python: sizes, encode, decode and its error bound. The maths is in csrc/codecs.

A codec maps float32, float16 or bfloat16 to bytes, block by block; scale and codes of a block stand
together. A codec of blocks gives finite output within the bound for finite input, and a NaN or Inf makes its block
decode to NaN, never to ordinary numbers; fp16 and bf16 are casts. A codec is stateless. Its options are the
keyword-only fields of its class.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import torch

from bagua import _C
from bagua.distributed.devices import check_supported, common_device, current_stream
from bagua.distributed.process_group import dtype_code
from bagua.distributed.tensors import address_of
from bagua.errors import InvalidArgument


class SeededCodec(NamedTuple):
    """A value of ``codec=`` of a collective: a codec with the seed of its random rounding."""

    spec: str
    seed: int


class Codec:
    """The base class of codecs. A subclass is named by its file's stem and states its error bound.

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
    is_random: ClassVar[bool] = False  # rounds at random, so the same values may give other bytes
    keeps_constants: ClassVar[bool] = True  # a block of equal values decodes exactly
    # True for a contraction, whose error is as large as its input: algorithms use it with error feedback only.
    needs_error_feedback: ClassVar[bool] = False
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.float16, torch.bfloat16)

    @property
    def spec(self) -> str:
        """The name, with the options that differ from their defaults, as ``codec=`` accepts it.

        Example:
            >>> import bagua
            >>> bagua.codecs.get("qsgd").spec, bagua.codecs.get("qsgd", bits=4).spec
            ('qsgd', 'qsgd:bits=4')
        """
        fields = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        chosen = [f"{f.name}={getattr(self, f.name)}" for f in fields if getattr(self, f.name) != f.default]
        return self.name + (":" + ",".join(chosen) if chosen else "")

    def with_seed(self, seed: int, *more: int) -> SeededCodec:
        """Returns the codec for one collective call, whose rounding depends on `seed` and the rank alone.

        Running the call again then gives the same bits. Without a seed, the rounding depends on the number of the
        operation in its group, and the rank.

        Args:
            seed: 0 to 2**64 - 1; a new one for every call.
            more: further parts of the seed, such as a step and the index of the call in it, so that `seed` may stay.
        """
        for part in (seed, *more):
            if isinstance(part, bool) or not isinstance(part, int) or not 0 <= part < 2**64:
                raise InvalidArgument(f"seed {part!r} is not an integer from 0 to 2**64 - 1")
        for part in more:
            seed = _C.derive_key(seed, part)
        return SeededCodec(self.spec, seed)

    @property
    def is_expansive(self) -> bool:
        """Returns True if the error can exceed the input, so that residuals would grow without bound."""
        return False

    def check_error_feedback(self, is_on: bool) -> None:
        """Raises InvalidArgument if gradients cannot be sent in this codec with error feedback, or without it."""
        if self.needs_error_feedback and not is_on:
            raise InvalidArgument(
                f"codec {self.name!r} loses as much as it sends and is of use with error feedback only; pass "
                "error_feedback=True to an algorithm that has it, or another codec"
            )
        if self.is_expansive and is_on:
            raise InvalidArgument(
                f"codec {self.spec!r} with error_feedback=True diverges: it is off by more than it says, so residuals "
                "grow; take more bits, or no error feedback"
            )

    @property
    def block_numel(self) -> int:
        """The number of elements per block; only the last block of a message may be shorter."""
        return _C.codec_block_numel(self.spec)

    def wire_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a message of ``numel`` elements of ``dtype``, a function of these two alone."""
        self._check_dtype(dtype)
        return _C.codec_wire_bytes(self.spec, numel, dtype_code(dtype))

    def encode(self, tensor: torch.Tensor, *, key: int | None = None) -> torch.Tensor:
        """Encodes ``tensor`` into a message: 1-D uint8 of ``wire_bytes`` elements.

        Args:
            tensor: any shape, contiguous, of one of ``dtypes``. On a device it is encoded there, in the order of the
                current stream.
            key: the seed of random rounding, 0 to 2**64 - 1: the same key and values give the same bytes. By default
                a new one from torch's generator, which ``torch.manual_seed`` repeats.

        Raises:
            InvalidArgument: another dtype, not contiguous, without memory, or on a device that bagua does not support.
        """
        self._check_dtype(tensor.dtype)
        check_supported(tensor.device, "tensor")
        if not tensor.is_contiguous():
            raise InvalidArgument(
                f"codec {self.name!r} encodes contiguous tensors, got one with strides {tuple(tensor.stride())}; pass "
                "tensor.contiguous()"
            )
        source, kind = address_of(tensor, "tensor"), dtype_code(tensor.dtype)
        encoded = self._empty_message(tensor.numel(), tensor.dtype, tensor.device)
        key, stream = self._key(key), current_stream(tensor.device)
        _C.codec_encode(self.spec, source, kind, tensor.numel(), encoded.data_ptr(), key, stream)
        return encoded

    def decode(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Decodes a message into a 1-D tensor of ``numel`` elements of ``dtype``.

        Args:
            encoded: the message that ``encode`` returned for a tensor of ``numel`` elements of the same dtype.

        Raises:
            InvalidArgument: ``encoded`` is not uint8, contiguous and ``wire_bytes(numel, dtype)`` long.
        """
        self._check_message(encoded, numel, dtype)
        message, kind = address_of(encoded, "encoded"), dtype_code(dtype)
        decoded = torch.empty(numel, dtype=dtype, device=encoded.device)
        _C.codec_decode(self.spec, message, kind, numel, decoded.data_ptr(), current_stream(encoded.device))
        return decoded

    def decode_add(self, encoded: torch.Tensor, total: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
        """Adds a decoded message: ``total += decode(encoded, total.numel(), dtype)``, in one pass and in float32.

        Args:
            encoded: the message that ``encode`` returned for a tensor of ``total.numel()`` elements of ``dtype``.
            total: float32, contiguous, on the device of ``encoded``; changed in place.

        Raises:
            InvalidArgument: an argument is not as above.
        """
        if total.dtype != torch.float32 or not total.is_contiguous():
            raise InvalidArgument(
                f"decode_add adds to a contiguous tensor of torch.float32, got {total.dtype} with strides "
                f"{tuple(total.stride())}"
            )
        common_device([("encoded", encoded), ("total", total)])
        self._check_message(encoded, total.numel(), dtype)
        message, sums = address_of(encoded, "encoded"), address_of(total, "total")
        _C.codec_decode_add(self.spec, message, dtype_code(dtype), total.numel(), sums, current_stream(total.device))

    def reduce_encode(
        self,
        messages: torch.Tensor,
        numel: int,
        dtype: torch.dtype = torch.float32,
        *,
        average: bool = False,
        key: int | None = None,
    ) -> torch.Tensor:
        """Returns the message for the sum of several, in one pass: the middle part of a compressed all_reduce.

        Its bytes equal those of ``encode`` for a float32 tensor to which ``decode_add`` added all messages in order.

        Args:
            messages: uint8, contiguous, one message per row, each returned by ``encode`` for a tensor of ``numel``
                elements of ``dtype``.
            average: encode the mean.
            key: as in ``encode``.

        Returns:
            1-D uint8 of ``wire_bytes(numel, torch.float32)`` elements.

        Raises:
            InvalidArgument: ``messages`` is not as above.
        """
        expected_bytes = self.wire_bytes(numel, dtype)
        if messages.dim() != 2 or messages.shape[0] == 0:
            raise InvalidArgument(
                f"messages have the shape {tuple(messages.shape)}, expected (how many, {expected_bytes}); torch.stack "
                "makes that of several"
            )
        self._check_message(messages[0], numel, dtype)
        if not messages.is_contiguous():
            raise InvalidArgument(f"messages have strides {tuple(messages.stride())}; pass messages.contiguous()")
        count, address, kind = messages.shape[0], address_of(messages, "messages"), dtype_code(dtype)
        factor = 1 / count if average else 1.0
        encoded = self._empty_message(numel, torch.float32, messages.device)
        key, stream = self._key(key), current_stream(messages.device)
        _C.codec_reduce_encode(self.spec, address, count, kind, numel, factor, encoded.data_ptr(), key, stream)
        return encoded

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest ``|decode(encode(tensor)) - tensor|`` per element of finite input: float64, shape of it.

        It is Inf where a cast overflows.
        """
        raise NotImplementedError(f"{type(self).__name__}.error_bound")

    def _empty_message(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(self.wire_bytes(numel, dtype), dtype=torch.uint8, device=device)

    def _key(self, key: int | None) -> int:
        """Returns the seed of random rounding, a new one if `key` is None. Raises InvalidArgument."""
        if key is None:
            key = int(torch.randint(2**63 - 1, (), device="cpu")) if self.is_random else 0
        if not 0 <= key < 2**64:
            raise InvalidArgument(f"key is {key}, expected 0 to 2**64 - 1")
        return key

    def _check_message(self, encoded: torch.Tensor, numel: int, dtype: torch.dtype) -> None:
        expected_bytes = self.wire_bytes(numel, dtype)
        check_supported(encoded.device, "encoded")
        is_message = encoded.dtype == torch.uint8 and encoded.is_contiguous()
        if not is_message or encoded.numel() != expected_bytes:
            raise InvalidArgument(
                f"a {self.name!r} message of {numel} elements of {dtype} is a contiguous tensor of {expected_bytes} "
                f"uint8, got {encoded.numel()} {encoded.dtype} with strides {tuple(encoded.stride())}"
            )

    def _check_dtype(self, dtype: torch.dtype) -> None:
        if dtype not in self.dtypes:
            raise InvalidArgument(
                f"codec {self.name!r} does not encode {dtype}; it encodes {', '.join(map(str, self.dtypes))}"
            )


def half_ulp(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns half the distance between neighbouring values of ``dtype`` at each element: float64, same shape.

    Example:
        >>> half_ulp(torch.tensor([1.0, 0.0]), torch.float16).tolist() == [2.0**-11, 2.0**-25]
        True
    """
    info = torch.finfo(dtype)
    magnitude = tensor.to(torch.float64).abs().clamp(min=info.smallest_normal)
    _, exponent = torch.frexp(magnitude)  # magnitude = m * 2**exponent, m in [0.5, 1)
    return torch.ldexp(torch.full_like(magnitude, info.eps / 2), exponent - 1)


def cast_bound(tensor: torch.Tensor, wire: torch.dtype) -> torch.Tensor:
    """The error bound of a codec that casts to ``wire`` and back; Inf where that overflows.

    Example:
        >>> cast_bound(torch.tensor([1.0, 1e5]), torch.float16).tolist() == [2.0**-11, float("inf")]
        True
    """
    values = tensor.detach()
    bound = half_ulp(values, wire)
    if tensor.dtype not in (torch.float32, wire):
        bound = bound + half_ulp(values, tensor.dtype)
    return bound.masked_fill(values.to(wire).to(tensor.dtype).isinf(), float("inf"))


def scaled_bound(
    codec: Codec, tensor: torch.Tensor, *, largest: float, mantissa_bits: int, smallest: float
) -> torch.Tensor:
    """Returns the error bound of a codec whose numbers are small floats, scaled by the norm of their block.

    Args:
        largest: the number that stands for the norm.
        mantissa_bits: of the small floats.
        smallest: the distance of the numbers around 0.
    """
    values = tensor.detach().reshape(-1).to(torch.float64).abs()
    bound = torch.zeros_like(values)
    info, eps = torch.finfo(tensor.dtype), torch.finfo(torch.float32).eps
    for block, block_bound in zip(values.split(codec.block_numel), bound.split(codec.block_numel), strict=True):
        unit = float(block.max()) / largest if block.numel() else 0.0
        rounding = 4 * eps + (0 if tensor.dtype == torch.float32 else info.eps)
        # In the middle of two numbers x and (1 + 2^-m) x.
        nearest = (block / (2.0 ** (mantissa_bits + 1) + 1)).clamp(min=unit * smallest / 2)
        block_bound.copy_(nearest + rounding * block + info.eps * info.smallest_normal)
        block_bound[block == 0] = 0
    return bound.reshape(tensor.shape)
