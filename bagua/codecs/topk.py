"""topk: the k elements of largest magnitude of each block of 2048 or 4096, and zeros for the others.

This is a contraction, not a rounding: the error is as large as the input, so algorithms use it with error feedback,
which adds the error to the next message. Sources: arXiv 1712.01887, 1809.07599; with ``bits=2`` SparseLoCo, 2508.15706;
with ``dct=1`` DeMo, 2411.19870.
"""

from __future__ import annotations

import dataclasses
import math
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
        dct: 1, which needs ``chunk=4096``, sends the largest coefficients of each block's orthonormal cosine transform
            (DCT-II) in place of its elements, which are taken as 64 rows of 64 in their order. The error of an element
            is then at most the root of the sum of the squares that are lost in its block.
    """

    keeps_constants: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = True
    chunk: int = 2048
    k: int = 32
    bits: int = 32
    dct: int = 0

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64)
        bound = torch.zeros_like(values)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            if self.dct and block.numel():
                norm = float(block.norm())
                lost = self._lost(_coefficients(block).abs(), block.numel(), tensor.dtype)
                eps = 2.0**-17 + torch.finfo(tensor.dtype).eps
                block_bound.fill_(float(lost.norm()) * (1 + eps) + eps * norm + 2.0**-127)
                block_bound += torch.finfo(tensor.dtype).eps * torch.finfo(tensor.dtype).smallest_normal
            elif block.numel():
                block_bound.copy_(self._lost(block.abs(), block.numel(), tensor.dtype))
        return bound.reshape(tensor.shape)

    def _lost(self, magnitudes: torch.Tensor, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the largest error of each of a block's `numel` elements, or of their coefficients."""
        num_sent = min(self.k, numel)
        largest = magnitudes.topk(min(num_sent + 1, magnitudes.numel())).values
        sent, is_whole = largest[:num_sent], num_sent == magnitudes.numel()
        lost = torch.zeros_like(magnitudes) if is_whole else torch.where(magnitudes <= largest[-1], magnitudes, 0)
        if self.bits == 2:
            error = torch.where(magnitudes >= sent[-1], _level_error(magnitudes, sent, dtype), 0)
            lost = torch.maximum(lost, error)
        return lost


def _coefficients(block: torch.Tensor) -> torch.Tensor:
    """Returns the 4096 coefficients of a block of up to 4096 elements, which zeros fill up."""
    side = 64
    rows = block.new_zeros(side * side)
    rows[: block.numel()] = block
    orders = torch.arange(side, dtype=block.dtype, device=block.device)
    cosines = torch.cos(math.pi / (2 * side) * orders[:, None] * (2 * orders + 1)) * math.sqrt(2 / side)
    cosines[0] = 1 / math.sqrt(side)
    return (cosines @ rows.reshape(side, side) @ cosines.T).reshape(-1)


def _level_error(magnitudes: torch.Tensor, sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the most by which magnitudes differ from the nearer level of those that are sent."""
    is_lower = sent <= sent.sum() / sent.numel()
    lower = sent[is_lower].mean()
    upper = lower if bool(is_lower.all()) else sent[~is_lower].mean()
    info = torch.finfo(dtype)
    # Levels are cut to bfloat16, and what is decoded is rounded to the type.
    rounding = (2.0**-7 + 2.0**-20 + info.eps) * upper + 2.0**-133 + info.eps * info.smallest_normal
    return torch.minimum((magnitudes - lower).abs(), (magnitudes - upper).abs()) + rounding
