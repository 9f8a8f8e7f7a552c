"""Ray Train: ``TorchTrainer(..., torch_config=BaguaConfig())``, and ``bagua.with_bagua`` in the training function.

The workers' torch.distributed has the backend "bagua", so bagua is initialised in them too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ray.train.torch import TorchConfig

import bagua

__all__ = ["BaguaConfig"]


class _BaguaBackend(TorchConfig().backend_cls):
    """Ray's backend for torch, whose workers import bagua first; torch before 2.14 does not find its backend itself."""

    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(bagua.torch_backend.register)
        super().on_start(worker_group, backend_config)


@dataclasses.dataclass
class BaguaConfig(TorchConfig):
    """Ray's TorchConfig with the backend "bagua".

    Example:
        >>> BaguaConfig(timeout_s=60).backend
        'bagua'
    """

    backend: str | None = "bagua"

    @property
    def backend_cls(self) -> type:
        return _BaguaBackend
