"""fp8_e4m3: an 8-bit float of 4 exponent and 3 mantissa bits per element, scaled by the norm of each block of 2048.

The norm, a block's largest magnitude, becomes 448, the largest of OCP's numbers; the format's NaN and Inf are not used.
Numbers are rounded to nearest even. Source: FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, scaled_bound
from bagua.codecs.registry import register


@register
class FP8E4M3(Codec):
    """Rounds to the nearest number, of two equally near ones to the even one.

    Error: 1/17 of the element, at least norm / 448 / 2^10, and the rounding of the result to its dtype; 0 for zeros.
    """

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return scaled_bound(self, tensor, largest=448, mantissa_bits=3, smallest=2.0**-9)
