"""onebit: the sign of every element, and the mean magnitude of each block of 2048. A 32nd of float32.

This is a contraction, not a rounding: the error is as large as the input, so algorithms use it with error feedback,
which adds the error to the next message. Zeros do not stay zero: 0 decodes to the mean magnitude of its block.
Sources: arXiv 1802.04434, 2102.02888.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from bagua.codecs.base import Codec
from bagua.codecs.registry import register


@register
class OneBit(Codec):
    """Replaces x by the mean magnitude of its block, with the sign of x.

    Error: the difference between ``|x|`` and that mean, and the rounding of the result to its dtype.
    """

    needs_error_feedback: ClassVar[bool] = True

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64).abs()
        bound = torch.empty_like(values)
        if not values.numel():
            return bound.reshape(tensor.shape)
        eps = 2 * (torch.finfo(torch.float32).eps + torch.finfo(tensor.dtype).eps)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            scale = block.mean()
            block_bound.copy_((block - scale).abs() + eps * scale + torch.finfo(tensor.dtype).smallest_normal * eps)
        return bound.reshape(tensor.shape)
