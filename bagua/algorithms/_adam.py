"""The options of Adam, which an algorithm and its optimizer ``bagua.optim.QAdam`` share.

Data path: policy. No algorithm by itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from bagua import optim
from bagua.algorithms.base import Algorithm, Training
from bagua.buckets import Bucket, Member
from bagua.errors import InvalidArgument


@dataclasses.dataclass(kw_only=True)
class AdamOptions(Algorithm):
    """Options that may be given to the algorithm or to ``bagua.optim.QAdam``; given to both they must be equal."""

    optimizer_class = optim.QAdam
    warmup_steps: int | str | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    variance_floor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        optim.check_options(self.adam_options())

    def adam_options(self) -> dict[str, Any]:
        """Returns those that were given to the algorithm, by name."""
        options = self.options()
        return {name: options[name] for name in optim.DEFAULTS if options.get(name) is not None}

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().check(optimizers)
        for index, optimizer in enumerate(optimizers):
            optimizer.check_given(self.adam_options(), f"algorithm {self.name!r}", f"optimizers[{index}]")
            if any(hasattr(p, "to_local") for options in optimizer.param_groups for p in options["params"]):
                raise InvalidArgument(
                    f"algorithm {self.name!r} steps no DTensors; take 'bytegrad' or 'qsgd' and an optimizer of torch "
                    "for them"
                )

    def attach(self, training: Training) -> None:
        super().attach(training)
        # The index of a parameter's optimizer, and of its group there, since load_state_dict makes new groups.
        self.places = {
            id(parameter): (index, number)
            for index, optimizer in enumerate(training.optimizers)
            for number, options in enumerate(optimizer.param_groups)
            for parameter in options["params"]
        }

    def optimizer_of(self, member: Member) -> tuple[optim.QAdam, dict[str, Any]]:
        """Returns the optimizer of a parameter, and its group."""
        index, number = self.places[id(member.parameter)]
        optimizer = self.training.optimizers[index]
        return optimizer, optimizer.param_groups[number]

    def begin(self, buckets: Sequence[Bucket]) -> None:
        for optimizer in self.training.optimizers:
            optimizer.set_options(self.adam_options())
        super().begin(buckets)


def training_groups(optimizer: optim.QAdam) -> list[dict[str, Any]]:
    """Returns the parameter groups of which not all is frozen."""
    return [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]


def warmup_of_all(optimizer: optim.QAdam) -> float:
    """Returns the steps of the longest warm-up of its ``training_groups``."""
    return max(map(optim.warmup_of, training_groups(optimizer)), default=0)
