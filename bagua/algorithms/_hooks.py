"""Hooks that few algorithms need: stages, optimizers and checkpoints of their own, what happens once per wrap.

Beside the data path. ``Algorithm`` has all of them, as they are here, unless a subclass defines its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.buckets import Bucket
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """A row of the table of algorithms: what a user wants to know before choosing.

    Attributes:
        sends: what travels.
        to: whom it travels to.
        when: when it travels, and what waits for it.
        bytes_per_step: sent per rank and step, in terms of the float32 gradient bytes G and the number of ranks n.
        memory: extra bytes per rank that it keeps beside plain training, in the same terms.
        use_when: for which network and model.
        paper: its source.
    """

    sends: str
    to: str
    when: str
    bytes_per_step: str
    memory: str
    use_when: str
    paper: str


@dataclasses.dataclass(frozen=True)
class Training:
    """What an algorithm is part of, from ``attach`` to ``detach``.

    Attributes:
        group: the ranks that train together.
        optimizers: those that were passed to with_bagua, or took their places; a bucket's ``optimizer_index`` counts
            them.
    """

    group: BucketGroup
    optimizers: tuple[torch.optim.Optimizer, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What an algorithm does for a while, such as a warm-up.

    Attributes:
        name: buckets are laid out anew when it changes.
        synchronises_gradients: whether ``communicate`` is called in backward.
    """

    name: str = ""
    synchronises_gradients: bool = True


class Hooks:
    """The rarely needed part of ``Algorithm``."""

    name: ClassVar[str]
    about: ClassVar[About | None] = None  # for tables; every algorithm of this package has one
    exchanges: ClassVar[str]
    # What its optimizers must be.
    optimizer_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Optimizer
    # Whether the ranks take every step together; where not, no hook may wait for other ranks' hooks, and a rank may end
    # before the others.
    is_lockstep: ClassVar[bool] = True
    # Whether a step is refused on all ranks when a gradient of any rank is NaN or Inf, also while nothing that is sent
    # has a codec, which asks for it by itself.
    refuses_nonfinite: ClassVar[bool] = False

    training: Training

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        """Parameters of different classes never share a bucket. Depends on shape and dtype only."""
        return ""

    def stage(self) -> Stage:
        """What it does now. May change at an optimizer step, on all ranks at the same."""
        return Stage(synchronises_gradients=self.exchanges == "gradients")

    def skips_together(self) -> bool | None:
        """Where gradients stay local: whether a step that one rank's GradScaler skips is skipped by all.

        The ranks then agree at the end of each backward, in one small message. None: if a GradScaler is in use.
        """
        return None if self.is_lockstep else False

    # --- from with_bagua on

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises InvalidArgument for optimizers that it cannot work with."""
        wanted = self.optimizer_class
        for index, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, wanted):
                raise InvalidArgument(
                    f"algorithm {self.name!r} steps with {wanted.__module__}.{wanted.__qualname__}, but "
                    f"optimizers[{index}] is a {type(optimizer).__name__}; construct one with the same parameters"
                )
        if wanted is not torch.optim.Optimizer and not optimizers:
            raise InvalidArgument(
                f"algorithm {self.name!r} needs the model's optimizer, a {wanted.__module__}.{wanted.__qualname__}; "
                "pass it to with_bagua"
            )

    def attach(self, training: Training) -> None:
        """The model is to be wrapped. What this or ``lay_out`` raises on any rank leaves all as they were.

        So neither changes model or optimizers, whose values are each rank's own yet; groups of its own are made by
        ``training.group.subgroup``, which are closed then.
        """
        self.training = training

    def adopt_optimizers(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """``optimizers`` are those of the model from now on: one that is new is about to make its first step.

        Where weights are exchanged, or with an ``optimizer_class``, it steps what the one before it has stepped.
        """
        self.training = dataclasses.replace(self.training, optimizers=optimizers)

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """``buckets`` are those of now on; collective.

        Called after ``attach``, when gradients' order is known, in another ``stage``, and after ``load_state_dict``.
        """

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """All ranks have wrapped the model: parameters, buffers and optimizer states are equal. Collective."""

    def detach(self) -> None:
        """The model is synchronised by another algorithm from now on, or no more: waits for what is under way."""

    # --- in a step

    def before_forward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """A forward with gradients begins, outside no_sync.

        Where weights are exchanged only the first one in an optimizer's closure counts: after it the ranks may be at
        different evaluations.
        """

    def after_backward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """A synchronising backward has ended: all Work is complete, ``backward()`` is about to return."""

    def after_change_of_scale(self, ratio: float | torch.Tensor) -> None:
        """A backward begins whose gradients a GradScaler makes ``ratio`` times as large as those of the one before.

        What else than ``parameter_state`` is remembered in their unit has to grow alike.

        Args:
            ratio: a number other than 1; or, where only the device knows it yet, a scalar tensor there in float64,
                which may be 1. To ask for its value waits for the device.
        """

    def after_skipped_step(self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket]) -> None:
        """A GradScaler has made nothing of a step of ``optimizer``, and the host knows.

        So is the step with lr=0 by which torch.distributed.checkpoint makes an optimizer's state, where weights are
        exchanged; perhaps on one rank only.

        The weights are what they were, though torch may count a fused optimizer's as changed. Where gradients are
        exchanged on a device the host may hear of it later, and then ``after_optimizer_step`` is called.
        """

    # --- in the background

    def pause(self) -> None:
        """Stops what runs in the background; collective, idempotent."""
        raise InvalidArgument(f"algorithm {self.name!r} does nothing in the background that could be paused")

    def resume(self) -> None:
        """Goes on after ``pause``; collective, idempotent."""
        raise InvalidArgument(f"algorithm {self.name!r} does nothing in the background that could be resumed")

    # --- checkpoints; ``parameter_state`` is in them without these

    def state_dict(self) -> dict[str, Any]:
        """Everything else that it remembers from step to step; {} if nothing."""
        return {}

    def check_idle(self) -> None:
        """Raises InvalidArgument while a state cannot be loaded, because something is under way."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` returned, on all ranks. ``lay_out`` follows.

        Both are called on a shallow copy, which takes the place of the original unless one of them raises on some rank:
        what the attributes refer to is replaced, not written to.
        """
        if state:
            raise InvalidArgument(f"algorithm {self.name!r} keeps no state, but was given {sorted(state)}")
