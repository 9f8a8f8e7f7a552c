"""Accelerate: ``prepare(accelerator, model, optimizer, ...)`` in the place of ``accelerator.prepare``.

Accelerate moves the model and sets its precision, but puts no DDP around it; with_bagua synchronises it. The rest is
Accelerate's: it finds ``model.no_sync`` for ``accelerator.accumulate``, and its ``save_state`` and ``load_state`` have
the algorithm's state of each rank.
"""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedType

import bagua
from bagua.integrations.rank_states import RankStates
from bagua.integrations.world import join_world

__all__ = ["prepare", "prepare_model"]


def prepare(
    accelerator: accelerate.Accelerator,
    *objects: Any,
    algorithm: str | bagua.algorithms.Algorithm = "gradient_allreduce",
    **options: Any,
) -> Any:
    """Prepares one model, its optimizers and other objects as ``accelerator.prepare`` does; collective.

    Args:
        accelerator: for several processes, or for one.
        objects: a model, all optimizers that step its parameters, data loaders, schedulers, ...
        algorithm: a name from ``bagua.algorithms.available()``, or an instance.
        options: further arguments of ``bagua.with_bagua``: the algorithm's options, ``find_unused_parameters``, ...

    Returns:
        The objects, prepared, in their order. The model is in no other module: ``model.bagua`` is its handle.

    Raises:
        InvalidArgument: there is not one model; or as ``bagua.with_bagua``.

    Example:
        >>> accelerator = accelerate.Accelerator(cpu=True)
        >>> model, optimizer = prepare(accelerator, model, optimizer, algorithm="bytegrad")
        >>> model.bagua.algorithm.name
        'bytegrad'
    """
    models = [one for one in objects if isinstance(one, torch.nn.Module)]
    if len(models) != 1:
        raise bagua.InvalidArgument(
            f"prepare got {len(models)} models, expected one with its optimizers; prepare those that do not train by "
            "accelerator.prepare_model(model, evaluation_mode=True)"
        )
    model = prepare_model(accelerator, models[0])
    others = [one for one in objects if one is not models[0]]
    optimizers = [one for one in others if isinstance(one, torch.optim.Optimizer)]
    bagua.with_bagua(model, optimizers, algorithm=algorithm, **options)
    accelerator.register_for_checkpointing(RankStates(model, optimizers))
    rest = iter([accelerator.prepare(*others)] if len(others) == 1 else accelerator.prepare(*others) if others else [])
    prepared = tuple(model if one is models[0] else next(rest) for one in objects)
    return prepared if len(prepared) > 1 else prepared[0]


def prepare_model(accelerator: accelerate.Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    """Prepares a model as ``accelerator.prepare_model`` does, without a DDP around it; ``with_bagua`` is to follow.

    Raises:
        InvalidArgument: the accelerator is for FSDP, DeepSpeed, ...
    """
    kind = accelerator.distributed_type
    if kind not in (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise bagua.InvalidArgument(
            f"the Accelerator is for {kind.value}, but bagua takes the place of DDP; leave one out"
        )
    join_world()
    return accelerator.prepare_model(model, evaluation_mode=True)  # as for evaluation, Accelerate leaves out its DDP
