"""bf16: the upper half of a float32, rounded to nearest even. Two bytes per element, the range of float32."""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, half_ulp
from bagua.codecs.registry import register


@register
class BF16(Codec):
    """The upper half of a float32. Error: half a unit in the last place (one unit where rounding up gave Inf)."""

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        rounding = half_ulp(tensor, tensor.dtype) if tensor.dtype == torch.float16 else 0
        is_at_the_top = tensor.detach().to(torch.float64).abs() > torch.finfo(torch.bfloat16).max
        return half_ulp(tensor, torch.bfloat16) * (1 + is_at_the_top.to(torch.float64)) + rounding
