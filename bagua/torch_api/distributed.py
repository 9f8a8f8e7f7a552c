"""``model.with_bagua`` and the properties that the original project adds to torch.nn.Module; importing this adds them.

Data path: the caller -> **here** -> bagua.with_bagua. Invariant: no other file of the package changes a class of torch;
this one adds names and replaces none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua import data_parallel
from bagua.buckets import Bucket
from bagua.errors import InvalidArgument
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel, wrapped
from bagua.torch_api.process_group import BaguaProcessGroup, to_bagua_process_group

__all__ = ["BaguaModule"]


class BaguaModule:
    """The members that importing bagua.torch_api adds to every torch.nn.Module."""

    def with_bagua(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm,
        process_group: BaguaProcessGroup | None = None,
        do_flatten: bool = True,
    ) -> torch.nn.Module:
        """Makes this module train in step with the same module on the other ranks; collective.

        Args:
            optimizers: the optimizers of its parameters.
            algorithm: an instance of a class of bagua.torch_api.algorithms.
            process_group: the ranks to train with; all by default.
            do_flatten: True; gradients always lie in the buckets.

        Returns:
            The module itself. Its ``bagua_ddp``, and the other properties below, now refer to this call.

        Raises:
            InvalidArgument: as bagua.with_bagua; and for an argument that cannot be honoured.

        Example:
            >>> from bagua.torch_api.algorithms import bytegrad
            >>> model = model.with_bagua([optimizer], bytegrad.ByteGradAlgorithm())
        """
        if not do_flatten:
            raise InvalidArgument(
                "do_flatten=False cannot be honoured: gradients are always views of the buckets; leave it out"
            )
        ddp = BaguaDistributedDataParallel(self, optimizers, algorithm, to_bagua_process_group(process_group))
        group = ddp.process_group.group
        data_parallel.with_bagua(self, ddp.bagua_optimizers, algorithm=algorithm.reify(group), group=group)
        ddp.begin()
        return self

    # These properties of a module that is not wrapped are None or empty. An AttributeError would break torch.compile,
    # which reads every name in dir() of its own modules.

    @property
    def bagua_module_name(self) -> str | None:
        """A label for the user, not used by bagua. with_bagua sets one if there is none; until then None."""
        return vars(self).get("_bagua_module_name")

    @bagua_module_name.setter
    def bagua_module_name(self, name: str) -> None:
        self._bagua_module_name = name

    @property
    def bagua_ddp(self) -> BaguaDistributedDataParallel | None:
        """The arguments of with_bagua, and a count of steps; None for a module that is not wrapped."""
        return wrapped(self)

    @property
    def bagua_algorithm(self) -> Algorithm | None:
        """The algorithm that it was wrapped with; None if it is not wrapped."""
        ddp = wrapped(self)
        return None if ddp is None else ddp.bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that it was wrapped with; empty if it is not wrapped."""
        ddp = wrapped(self)
        return [] if ddp is None else ddp.bagua_optimizers

    @property
    def bagua_buckets(self) -> list[Bucket]:
        """The buckets, in the order in which they are sent; empty if it is not wrapped."""
        ddp = wrapped(self)
        return [] if ddp is None else ddp.bagua_buckets


def _extend_torch() -> None:
    for name, member in vars(BaguaModule).items():
        if "bagua" in name:
            # torch.jit.script compiles all properties of a class except marked ones.
            setattr(torch.nn.Module, name, torch.jit.unused(member) if isinstance(member, property) else member)


_extend_torch()
