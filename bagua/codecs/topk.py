"""topk: the k elements of largest magnitude of each block of 2048 or 4096, and zeros for the others.

This is a contraction, not a rounding: the error is as large as the input, so algorithms use it with error feedback,
which adds the error to the next message. Sources: arXiv 1712.01887, 1809.07599; with ``bits=2`` SparseLoCo, 2508.15706.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from bagua.codecs.base import Codec
from bagua.codecs.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Sends the values and indices of the k largest elements by magnitude; of equal ones the lower indices win.

    Error: the whole element if it is not sent; else 0, or with ``bits=2`` the distance from the nearer of two levels.
    Over a block of d elements the squared errors of what is not sent add up to at most 1 - k / d of the sum of squares.

    Args:
        chunk: elements per block, 2048 or 4096.
        k: elements sent per block, 8, 16, 32, 64, 128 or 256, at 6 bytes each; at 44 bits each with ``chunk=4096``.
        bits: 32 sends float32 values. 2, which needs ``chunk=4096``, sends signs and one of two magnitudes per block,
            the mean of those above the mean of what is sent, and the mean of the others: 14 bits per element sent, and
            4 bytes per block. With ``k=64`` that is 116 bytes for 4096 elements.
    """

    keeps_constants: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = True
    chunk: int = 2048
    k: int = 32
    bits: int = 32

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64).abs()
        bound = torch.zeros_like(values)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            if not block.numel():
                continue
            largest = block.topk(min(self.k + 1, block.numel())).values
            if block.numel() > self.k:
                block_bound.copy_(torch.where(block <= largest[-1], block, 0))
            if self.bits == 2:
                sent = largest[: self.k]
                error = torch.where(block >= sent[-1], _level_error(block, sent, tensor.dtype), 0)
                torch.maximum(block_bound, error, out=block_bound)
        return bound.reshape(tensor.shape)


def _level_error(magnitudes: torch.Tensor, sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the most by which magnitudes differ from the nearer level of those that are sent."""
    is_lower = sent <= sent.sum() / sent.numel()
    lower = sent[is_lower].mean()
    upper = lower if bool(is_lower.all()) else sent[~is_lower].mean()
    info = torch.finfo(dtype)
    # Levels are cut to bfloat16, and what is decoded is rounded to the type.
    rounding = (2.0**-7 + 2.0**-20 + info.eps) * upper + 2.0**-133 + info.eps * info.smallest_normal
    return torch.minimum((magnitudes - lower).abs(), (magnitudes - upper).abs()) + rounding
