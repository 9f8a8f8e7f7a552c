"""Transformers: ``BaguaTrainer`` in the place of ``transformers.Trainer``, or ``BaguaMixin`` before another Trainer.

The model is wrapped where Trainer wraps it itself; then Accelerate puts no DDP around it. Accumulation calls
``no_sync`` of the wrapped model, and what Trainer scales by ``num_items_in_batch`` is a mean of ranks as under DDP.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers

import bagua
from bagua.integrations.accelerate import prepare_model
from bagua.integrations.rank_states import RankStates

__all__ = ["BaguaMixin", "BaguaTrainer"]

_FILE = "bagua.pt"  # beside optimizer.pt


class BaguaMixin:
    """The methods of a Trainer that synchronises its model by an algorithm of bagua.

    A subclass names the mixin first. ``trainer.model_wrapped.bagua`` is the handle. Of the training arguments
    ``ddp_find_unused_parameters`` (by default False), ``ddp_bucket_cap_mb`` and ``ddp_broadcast_buffers`` are honoured.

    Args:
        args, kwargs: the Trainer's own.
        algorithm: a name from ``bagua.algorithms.available()``, or an instance.

    Example:
        >>> class MyTrainer(BaguaMixin, transformers.Trainer):
        ...     "A Trainer with methods of its own, or of another package."
    """

    def __init__(
        self, *args: Any, algorithm: str | bagua.algorithms.Algorithm = "gradient_allreduce", **kwargs: Any
    ) -> None:
        self._algorithm = algorithm
        super().__init__(*args, **kwargs)

    def _wrap_model(self, model: torch.nn.Module, training: bool = True, dataloader: Any = None) -> torch.nn.Module:
        if not training:
            return super()._wrap_model(model, training, dataloader)
        if self.args.torch_compile:
            raise bagua.InvalidArgument(
                "torch_compile=True is not supported; pass a model that is compiled, by "
                "model.compile(backend=bagua.compile_backend())"
            )
        prepare_model(self.accelerator, self.model)
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # of Accelerate's, after an earlier train()
        wrapped = bagua.DistributedDataParallel(
            self.model,
            algorithm=self._algorithm,
            optimizers=[optimizer],
            find_unused_parameters=bool(self.args.ddp_find_unused_parameters),
            bucket_cap_mb=self.args.ddp_bucket_cap_mb,
            broadcast_buffers=self.args.ddp_broadcast_buffers,
        )
        self._states = RankStates(wrapped, [optimizer])
        return wrapped

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        states = self._states.state_dict()
        if self.args.should_save:
            torch.save(states, os.path.join(output_dir, _FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and os.path.isfile(path := os.path.join(checkpoint, _FILE)):
            self._states.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))


class BaguaTrainer(BaguaMixin, transformers.Trainer):
    """A ``transformers.Trainer`` with the argument ``algorithm`` of BaguaMixin."""
