"""gradient_allreduce: gradients are averaged, or summed, over all ranks. Runs bagua's algorithm of the same name."""

from __future__ import annotations

import dataclasses

from bagua import algorithms
from bagua.torch_api.algorithms.base import Algorithm


@dataclasses.dataclass(eq=False)
class GradientAllReduceAlgorithm(Algorithm, name="gradient_allreduce"):
    """Averages gradients: g <- mean over ranks of g.

    Args:
        hierarchical: reduce inside each node first.
        average: divide the sum by the number of ranks.
    """

    hierarchical: bool = False
    average: bool = True

    def create(self) -> algorithms.Algorithm:
        return algorithms.create("gradient_allreduce", {"hierarchical": self.hierarchical, "average": self.average})
