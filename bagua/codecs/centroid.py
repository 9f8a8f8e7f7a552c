"""centroid: 2 bits per element, the nearest of four levels around the mean of each block of 2048.

A message has the mean and the standard deviation sigma of each block; levels are 1.5 sigma apart. This is a
contraction, not a rounding: on Gaussian values it loses 19 % of the squares, so algorithms use it with error feedback,
which adds the error to the next message. Zeros do not stay zero. Source: MuLoCo, arXiv 2505.23725.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from bagua.codecs.base import Codec
from bagua.codecs.registry import register


@register
class Centroid(Codec):
    """Replaces x by the nearest of mean - 2.25, - 0.75, + 0.75 and + 2.25 sigma of its block.

    Error: the distance from that level, at most 0.75 sigma where x is within 3 sigma of the mean, and the rounding of
    the result to its dtype. A block of few large elements among zeros can lose up to 1.56 times its sum of squares, but
    the residuals of error feedback stay bounded.
    """

    needs_error_feedback: ClassVar[bool] = True

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64)
        bound = torch.empty_like(values)
        info = torch.finfo(tensor.dtype)
        eps = 2 * (torch.finfo(torch.float32).eps + (0 if tensor.dtype == torch.float32 else info.eps))
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            if not block.numel():
                continue
            mean = block.mean()
            sigma = (block - mean).square().mean().sqrt()
            levels = mean + 1.5 * sigma * (torch.arange(4, device=block.device) - 1.5)
            nearest = (block[:, None] - levels).abs().amin(1)
            is_constant = bool((block == block[0]).all())
            rounding = eps * (mean.abs() + 3 * sigma) + 2.0**-148 + 2 * info.eps * info.smallest_normal
            block_bound.copy_(nearest + (0 if is_constant else rounding))
        return bound.reshape(tensor.shape)
