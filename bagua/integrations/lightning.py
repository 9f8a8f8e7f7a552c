"""Lightning: ``Trainer(strategy="bagua")`` after ``import bagua.integrations.lightning``.

``BaguaStrategy`` is Lightning's DDPStrategy with ``bagua.DistributedDataParallel`` in the place of torch's. The backend
"bagua" of torch.distributed carries what Lightning itself reduces and broadcasts (``sync_dist``, barriers, ...).
Invariant: one call of the wrapped model is one ``training_step``; what a step calls inside of it is not counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

import bagua
from bagua.integrations.rank_states import RankStates
from bagua.integrations.world import join_world

__all__ = ["BaguaStrategy"]

_KEY = "bagua"  # of a checkpoint
_REFUSED = {
    "ddp_comm_hook": "the algorithm decides what is sent; for a hook of torch's DDP take DDPStrategy, which registers "
    "it on CUDA and ignores it on the CPU",
    "ddp_comm_state": "it belongs to ddp_comm_hook",
    "ddp_comm_wrapper": "it belongs to ddp_comm_hook",
    "model_averaging_period": 'take BaguaStrategy("local_sgd", sync_every=...)',
}


class BaguaStrategy(DDPStrategy):
    """Trains a LightningModule as Lightning's DDPStrategy does, with an algorithm of bagua.

    ``trainer.model.bagua`` is the handle of the wrapped module (``weight``, ``timeline``, ...). Checkpoints have the
    algorithm's state of each rank.

    Args:
        algorithm: a name from ``bagua.algorithms.available()``, or an instance.
        options: those of the algorithm; of ``bagua.DistributedDataParallel``, such as ``find_unused_parameters`` and
            ``bucket_cap_mb``; and of DDPStrategy, such as ``timeout``, ``start_method`` and ``process_group_backend``,
            by default "bagua".

    Raises:
        InvalidArgument: an option of DDPStrategy that cannot be honoured. Wrong options of the algorithm raise when
            ``fit`` wraps the module.

    Example:
        >>> strategy = BaguaStrategy("bytegrad", codec="onebit", error_feedback=True)
        >>> trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    """

    def __init__(self, algorithm: str | bagua.algorithms.Algorithm = "gradient_allreduce", **options: Any) -> None:
        for name in sorted(_REFUSED.keys() & options.keys()):
            raise bagua.InvalidArgument(f"BaguaStrategy has no option {name!r}: {_REFUSED[name]}")
        super().__init__(**{"process_group_backend": "bagua", **options})
        self._algorithm = algorithm
        self._states: RankStates | None = None  # of the last fit

    def setup_distributed(self) -> None:
        """Connects the ranks, by torch.distributed and by bagua."""
        super().setup_distributed()
        join_world()

    def configure_ddp(self) -> None:
        """Does nothing: the module is wrapped when its optimizers exist."""

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and wraps the module."""
        super().setup_optimizers(trainer)
        self.model = self._setup_model(self.model)

    def _setup_model(self, model: torch.nn.Module) -> bagua.DistributedDataParallel:
        wrapped = bagua.DistributedDataParallel(
            _Step(model), algorithm=self._algorithm, optimizers=self.optimizers, **self._ddp_kwargs
        )
        self._states = RankStates(wrapped, self.optimizers)
        return wrapped

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keeps the backwards of micro-batches local."""
        with self.model.no_sync():
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Saves a checkpoint, which has the states of all ranks unless it has weights only; collective."""
        if self._states is not None and "optimizer_states" in checkpoint:
            checkpoint[_KEY] = self._states.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loads the optimizers' states, and then this rank's, if the checkpoint has them."""
        super().load_optimizer_state_dict(checkpoint)
        if _KEY in checkpoint:
            self._states.load_state_dict(checkpoint[_KEY])

    def teardown(self) -> None:
        """Ends the synchronisation; ``trainer.save_checkpoint`` still finds the states."""
        if isinstance(self.model, bagua.DistributedDataParallel):
            self._states.end()
            self.model = self.lightning_module
        super().teardown()


class _Step(torch.nn.Module):
    """The module that is wrapped: its call is a ``training_step``, which may call ``module`` any number of times."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


StrategyRegistry.register("bagua", BaguaStrategy, description="DDPStrategy with the algorithms of bagua")
