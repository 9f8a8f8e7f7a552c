"""``model.bagua_ddp`` of the original project, which holds the arguments that a model was wrapped with.

Training itself is done by ``model.bagua``. Invariants: each wrap has one, found by the model's handle, so a copy of the
model has none; it holds a weak reference to the model, because the table of them must not keep models alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bagua.buckets import Bucket
from bagua.data_parallel.handle import BaguaHandle
from bagua.errors import InvalidArgument
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.process_group import BaguaProcessGroup

__all__ = ["BaguaDistributedDataParallel", "wrapped"]

_of_handle: weakref.WeakKeyDictionary[BaguaHandle, BaguaDistributedDataParallel] = weakref.WeakKeyDictionary()


class BaguaDistributedDataParallel:
    """The arguments of a wrapped model; made by with_bagua and DistributedDataParallel, not by hand.

    Attributes:
        bagua_algorithm: the instance that was passed.
        bagua_optimizers: the optimizers of the model's parameters.
        process_group: the ranks that train together.
        parameters_to_ignore: always empty, because parameters to ignore are refused.

    Raises:
        InvalidArgument: the algorithm is none of the original's classes, or parameters are to be ignored.

    Example:
        >>> model.bagua_ddp.bagua_train_step_counter                              # doctest: +SKIP
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup,
    ) -> None:
        _check(module, algorithm)
        given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self.bagua_algorithm = algorithm
        self.bagua_optimizers = list(algorithm.optimizers(given))
        self.process_group = process_group
        self.parameters_to_ignore: list[str] = []
        self._module = weakref.ref(module)
        self._forwards = _TrainingForwards()
        self._hook: Any = None
        self._earlier = wrapped(module)

    def begin(self) -> None:
        """Makes this the ``bagua_ddp`` of the module, which has been wrapped."""
        module = self.module
        if self._earlier is not None:
            self._earlier._hook.remove()
            self._earlier = None
        self._hook = module.register_forward_pre_hook(self._forwards)
        if "_bagua_module_name" not in vars(module):
            module.bagua_module_name = f"{type(module).__name__}_{id(module)}"
        _of_handle[module.bagua] = self

    @property
    def module(self) -> torch.nn.Module:
        """The model; None after it was deleted."""
        return self._module()

    @property
    def bagua(self) -> BaguaHandle:
        """The model's handle, for functions that the original does not have."""
        return self.module.bagua

    @property
    def bagua_module_name(self) -> str:
        """The model's label."""
        return self.module.bagua_module_name

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are sent."""
        return list(self.bagua.buckets)

    @property
    def bagua_train_step_counter(self) -> int:
        """The number of forwards in training mode since the model was wrapped."""
        return self._forwards.num

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backwards synchronise; setting it to False has the effect of no_sync until it is True again."""
        return self.bagua.reducer.synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.bagua.reducer.synchronises = bool(value)


class _TrainingForwards:
    """A module hook that counts forwards; a copy of the module has its own count."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, module: torch.nn.Module, args: tuple) -> None:
        if module.training:
            self.num += 1


def wrapped(module: torch.nn.Module) -> BaguaDistributedDataParallel | None:
    """Returns the ``bagua_ddp`` of a module; None if its current wrap was not made by this package."""
    handle = getattr(module, "bagua", None)
    return _of_handle.get(handle) if isinstance(handle, BaguaHandle) else None


def _check(module: torch.nn.Module, algorithm: Algorithm) -> None:
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(
            f"algorithm is a {type(algorithm).__name__}, expected one of bagua.torch_api.algorithms, such as "
            "bytegrad.ByteGradAlgorithm(); bagua.with_bagua takes names and your own algorithms"
        )
    for name in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        if ignored := getattr(module, name, None):
            raise InvalidArgument(
                f"{name} names {sorted(ignored)[:4]}, but every parameter that requires a gradient is synchronised; "
                "freeze them (requires_grad_(False)), or keep them out of the module that is wrapped"
            )
