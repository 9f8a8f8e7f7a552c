"""The plug-in interface of communication algorithms: one class, one file, all hooks on this page.

Data path: scheduler -> **policy** -> engine. An algorithm decides what a bucket sends, with which
codec and when. It never loops over elements and never touches a transport. Options are the
keyword-only dataclass fields of the class; an unknown option is an error that lists these.

Two kinds: one exchanges *gradients*, bucket by bucket while backward runs (``communicate``); the other leaves
gradients alone and exchanges *weights* around the optimizer's step, through the same buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch

from bagua.buckets import Bucket
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What an algorithm sends for one bucket; shown by ``model.bagua.buckets`` and the timeline.

    Attributes:
        operation: the collective, such as ``"all_reduce"``.
        codec: name of the codec of what travels, None for full precision.
        hierarchical: inside the nodes at full precision first, then between them.
        reason: why this bucket is treated differently from what the options ask, or "".
    """

    operation: str
    codec: str | None = None
    reason: str = ""
    hierarchical: bool = False

    def __str__(self) -> str:
        text = f"{'hierarchical ' if self.hierarchical else ''}{self.operation}, {self.codec or 'full precision'}"
        return f"{text} ({self.reason})" if self.reason else text


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """A row of the table in docs/algorithms.md: what a user wants to know before choosing.

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
        record: names the spans of a Work in the timeline; to be called with each Work that ``communicate`` does not
            return, and its group, if that is another one.
    """

    group: ProcessGroup
    optimizers: tuple[torch.optim.Optimizer, ...]
    record: Callable[..., None]


@dataclasses.dataclass(kw_only=True)
class Algorithm:
    """Base class of all algorithms; a subclass defines ``declare``, and ``communicate`` if it exchanges gradients.

    Every rank calls the same hooks in the same order, so each may use collectives of ``group``; but see
    ``is_lockstep``.

    Example:
        >>> @register
        ... @dataclasses.dataclass(kw_only=True)
        ... class HalfPrecision(Algorithm):
        ...     name = "half_precision"
        ...     def declare(self, bucket):
        ...         return Declaration("all_reduce", codec="fp16")
        ...     def communicate(self, bucket, group):
        ...         return group.all_reduce(bucket.flat, ReduceOp.AVG, codec="fp16", label=bucket.label)
    """

    name: ClassVar[str] = ""  # as in with_bagua(model, algorithm=name); set by ``register``
    about: ClassVar[About | None] = None  # for tables; every algorithm of this package has one
    # What its buckets hold in the main. Weights: every trainable parameter belongs to one of the optimizers, and a
    # bucket to one optimizer, whose hooks are called with its buckets alone.
    exchanges: ClassVar[Literal["gradients", "weights"]] = "gradients"
    # Whether a step is refused on all ranks when a gradient of any rank is NaN or Inf: where a codec would spread it.
    refuses_nonfinite: ClassVar[bool] = False
    # Whether the ranks take every step together; where not, no hook may wait for other ranks' hooks, and a rank may end
    # before the others.
    is_lockstep: ClassVar[bool] = True
    # Whether ``communicate`` hands ``bucket.parts`` on to ``group.all_reduce`` where the bucket declares a codec, and
    # neither reads nor writes ``bucket.flat`` before: then gradients need not be copied there.
    takes_parts: ClassVar[bool] = False

    # What its optimizers must be.
    optimizer_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Optimizer

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        """Parameters of different classes never share a bucket. Depends on shape and dtype only."""
        return ""

    def declare(self, bucket: Bucket) -> Declaration:
        """What the exchange of ``bucket`` sends; asked whenever buckets are laid out."""
        raise NotImplementedError(f"{type(self).__name__}.declare")

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

    def synchronises_gradients(self) -> bool:
        """Whether ``communicate`` is called in backward. May change at an optimizer step, on all ranks at the same."""
        return self.exchanges == "gradients"

    def agrees_on_skips(self) -> bool:
        """Where gradients stay local: whether a step that one rank's GradScaler skips is skipped by all.

        The ranks agree at the end of each backward, in one small message.
        """
        return self.is_lockstep

    def stage(self) -> str:
        """Such as "warm-up". When it has changed at an optimizer step, buckets are declared and laid out anew."""
        return ""

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        """All gradients of ``bucket`` are ready: start its communication and return the Work, or None.

        Called during backward, in the same bucket order on all ranks; ``bucket.flat`` belongs to the
        Work until the end of backward, which waits for it.
        """
        raise NotImplementedError(f"{type(self).__name__}.communicate")

    def before_forward(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        """A forward with gradients begins, outside no_sync.

        Where weights are exchanged only the first one in an optimizer's closure counts: after it the ranks may be at
        different evaluations.
        """

    def left_out(self, indices: Sequence[int]) -> None:
        """No rank has used these parameters in this backward: what was exchanged for them is dropped.

        Called before ``after_backward``, with ``find_unused_parameters=True`` only.

        Args:
            indices: as ``Member.index``.
        """

    def after_backward(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        """A synchronising backward has ended: all Work is complete, ``backward()`` is about to return."""

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        """``optimizer`` is about to change weights; not called for steps that a GradScaler skips.

        Where its closure computes the gradients, called after the first evaluation.

        Args:
            buckets: all, or where weights are exchanged those of ``optimizer``.
        """

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        """``optimizer`` has changed weights; not called for steps that a GradScaler skips."""

    def pause(self) -> None:
        """Stops what runs in the background; collective, idempotent."""
        raise InvalidArgument(f"algorithm {self.name!r} does nothing in the background that could be paused")

    def resume(self) -> None:
        """Goes on after ``pause``; collective, idempotent."""
        raise InvalidArgument(f"algorithm {self.name!r} does nothing in the background that could be resumed")

    def detach(self) -> None:
        """The model is synchronised by another algorithm from now on, or no more: waits for what is under way."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it remembers from step to step; {} if nothing."""
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

    def options(self) -> dict[str, Any]:
        """The options it runs with, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if default is dataclasses.MISSING or default is None:
                continue
            accepted = (int, float) if type(default) is float else (type(default),)
            if type(value) not in accepted:
                raise InvalidArgument(
                    f"algorithm {self.name!r}: option {field.name} is {value!r} ({type(value).__name__}), "
                    f"expected {type(default).__name__}, such as the default {default!r}"
                )
