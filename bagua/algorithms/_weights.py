"""The counted steps of algorithms that exchange weights, all ranks in the same optimizer step.

Data path: policy. No algorithm by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Training
from bagua.errors import InvalidArgument


@dataclasses.dataclass(kw_only=True)
class ExchangedWeights(Algorithm):
    """Counts the steps of every optimizer.

    A step that a GradScaler skips is none, so ranks must skip alike: ``bagua.amp.GradScaler`` does.
    """

    exchanges = "weights"

    def attach(self, training: Training) -> None:
        super().attach(training)
        self.num_steps = [0] * len(training.optimizers)

    def index_of(self, optimizer: torch.optim.Optimizer) -> int:
        """The index of an optimizer among those that were passed to with_bagua."""
        return next(index for index, other in enumerate(self.training.optimizers) if other is optimizer)

    def count_step(self, optimizer: torch.optim.Optimizer, interval: int) -> int:
        """Counts a step of ``optimizer``; returns its number if one of every ``interval`` is due, the first, else 0."""
        index = self.index_of(optimizer)
        self.num_steps[index] += 1
        return self.num_steps[index] if (self.num_steps[index] - 1) % interval == 0 else 0

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
