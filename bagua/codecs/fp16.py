"""fp16: IEEE half precision, rounded to nearest even. Two bytes per element.

Finite values beyond its range become +-65504, the largest that it holds.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, half_ulp
from bagua.codecs.registry import register


@register
class FP16(Codec):
    """Error: half a unit in the last place of float16; what exceeds 65504 is cut off there."""

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        excess = (tensor.detach().to(torch.float64).abs() - torch.finfo(torch.float16).max).clamp(min=0)
        rounding = half_ulp(tensor, tensor.dtype) if tensor.dtype == torch.bfloat16 else 0
        return half_ulp(tensor, torch.float16) + excess + rounding
