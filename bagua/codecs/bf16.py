"""bf16: the upper half of a float32, rounded to nearest even. Two bytes per element, the range of float32."""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, cast_bound
from bagua.codecs.registry import register


@register
class BF16(Codec):
    """Error: half a unit in the last place of bfloat16; a value that rounding takes beyond its range becomes Inf."""

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast_bound(tensor, torch.bfloat16)
