"""qsgd: gradients are averaged over all ranks in 8, 4 or 2 bits per element, rounded at random.

Data path: policy. As bytegrad, with a codec whose rounding errors have no bias, so that few bits do without error
feedback: over steps and ranks they cancel. Source: arXiv 1610.02132.
"""

from __future__ import annotations

import dataclasses

from bagua.algorithms._compressed import CompressedGradients
from bagua.algorithms.base import About
from bagua.algorithms.registry import register
from bagua.errors import InvalidArgument


@register
@dataclasses.dataclass(kw_only=True)
class QSGD(CompressedGradients):
    """g <- Q(sum over ranks of Q(g)) / n, whose expectation is the mean of the gradients.

    Args:
        bits: 8, 4 or 2 per element.
        average, hierarchical, error_feedback, state_dtype, seed, min_compressed_bytes: as in CompressedGradients.

    Example:
        >>> model = bagua.with_bagua(model, [optimizer], algorithm="qsgd", bits=4)
    """

    about = About(
        sends="gradients, 8, 4 or 2 bits per element, rounded at random",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G bits/32",
        memory="0; with error feedback 2 (1 + 1/n) G, in bfloat16 half",
        use_when="the network binds so much that 8 bits are not enough",
        paper="[1610.02132](https://arxiv.org/abs/1610.02132)",
    )

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (8, 4, 2):
            raise InvalidArgument(f"bits is {self.bits!r}, expected 8, 4 or 2")
        super().__post_init__()

    def codec_spec(self) -> str:
        return f"qsgd:bits={self.bits}"
