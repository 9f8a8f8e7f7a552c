"""topk: the k elements of largest magnitude of each block of 2048, unchanged, and zeros for the others.

This is a contraction, not a rounding: the error is as large as the input, so algorithms use it with error feedback,
which adds the error to the next message. Sources: arXiv 1712.01887, 1809.07599.
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

    Error: the whole element if it is not sent, else 0. Over a block of d elements the squared errors add up to at most
    1 - k / d of the sum of squares.

    Args:
        k: elements per block, 8, 16, 32, 64, 128 or 256, at 6 bytes each.
    """

    keeps_constants: ClassVar[bool] = False
    needs_error_feedback: ClassVar[bool] = True
    k: int = 32

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64).abs()
        bound = torch.zeros_like(values)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            if block.numel() > self.k:
                largest_lost = block.topk(self.k + 1).values[-1]
                block_bound.copy_(torch.where(block <= largest_lost, block, 0))
        return bound.reshape(tensor.shape)
