"""Which optimizers step a wrapped model, from with_bagua on: one that is made anew takes the place of the one before.

Beside the data path: an optimizer that steps the model -> **here** -> the algorithm, the guard against NaN, the
agreement on skipped steps. Trainers make optimizers anew (to find a learning rate, to resume, to wrap), and what
belonged to the old object would end without a word. Invariant: all that ask here see the optimizers that really step.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from bagua.algorithms import Algorithm
from bagua.buckets import BucketStorage
from bagua.data_parallel.validation import check_steps_all, describe_optimizer
from bagua.distributed.consensus import agree
from bagua.distributed.job_ranks import reworded
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import BaguaError, InvalidArgument


class FollowedOptimizers:
    """The optimizers of one model, in the order of with_bagua.

    Where weights are exchanged, or the algorithm brings an optimizer of its own, their number is fixed and each steps
    the parameters that it did when the model was wrapped. Elsewhere any optimizer may step, and is followed.

    Args:
        optimizers: those that were passed to with_bagua.
        storage: the model's parameters that train.
        algorithm: is told of another one, by ``adopt_optimizers``.
        group: the ranks that train together.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        storage: BucketStorage,
        algorithm: Algorithm,
        group: ProcessGroup,
    ) -> None:
        self._algorithm, self._group = algorithm, group
        self._name_of = {id(p): name for name, p in zip(storage.names, storage.parameters, strict=True)}
        self._optimizers = list(optimizers)
        self._parameters = [_parameters_of(optimizer) for optimizer in optimizers]  # all that each steps, as last seen
        self._steps = [self._of_the_model(parameters) for parameters in self._parameters]
        self._is_fixed = algorithm.exchanges == "weights" or algorithm.optimizer_class is not torch.optim.Optimizer
        self._agreed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet(optimizers)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    def index_of(self, optimizer: torch.optim.Optimizer) -> int:
        """Its index among them."""
        return next(index for index, other in enumerate(self._optimizers) if other is optimizer)

    def is_wrapper(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is none of them, and keeps one: then that one's step is the step, inside its own."""
        if any(other is optimizer for other in self._optimizers):
            return False
        return any(value is other for value in vars(optimizer).values() for other in self._optimizers)

    def stepped_ids(self) -> set[int]:
        """The ids of the model's parameters that one of them steps."""
        return set().union(*self._steps)

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is none of them, or steps other parameters than when it was last followed."""
        index = self._index_of(optimizer)
        return index is None or not _are_same(self._parameters[index], optimizer)

    def _index_of(self, optimizer: torch.optim.Optimizer) -> int | None:
        return next((index for index, other in enumerate(self._optimizers) if other is optimizer), None)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """One that is new is about to step parameters, some of them the model's.

        Raises:
            InvalidArgument: it cannot take the place of one that the algorithm works with.
        """
        index = self._index_of(optimizer)
        parameters = _parameters_of(optimizer)
        steps = self._of_the_model(parameters)
        if self._is_fixed:
            self._follow_fixed(optimizer, parameters, steps)
        else:
            # It replaces those that step nothing beside, so that there are never more than needed.
            kept = [i for i, other in enumerate(self._steps) if i != index and not other <= steps]
            replaced = [i for i in range(len(self._steps)) if i not in kept]
            index = replaced[0] if replaced else len(kept)
            new = ((self._optimizers, optimizer), (self._parameters, parameters), (self._steps, steps))
            for values, value in new:
                values[:] = [values[i] for i in kept]
                values.insert(index, value)
            self._algorithm.adopt_optimizers(tuple(self._optimizers))

    def _follow_fixed(
        self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], steps: frozenset[int]
    ) -> None:
        own = [i for i, other in enumerate(self._optimizers) if other is optimizer]
        index = next((i for i in (*own, *range(len(self._steps))) if self._steps[i] == steps), None)
        if index is None:
            raise self._group.job_ranks.told(self._refusal(optimizer, steps))
        if self._optimizers[index] is not optimizer:
            changed = [*self._optimizers]
            changed[index] = optimizer
            self._check(optimizer, index, changed)
            self._optimizers = changed
        self._parameters[index] = parameters
        self._algorithm.adopt_optimizers(tuple(self._optimizers))  # the same one, too: its groups have changed

    def _check(self, optimizer: torch.optim.Optimizer, index: int, changed: Sequence[torch.optim.Optimizer]) -> None:
        if self._algorithm.exchanges == "weights":
            check_steps_all([optimizer], self._algorithm.name)
        self._algorithm.check(changed)
        if not self._algorithm.is_lockstep or optimizer in self._agreed:
            return
        remedy = "construct an optimizer anew in the same way and at the same step on all ranks"
        try:
            agree(self._group, lambda: (None, describe_optimizer(index, optimizer, self._name_of)), remedy)
        except BaguaError as error:
            before = f"an optimizer ({type(optimizer).__name__}) that was made anew makes its first step: "
            raise reworded(error, before, f"; {remedy}") from error
        self._agreed.add(optimizer)

    def _refusal(self, optimizer: torch.optim.Optimizer, steps: frozenset[int]) -> InvalidArgument:
        names = [name for key, name in self._name_of.items() if key in steps]
        more = f" and {len(names) - 1} more" if names[1:] else ""
        return InvalidArgument(
            f"rank {self._group.rank}: an optimizer ({type(optimizer).__name__}) that steps {names[0]!r}{more} is none "
            f"of those that were passed to with_bagua, and takes the place of none of them: for algorithm "
            f"{self._algorithm.name!r} it would have to step the same parameters; call with_bagua again, with the "
            "optimizers that train the model",
            rank=self._group.rank,
        )

    def _of_the_model(self, parameters: Sequence[torch.Tensor]) -> frozenset[int]:
        return frozenset(key for key in map(id, parameters) if key in self._name_of)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All that it steps, in its order."""
    return [parameter for options in optimizer.param_groups for parameter in options["params"]]


def _are_same(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> bool:
    """Whether they are those that it steps; asked at each step, so nothing is made of each of them."""
    groups = [options["params"] for options in optimizer.param_groups]
    return len(parameters) == sum(map(len, groups)) and all(map(operator.is_, parameters, chain.from_iterable(groups)))
