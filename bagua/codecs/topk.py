"""topk: the k elements of largest magnitude of each block of 2048, as they are, and zeros for the others.

A contraction, not a rounding: what is lost is of the order of what is sent, so it is used with error feedback, which
adds it to what is sent next. Sources: arXiv 1712.01887, 1809.07599.
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
    """Sends the value and the index of the k largest by magnitude, of equal ones those of lower index.

    Error: all of an element that is not among them, nothing of one that is; over a block of d elements the squares of
    the errors add up to at most 1 - k / d of the squares of the elements.

    Args:
        k: 8, 16, 32, 64, 128 or 256 per block; 6 bytes each.
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
