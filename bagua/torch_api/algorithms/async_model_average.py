"""async_model_average: weights are averaged in the background, periodically. Runs bagua's algorithm ``async``."""

from __future__ import annotations

import dataclasses

import torch

from bagua import algorithms
from bagua.data_parallel.handle import BaguaHandle, handle_of
from bagua.errors import InvalidArgument
from bagua.torch_api.algorithms.base import Algorithm

__all__ = ["AsyncModelAverageAlgorithm"]


@dataclasses.dataclass(eq=False)
class AsyncModelAverageAlgorithm(Algorithm, name="async"):
    """Averages weights in rounds: x <- x + (mean over ranks of x~ - x~), where x~ is x at the start of the round.

    Args:
        peer_selection_mode: "all".
        sync_interval_ms: milliseconds from one round to the next, at least 1.
        warmup_steps: the number of first steps that average gradients instead.

    Raises:
        InvalidArgument: an option out of range.
    """

    peer_selection_mode: str = "all"
    sync_interval_ms: int = 500
    warmup_steps: int = 0

    def create(self) -> algorithms.Algorithm:
        if self.peer_selection_mode != "all":
            raise InvalidArgument(f"peer_selection_mode is {self.peer_selection_mode!r}, expected 'all'")
        if isinstance(self.sync_interval_ms, bool) or not isinstance(self.sync_interval_ms, (int, float)):
            raise InvalidArgument(f"sync_interval_ms is {self.sync_interval_ms!r}, expected a number of milliseconds")
        if not self.sync_interval_ms > 0:
            raise InvalidArgument(
                f"sync_interval_ms is {self.sync_interval_ms}, with which the original never averages; expected 1 or "
                "more. bagua.with_bagua(model, optimizers, algorithm='async', sync_interval=0) averages back to back"
            )
        options = {"sync_interval": self.sync_interval_ms / 1000, "warmup_steps": self.warmup_steps}
        return algorithms.create("async", options)

    def abort(self, bagua_ddp: torch.nn.Module) -> None:
        """Pauses the averaging until ``resume``; collective, idempotent. Call it before weights are saved or compared.

        Args:
            bagua_ddp: the wrapped model.

        Raises:
            InvalidArgument: the model does not train with this algorithm.
        """
        _handle(bagua_ddp).pause()

    def resume(self, bagua_ddp: torch.nn.Module) -> None:
        """Resumes the averaging after ``abort``; collective, idempotent."""
        _handle(bagua_ddp).resume()


def _handle(model: torch.nn.Module) -> BaguaHandle:
    handle = handle_of(model)
    if handle is None:
        raise InvalidArgument(f"this {type(model).__name__} has not been wrapped; call with_bagua first")
    return handle
