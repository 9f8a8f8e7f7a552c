"""minmax_uint8: 255 steps between the smallest and the largest value of each block of 2048.

Wire size: a byte per element, and the block's scale. The step is relative to the block's range, with no absolute
epsilon, so tiny gradients keep all 256 levels. Zeros and constant blocks are exact: if a block has values of both
signs, or a zero, its 256 levels are moved by at most half a step, so that one of them is 0.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec
from bagua.codecs.registry import register


@register
class MinMaxUInt8(Codec):
    """Rounds to the nearest of 256 evenly spaced values from the block's min to its max, including 0 if it is between.

    Error: (max - min) / 510 of the element's block, and the rounding of the result to its dtype; 0 for zeros.
    """

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64)
        bound = torch.zeros_like(values)
        if not values.numel():
            return bound.reshape(tensor.shape)
        info = torch.finfo(tensor.dtype)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            low, high = float(block.min()), float(block.max())
            largest = max(abs(low), abs(high))
            if low == high:
                continue
            arithmetic = torch.finfo(torch.float32).eps * 2 * largest
            rounding = 0.0 if tensor.dtype == torch.float32 else info.eps * largest
            block_bound.fill_((high - low) / 510 + arithmetic + rounding + info.eps * info.smallest_normal)
            block_bound[block == 0] = 0
        return bound.reshape(tensor.shape)
