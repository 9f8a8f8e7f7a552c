"""Weights are averaged among neighbours, at full precision or as 8-bit differences. Runs bagua's ``decentralized`` and
``low_precision_decentralized``, of which the second knows no hierarchy: that is said in a warning where it matters.
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
    """x <- the mean of the neighbours' x and its own, and then the optimizer's step on it.

    Args:
        hierarchical: nodes take the place of ranks, each with the mean of its ranks.
        peer_selection_mode: "all", or "shift_one": pairs that change.
        communication_interval: every so many steps.

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
                "bagua.with_bagua(model, optimizers, algorithm='decentralized', topology=...) knows more"
            )
        options = {
            "topology": self.peer_selection_mode,
            "interval": self.communication_interval,
            "hierarchical": self.hierarchical,
        }
        return algorithms.create("decentralized", options)


@dataclasses.dataclass(eq=False)
class LowPrecisionDecentralizedAlgorithm(Algorithm, name="low_precision_decentralized"):
    """The ranks tell both their neighbours on a ring, in 8 bits per element, how far their weights have moved.

    Args:
        hierarchical: either value; the ring is always one of ranks. The original makes it one of nodes by default, so
            True is warned of once where a node has several ranks.
        communication_interval: every so many steps.

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
            _warn_of_the_ring()
        return self.create()


@functools.cache  # once per process, not once per model
def _warn_of_the_ring() -> None:
    warnings.warn(
        "LowPrecisionDecentralizedAlgorithm: hierarchical=True, which is the default, is not supported. Weights are "
        "not averaged inside each node first; all ranks exchange differences on one ring, so those of one node differ, "
        "and take longer to agree. Pass hierarchical=False, which asks for that ring, to accept this; or use "
        "DecentralizedAlgorithm, which is hierarchical, at full precision"
    )
