"""What algorithms share that exchange weights, all ranks in the same optimizer step: counted steps, skipped steps.

Data path: policy. No algorithm by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bagua.algorithms._hooks import Training
from bagua.algorithms.base import Algorithm
from bagua.errors import InvalidArgument


@dataclasses.dataclass(kw_only=True)
class ExchangedWeights(Algorithm):
    """Counts the steps of every optimizer.

    Args:
        skip_together: whether a step that one rank's GradScaler skips is skipped by all: they agree at the end of each
            backward, in a message of a byte per optimizer, which waits for the slowest rank. By default they do while a
            GradScaler of torch.amp makes the steps, and until every optimizer has made one and a backward has followed,
            which shows whether one does. True: with another scaler, or one that comes into use later. False: each rank
            skips its own.
    """

    exchanges = "weights"

    skip_together: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skip_together, (bool, type(None))):
            raise InvalidArgument(f"skip_together is {self.skip_together!r}, expected True, False or None")

    def attach(self, training: Training) -> None:
        super().attach(training)
        self.num_steps = [0] * len(training.optimizers)

    def index_of(self, optimizer: torch.optim.Optimizer) -> int:
        """The index of an optimizer among those that were passed to with_bagua."""
        return next(index for index, other in enumerate(self.training.optimizers) if other is optimizer)

    def skips_together(self) -> bool | None:
        return self.skip_together

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": list(self.num_steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = loaded_steps(state, self.training)


def loaded_steps(state: dict[str, Any], training: Training) -> list[int]:
    """``num_steps`` of a checkpoint. Raises InvalidArgument unless it is of as many optimizers."""
    if len(state["num_steps"]) != len(training.optimizers):
        raise InvalidArgument(
            f"the checkpoint was written with {len(state['num_steps'])} optimizers, the model has "
            f"{len(training.optimizers)}; pass the same ones to with_bagua"
        )
    return list(state["num_steps"])
