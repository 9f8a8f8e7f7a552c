"""qsgd: 8, 4 or 2 bits per element, rounded at random so that rounding errors average out.

A message has the norm (the largest magnitude) of each block of 2048 and, with L = 2^(bits-1) - 1, a level from -L to L
per element. The expectation of a decoded value is the encoded value. Source: QSGD, arXiv 1610.02132.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from bagua.codecs.base import Codec
from bagua.codecs.registry import register


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class QSGD(Codec):
    """Rounds at random to one of the two neighbouring levels, to the nearer one more often.

    Error: less than a step, norm / L, and the rounding of the result to its dtype.

    Args:
        bits: 8, 4 or 2 per element.
    """

    is_random: ClassVar[bool] = True
    bits: int = 8

    @property
    def is_expansive(self) -> bool:
        return self.bits == 2

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        values = tensor.detach().reshape(-1).to(torch.float64)
        bound = torch.empty_like(values)
        if not values.numel():
            return bound.reshape(tensor.shape)
        num_levels = 2 ** (self.bits - 1) - 1
        info = torch.finfo(tensor.dtype)
        eps = torch.finfo(torch.float32).eps + (0 if tensor.dtype == torch.float32 else info.eps)
        for block, block_bound in zip(values.split(self.block_numel), bound.split(self.block_numel), strict=True):
            norm = float(block.abs().max())
            block_bound.fill_(norm / num_levels + 2 * eps * norm + info.eps * info.smallest_normal)
        return bound.reshape(tensor.shape)
