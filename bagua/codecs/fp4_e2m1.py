"""fp4_e2m1: a 4-bit float of 2 exponent bits and 1 mantissa bit per element, scaled by the norm of each block of 2048.

The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, where 6 stands for the norm, the block's largest magnitude. For error
feedback, or for what is sent seldom: an element below a 24th of the norm becomes 0. Source: arXiv 2310.10537.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, scaled_bound
from bagua.codecs.registry import register


@register
class FP4E2M1(Codec):
    """Rounds to the nearest number, of two equally near ones to the even code: to 0, 1, 2 or 4.

    Error: 1/5 of the element, at least norm / 24, and the rounding of the result to its dtype; 0 for zeros.
    """

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return scaled_bound(self, tensor, largest=6, mantissa_bits=1, smallest=0.5)
