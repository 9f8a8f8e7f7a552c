"""``model.with_bagua`` and what else the original project puts on torch.nn.Module; importing this file puts it there.

Data path: the caller -> **here** -> bagua.with_bagua. Invariant: the one place of the package that changes a class of
torch; it adds names and replaces none of torch's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bagua import data_parallel
from bagua.bucket import Bucket
from bagua.errors import InvalidArgument
from bagua.handle import BaguaHandle
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.process_group import BaguaProcessGroup, native_group

__all__ = ["BaguaModule"]


class _Choice(NamedTuple):
    """What a model was wrapped with."""

    algorithm: Algorithm
    optimizers: list[torch.optim.Optimizer]


_choices: weakref.WeakKeyDictionary[BaguaHandle, _Choice] = weakref.WeakKeyDictionary()


class BaguaModule:
    """What importing bagua.torch_api adds to every torch.nn.Module."""

    def with_bagua(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | None = None,
        do_flatten: bool = True,
    ) -> torch.nn.Module:
        """Makes this module train in step with the same module on the other ranks; collective.

        Args:
            optimizers: those that step its parameters.
            algorithm: an instance of a class of bagua.torch_api.algorithms.
            process_group: the ranks to train with; all by default.
            do_flatten: True; gradients always lie in the buckets.

        Returns:
            The module itself. Its ``bagua_algorithm``, ``bagua_optimizers`` and ``bagua_buckets`` are those of now on.

        Raises:
            InvalidArgument: as bagua.with_bagua; and for an argument that cannot be honoured.

        Example:
            >>> model = model.with_bagua([optimizer], bytegrad.ByteGradAlgorithm())    # doctest: +SKIP
        """
        if not do_flatten:
            raise InvalidArgument(
                "do_flatten=False cannot be honoured: gradients are always views of the buckets; leave it out"
            )
        group = native_group(process_group)
        choice = choose(self, optimizers, algorithm)
        data_parallel.with_bagua(self, choice.optimizers, algorithm=choice.algorithm.reify(group), group=group)
        remember(self, choice)
        return self

    @property
    def bagua_algorithm(self) -> Algorithm:
        """The algorithm that it was wrapped with."""
        return _choice_of(self).algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that it was wrapped with."""
        return _choice_of(self).optimizers

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they travel."""
        return list(self.bagua.buckets)


def choose(module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm) -> _Choice:
    """Checks what a module is to be wrapped with.

    Raises:
        InvalidArgument: the algorithm is none of the original's classes, or parameters are to be left out.
    """
    if not isinstance(algorithm, Algorithm):
        raise InvalidArgument(
            f"algorithm is a {type(algorithm).__name__}, expected one of bagua.torch_api.algorithms, such as "
            "bytegrad.ByteGradAlgorithm(); bagua.with_bagua takes names and algorithms of your own"
        )
    for name in ("_bagua_params_and_buffers_to_ignore", "_ddp_params_and_buffers_to_ignore"):
        if ignored := getattr(module, name, None):
            raise InvalidArgument(
                f"{name} names {sorted(ignored)[:4]}, but every parameter that requires a gradient is synchronised; "
                "freeze them (requires_grad_(False)), or keep them out of the module that is wrapped"
            )
    given = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    return _Choice(algorithm, list(algorithm.optimizers(given)))


def remember(module: torch.nn.Module, choice: _Choice) -> None:
    """For the properties of a module that has been wrapped."""
    _choices[module.bagua] = choice


def _choice_of(module: torch.nn.Module) -> _Choice:
    handle = getattr(module, "bagua", None)
    if not isinstance(handle, BaguaHandle) or handle not in _choices:
        raise AttributeError("no attribute of a module that with_bagua has not wrapped")
    return _choices[handle]


def _extend_torch() -> None:
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            # torch.jit.script compiles the properties of every class but those that are marked.
            setattr(torch.nn.Module, name, torch.jit.unused(member) if isinstance(member, property) else member)


_extend_torch()
