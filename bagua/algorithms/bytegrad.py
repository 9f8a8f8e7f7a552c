"""bytegrad: gradients are averaged over all ranks in 8 bits per element.

Data path: policy. One two-shot compressed all_reduce per bucket, during backward; two quantisations
whatever the number of ranks, and all ranks end with the same decoded values. Per rank and step about
2 (n-1)/n times a quarter of the float32 gradient bytes travel. The primitive C_LP_S of the paper
(arXiv 2107.01499), with or without error feedback.
"""

from __future__ import annotations

import dataclasses

from bagua.algorithms._compressed import CompressedGradients
from bagua.algorithms.base import About
from bagua.algorithms.registry import register


@register
@dataclasses.dataclass(kw_only=True)
class ByteGrad(CompressedGradients):
    """g <- Q(sum over ranks of Q(g)) / n, where Q encodes and decodes.

    Args:
        codec: any of ``bagua.codecs.available()``, with its options; "onebit", "centroid" and "topk" need
            ``error_feedback=True``.
        average, hierarchical, error_feedback, state_dtype, seed, min_compressed_bytes: as in CompressedGradients.

    Example:
        >>> model = bagua.with_bagua(model, [optimizer], algorithm="bytegrad", codec="bf16")
    """

    about = About(
        sends="gradients, 8 bits per element",
        to="all ranks",
        when="during backward, which waits",
        bytes_per_step="2 (n-1)/n G / 4",
        memory="0; with error feedback 2 (1 + 1/n) G, in bfloat16 half",
        use_when="the network binds: the first to try after gradient_allreduce",
        paper="[2107.01499](https://arxiv.org/abs/2107.01499)",
    )

    codec: str = "minmax_uint8"

    def codec_spec(self) -> str:
        return self.codec
