"""Whether a model still has the modules, parameters and buffers that it had, found out in microseconds.

Beside the data path. What modules hold is looked at in their own dicts, and compared by identity, not by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import methodcaller
from typing import Any

import torch

__all__ = ["ModuleTree", "compiled_from"]

_keys, _values = methodcaller("keys"), methodcaller("values")


def compiled_from(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside what torch.compile has returned; any other model itself."""
    return getattr(model, "_orig_mod", model)


class ModuleTree:
    """The modules of a model as it is now, each once, in the order of compiled_from(model).modules().

    Args:
        model: not held, only its dicts, nor what is inside of one that torch.compile returned: they hold who has this.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        modules = [*compiled_from(model).modules()]
        self._modules = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._buffers = [module._buffers for module in modules]
        self._children = [*self._children_now()]  # so that none of their ids becomes another's
        self._child_ids, self._parameter_ids = [*map(id, self._children)], self._parameter_ids_now()

    def has_same_modules(self) -> bool:
        """Whether every module has the same children as before."""
        return self._child_ids == [*map(id, self._children_now())]

    def has_same_parameters(self) -> bool:
        """Whether they have the same parameters, too, as long as these live."""
        return self.has_same_modules() and self._parameter_ids == self._parameter_ids_now()

    def buffer_names(self) -> list[str]:
        """Of all modules, the names that they have there."""
        return [*chain.from_iterable(map(_keys, self._buffers))]

    def buffers(self) -> list[Any]:
        """The same buffers; what is registered as None, too, and what is in two places twice."""
        return [*chain.from_iterable(map(_values, self._buffers))]

    def _children_now(self) -> Iterable[torch.nn.Module | None]:
        return chain.from_iterable(map(_values, self._modules))

    def _parameter_ids_now(self) -> list[int]:
        return [*map(id, chain.from_iterable(map(_values, self._parameters)))]
