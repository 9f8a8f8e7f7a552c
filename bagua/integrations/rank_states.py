"""The part of a training's state that is different on each rank, for trainers whose checkpoint one rank writes.

It is what an algorithm remembers (``model.bagua.state_dict()``) and, where weights are exchanged, the rank's weights
and optimizer states, which trainers take from rank 0 alone. Rank 0 gathers it, so that it is part of the trainer's
checkpoint, which can be moved, linked and deleted as before; meanwhile it holds the parts of all ranks in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

__all__ = ["RankStates"]


class RankStates:
    """The parts of all ranks, under the methods that trainers call for an object of a checkpoint.

    Args:
        model: what ``with_bagua`` has wrapped.
        optimizers: those of ``with_bagua``.
    """

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.model, self.optimizers = model, list(optimizers)
        self._last: dict[str, Any] | None = None  # this rank's part when the training ended

    def end(self) -> None:
        """Ends the synchronisation; ``state_dict`` returns the states of now from then on."""
        handle = self.model.bagua
        handle.remove()
        self._last = self._own(handle)

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the parts of all ranks on rank 0, their tensors on the CPU, and nothing elsewhere; collective."""
        own = self._last
        if own is None:
            handle = self.model.bagua
            in_background = hasattr(handle.algorithm, "pause") and not handle.algorithm.is_paused
            if in_background:
                handle.pause()
            own = self._own(handle)
            if in_background:
                own = copy.deepcopy(own)
                handle.resume()
        if not dist.is_initialized():  # one rank
            return [own]
        states: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
        dist.gather_object(own, states or None)
        return states

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Restores this rank's part; collective, on states of all ranks, after the trainer's own have been loaded.

        On another number of ranks residuals are shared out, and where weights are exchanged all ranks begin from the
        mean of the weights and of the optimizers' states, as ``bagua.load`` does.

        Raises:
            InvalidArgument: they belong to another algorithm or model.
        """
        handle = self.model.bagua
        with handle.adopted(lambda: states[0]["bagua"].get("choice")):
            own = states[handle.group.rank] if len(states) == handle.group.size else handle.training_of_all(states)
            if "model" in own:
                self.model.load_state_dict(own["model"])
                for optimizer, state in zip(self.optimizers, own["optimizers"], strict=True):
                    optimizer.load_state_dict(state)
            handle.load_state_dict(own["bagua"])

    def _own(self, handle: Any) -> dict[str, Any]:
        own = {"bagua": handle.state_dict()}
        if handle.algorithm.exchanges == "weights":
            own["model"] = self.model.state_dict()
            own["optimizers"] = [optimizer.state_dict() for optimizer in self.optimizers]
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), own)
