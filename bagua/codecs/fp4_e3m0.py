"""fp4_e3m0: a 4-bit float of 3 exponent bits per element, scaled by the norm of each block of 2048.

The magnitudes are 0 and the powers of two from 1/4 to 16, where 16 stands for the norm, the block's largest magnitude.
For error feedback, or for what is sent seldom, such as the outer gradients of streaming DiLoCo (arXiv 2501.18512): an
element below a 128th of the norm becomes 0.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, scaled_bound
from bagua.codecs.registry import register


@register
class FP4E3M0(Codec):
    """Rounds to the nearest number in value, of two equally near ones to the even code: to 0, 1/2, 2 or 8.

    Error: 1/3 of the element, at least norm / 128, and the rounding of the result to its dtype; 0 for zeros.
    """

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return scaled_bound(self, tensor, largest=16, mantissa_bits=0, smallest=0.25)
