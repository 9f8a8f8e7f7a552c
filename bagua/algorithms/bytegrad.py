"""bytegrad: gradients are averaged over all ranks in 8 bits per element.

Data path: policy. One two-shot compressed all_reduce per bucket, during backward; two quantisations
whatever the number of ranks, and all ranks end with the same decoded values. Per rank and step about
2 (n-1)/n times a quarter of the float32 gradient bytes travel. The primitive C_LP_S of the paper
(arXiv 2107.01499) without error feedback.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

import torch

from bagua import codecs
from bagua.algorithms.base import Algorithm, Declaration
from bagua.algorithms.registry import register
from bagua.bucket import Bucket
from bagua.errors import InvalidArgument
from bagua.group import ProcessGroup, ReduceOp, Work

_COMPRESSED, _ONE_DIMENSIONAL, _NO_CODEC = "compressed", "1-D", "dtype"


@register
@dataclasses.dataclass(kw_only=True)
class ByteGrad(Algorithm):
    """g <- Q(sum over ranks of Q(g)) / n, where Q encodes and decodes.

    Biases, norms and other parameters with at most one dimension are few bytes and sensitive: they
    travel at full precision, and so do buckets below ``min_compressed_bytes`` and dtypes that the
    codec does not know (float64). ``model.bagua.buckets`` and the timeline say so, bucket by bucket.

    Args:
        codec: any of ``bagua.codecs.available()``.
        average: divide the sum by the number of ranks, see gradient_allreduce.
        hierarchical: reduce inside each node at full precision first; only what travels between nodes is encoded.
        min_compressed_bytes: buckets below it cost the latency of a message, which a codec cannot shorten. Measured
            (benchmarks/tcp_hosts.py, 1 Gbit/s between hosts): coded becomes faster between 16 and 32 KB.

    Example:
        >>> model = bagua.with_bagua(model, [optimizer], algorithm="bytegrad", codec="bf16")    # doctest: +SKIP
    """

    codec: str = "minmax_uint8"
    average: bool = True
    hierarchical: bool = False
    min_compressed_bytes: int = 16 * 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        codecs.get(self.codec)  # raises for an unknown one
        if self.min_compressed_bytes < 0:
            raise InvalidArgument(f"min_compressed_bytes is {self.min_compressed_bytes}, expected 0 or more")

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        if parameter.dtype not in codecs.get(self.codec).dtypes:
            return _NO_CODEC
        return _ONE_DIMENSIONAL if parameter.dim() <= 1 else _COMPRESSED

    def declare(self, bucket: Bucket) -> Declaration:
        if bucket.kind == _NO_CODEC:
            codec, reason = None, f"codec {self.codec} does not encode {bucket.dtype}"
        elif bucket.kind == _ONE_DIMENSIONAL:
            codec, reason = None, "1-D parameters"
        elif bucket.num_bytes < self.min_compressed_bytes:
            codec, reason = None, f"{bucket.num_bytes} bytes, below {self.min_compressed_bytes}"
        else:
            codec, reason = self.codec, ""
        return Declaration("all_reduce", codec, reason, self.hierarchical)

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        op = ReduceOp.AVG if self.average else ReduceOp.SUM
        codec = bucket.declaration.codec
        return group.all_reduce(bucket.flat, op, codec=codec, hierarchical=self.hierarchical, label=bucket.label)
