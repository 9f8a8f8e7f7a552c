"""QAdam: Adam whose momentum is sent in 8 bits after a warm-up. Runs bagua's ``qadam`` with ``bagua.optim.QAdam``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bagua import algorithms
from bagua.errors import InvalidArgument
from bagua.optim import QAdam
from bagua.torch_api.algorithms.base import Algorithm


class QAdamOptimizer(QAdam):
    """The optimizer bagua.optim.QAdam with the original's argument order.

    Args:
        params, lr, warmup_steps, betas, eps, weight_decay: as for Adam; warmup_steps is at least 1.

    Raises:
        InvalidArgument: an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, warmup_steps, betas, eps, weight_decay)

    @property
    def warmup_steps(self) -> int:
        """The number of steps before the momentum is sent in 8 bits; to change it, set it in all ``param_groups``."""
        return self.param_groups[0]["warmup_steps"]


@dataclasses.dataclass(eq=False)
class QAdamAlgorithm(Algorithm, name="qadam"):
    """Averages gradients in the warm-up, then the momentum: m <- mean over ranks of Q(m).

    Args:
        q_adam_optimizer: the model's optimizer.
        hierarchical: reduce inside each node at full precision first; only messages between nodes are encoded.

    Raises:
        InvalidArgument: the optimizer is no QAdam.
    """

    q_adam_optimizer: QAdam
    hierarchical: bool = True

    @property
    def optimizer(self) -> QAdam:
        """An alias of ``q_adam_optimizer``."""
        return self.q_adam_optimizer

    def create(self) -> algorithms.Algorithm:
        if not isinstance(self.q_adam_optimizer, QAdam):
            raise InvalidArgument(
                f"q_adam_optimizer is a {type(self.q_adam_optimizer).__name__}, expected a QAdamOptimizer"
            )
        return algorithms.create("qadam", {"hierarchical": self.hierarchical})

    def optimizers(self, given: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        if given and not any(optimizer is self.q_adam_optimizer for optimizer in given):
            raise InvalidArgument(
                "q_adam_optimizer is not among the optimizers that were passed with the model; pass it"
            )
        return given or [self.q_adam_optimizer]
