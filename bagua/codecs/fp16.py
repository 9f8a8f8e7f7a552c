"""fp16: IEEE half precision, rounded to nearest even. Two bytes per element.

A value beyond its range becomes Inf, as in a cast, so that a GradScaler sees it.
"""

from __future__ import annotations

import torch

from bagua.codecs.base import Codec, cast_bound
from bagua.codecs.registry import register


@register
class FP16(Codec):
    """Error: half a unit in the last place of float16; a value beyond 65504 becomes Inf."""

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast_bound(tensor, torch.float16)
