"""bytegrad: gradients are averaged over all ranks in 8 bits per element. Runs bagua's algorithm of the same name."""

from __future__ import annotations

import dataclasses

from bagua import algorithms
from bagua.torch_api.algorithms.base import Algorithm


@dataclasses.dataclass(eq=False)
class ByteGradAlgorithm(Algorithm, name="bytegrad"):
    """Averages gradients in 8 bits: g <- Q(sum over ranks of Q(g)) / n, where Q encodes and decodes.

    Args:
        hierarchical: reduce inside each node at full precision first; only messages between nodes are encoded.
        average: divide the sum by the number of ranks.
    """

    hierarchical: bool = True
    average: bool = True

    def create(self) -> algorithms.Algorithm:
        return algorithms.create("bytegrad", {"hierarchical": self.hierarchical, "average": self.average})
