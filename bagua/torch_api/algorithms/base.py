"""The base class of the algorithm classes: an instance holds options, from which each model gets an algorithm of bagua.

Invariant: options have the original project's names and defaults, and one that cannot be honoured is refused when the
class is called.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from bagua import algorithms
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument

__all__ = ["Algorithm"]


@dataclasses.dataclass(eq=False)
class Algorithm:
    """The base class. One instance may serve several models."""

    _by_name: ClassVar[dict[str, type[Algorithm]]] = {}

    def __init_subclass__(cls, name: str = "") -> None:
        if not name:
            raise InvalidArgument(
                f"{cls.__name__}: your own algorithms are subclasses of bagua.algorithms.Algorithm, "
                "see docs/plugins.md, and run by bagua.with_bagua"
            )
        Algorithm._by_name[name] = cls

    def __post_init__(self) -> None:
        self.create()

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """Returns the algorithm of that name, with options.

        Raises:
            InvalidArgument: the original has no algorithm of that name; bagua.with_bagua has more.

        Example:
            >>> Algorithm.init("bytegrad", hierarchical=False)
            ByteGradAlgorithm(hierarchical=False, average=True)
        """
        if name not in cls._by_name:
            raise InvalidArgument(f"algorithm {name!r} is not one of {', '.join(sorted(cls._by_name))}")
        return cls._by_name[name](**kwargs)

    def create(self) -> algorithms.Algorithm:
        """Creates the algorithm of bagua with these options."""
        raise NotImplementedError(f"{type(self).__name__}.create")

    def reify(self, process_group: ProcessGroup) -> algorithms.Algorithm:
        """Creates the algorithm for a model that trains in this group."""
        return self.create()

    def optimizers(self, given: Sequence[torch.optim.Optimizer]) -> Sequence[torch.optim.Optimizer]:
        """Returns the model's optimizers; ``given`` are those passed with the model."""
        return given
