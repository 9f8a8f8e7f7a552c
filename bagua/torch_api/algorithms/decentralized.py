"""decentralized, low_precision_decentralized: weights are averaged among neighbours, in full or as 8-bit differences.

Runs bagua's algorithms of these names. The second one has no hierarchy; a warning says so if nodes have several ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

from bagua import algorithms
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument
from bagua.torch_api.algorithms.base import Algorithm


@dataclasses.dataclass(eq=False)
class DecentralizedAlgorithm(Algorithm, name="decentralized"):
    """Averages weights: x <- the mean of the neighbours' x and the rank's x, followed by the optimizer's step.

    Args:
        hierarchical: average among nodes instead of ranks, each with the mean of its ranks.
        peer_selection_mode: "all", or "shift_one" for pairs that change in every step.
        communication_interval: the number of steps from one exchange to the next.

    Raises:
        InvalidArgument: an option out of range.
    """

    hierarchical: bool = True
    peer_selection_mode: str = "all"
    communication_interval: int = 1

    def create(self) -> algorithms.Algorithm:
        if self.peer_selection_mode not in ("all", "shift_one"):
            raise InvalidArgument(
                f"peer_selection_mode is {self.peer_selection_mode!r}, expected 'all' or 'shift_one'; "
                "bagua.with_bagua(model, optimizers, algorithm='decentralized', topology=...) has more topologies"
            )
        options = {
            "topology": self.peer_selection_mode,
            "interval": self.communication_interval,
            "hierarchical": self.hierarchical,
        }
        return algorithms.create("decentralized", options)


@dataclasses.dataclass(eq=False)
class LowPrecisionDecentralizedAlgorithm(Algorithm, name="low_precision_decentralized"):
    """Sends the change of the weights to both neighbours on a ring, in 8 bits per element.

    Args:
        hierarchical: has no effect, since the ring is always one of ranks. The original's default is a ring of nodes,
            so True gives one warning if a node has several ranks.
        communication_interval: the number of steps from one exchange to the next.

    Raises:
        InvalidArgument: an option out of range.
    """

    hierarchical: bool = True
    communication_interval: int = 1

    def create(self) -> algorithms.Algorithm:
        if not isinstance(self.hierarchical, bool):
            raise InvalidArgument(f"hierarchical is {self.hierarchical!r}, expected True or False")
        return algorithms.create("low_precision_decentralized", {"interval": self.communication_interval})

    def reify(self, process_group: ProcessGroup) -> algorithms.Algorithm:
        if self.hierarchical and len(process_group.nodes.members) < process_group.size:
            _warn_about_hierarchy()
        return self.create()


@functools.cache  # once per process, not once per model
def _warn_about_hierarchy() -> None:
    warnings.warn(
        "LowPrecisionDecentralizedAlgorithm: hierarchical=True, which is the default, is not supported. Weights are "
        "not averaged inside each node first; all ranks exchange differences on one ring, so weights differ inside a "
        "node, and take longer to converge. Pass hierarchical=False to accept this, or use DecentralizedAlgorithm, "
        "which is hierarchical, at full precision"
    )
