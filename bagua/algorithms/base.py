"""The plug-in interface of communication algorithms, whole: one class, one file per algorithm.

Data path: scheduler -> **policy** -> engine. An algorithm decides what a bucket sends, with which codec and when. It
never loops over elements and never touches a transport. Options are the keyword-only dataclass fields of the class.

There are two kinds. One exchanges *gradients*, bucket by bucket while backward runs (``communicate``); the other leaves
gradients alone and exchanges *weights* around the optimizer's step, through the same buckets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any, ClassVar, Literal

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.buckets import Bucket
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """A row of the table of algorithms: what a user wants to know before choosing.

    Attributes:
        sends: what travels.
        to: the ranks that receive it.
        when: when it travels, and what waits for it.
        bytes_per_step: sent per rank and step, in terms of the float32 gradient bytes G and the number of ranks n.
        memory: extra bytes per rank beside plain training, in the same terms.
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
class ParameterState:
    """A value that an algorithm remembers of each parameter from one backward to the next; zeros at first.

    The library keeps it, moves it when buckets are laid out anew and puts it into checkpoints. What ``communicate``
    writes counts if the results of all buckets are finite; a backward with NaN or Inf changes nothing, and neither does
    one in which no rank has used the parameter. An algorithm that exchanges weights reads and writes it in any hook.

    Attributes:
        dtype: of what is kept; None: that of the bucket, but float32 for smaller ones.
        shape: None: that of the gradient; kept side by side as the gradients are in their bucket. Otherwise the shape
            for a parameter.
        is_scaled: True if it counts in the unit of the gradients, as what ``feedback`` names does: then it is
            multiplied when ``bagua.amp.GradScaler`` changes its scale.
        on_host: True to keep it in host memory, of a model on a device too; of those of the gradient's shape.
        moving_average: beta, of what ``feedback`` names: e <- beta e + (1 - beta) r, where r is what was left out;
            None: e <- r.
        is_own: True if ranks differ in it, so that on another number of ranks all begin with their mean.
    """

    dtype: torch.dtype | None = torch.float32
    shape: Callable[[torch.nn.Parameter], tuple[int, ...]] | None = None
    is_scaled: bool = False
    on_host: bool = False
    is_own: bool = False
    moving_average: float | None = None


@dataclasses.dataclass(frozen=True)
class Stage:
    """A phase of an algorithm, such as a warm-up.

    Attributes:
        name: buckets are laid out anew when it changes.
        synchronises_gradients: whether ``communicate`` is called in backward.
    """

    name: str = ""
    synchronises_gradients: bool = True


@dataclasses.dataclass
class Training:
    """The training that an algorithm is part of, from ``attach`` to ``detach``.

    Attributes:
        group: the ranks that train together.
        optimizers: those that were passed to with_bagua; a bucket's ``optimizer_index`` counts them.
        loss_scale: the scale of a ``bagua.amp.GradScaler``, 1 without one; on a device a tensor there.
    """

    group: BucketGroup
    optimizers: tuple[torch.optim.Optimizer, ...]
    loss_scale: float | torch.Tensor = 1.0


@dataclasses.dataclass(kw_only=True)
class Algorithm:
    """The base class of all algorithms; a subclass defines ``communicate``, or hooks around the optimizer's step.

    Every rank calls the same hooks in the same order, so each may use operations of ``group``.

    Example:
        >>> @register
        ... @dataclasses.dataclass(kw_only=True)
        ... class HalfPrecision(Algorithm):
        ...     name = "half_precision"
        ...     def communicate(self, bucket, group):
        ...         return group.all_reduce(bucket, ReduceOp.AVG, codec="fp16")
    """

    name: ClassVar[str] = ""  # as in with_bagua(model, algorithm=name); set by ``register``
    # Weights: every trainable parameter belongs to one of the optimizers, and a bucket to one optimizer, whose hooks
    # are called with its buckets alone.
    exchanges: ClassVar[Literal["gradients", "weights"]] = "gradients"
    about: ClassVar[About | None] = None  # for tables; every algorithm of this package has one
    optimizer_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Optimizer  # what its optimizers must be
    # False: the ranks step at their own pace, no hook waits for other ranks' hooks, and a rank may end before others.
    is_lockstep: ClassVar[bool] = True
    # Gradients. False: its result is a momentum, so a second backward may not add to it before it is exchanged again.
    is_linear: ClassVar[bool] = True
    # Weights. False: an exchange moves the mean of all ranks' weights, as an outer step does.
    keeps_mean: ClassVar[bool] = True

    # --- gradients

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work | Generator[Work, None, None] | None:
        """Starts the communication of ``bucket``, whose gradients are all ready, and does not wait for it.

        Called during backward for one bucket after the other, in the same order on all ranks. ``bucket.flat`` holds the
        gradients, and their result at the end of backward, which waits for all that was started. What is started with
        the bucket itself, ``group.all_reduce(bucket, codec=...)``, may be read where autograd has put it.

        A generator starts an operation, yields its Work, and continues when that is complete, once two more buckets
        have been started or at the end of backward: at a place in the order of operations that all ranks share.
        """
        raise NotImplementedError(f"{type(self).__name__}.communicate")

    def parameter_state(self) -> dict[str, ParameterState]:
        """Describes what it remembers of each parameter, by name: ``bucket.state(name)`` in ``communicate``."""
        return {}

    def fragments_of(self, names: Sequence[str], sizes: Sequence[int]) -> Sequence[int]:
        """Returns the fragment of each parameter, ``Bucket.fragment``; those of different ones never share a bucket.

        Args:
            names: of the parameters, in the order of their registration.
            sizes: their bytes.
        """
        return [0] * len(names)

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        """Returns a key of shape and dtype; parameters with different keys never share a bucket."""
        return ""

    def stage(self) -> Stage:
        """Returns what it does now; asked before a forward, and after an optimizer's step where weights are exchanged.

        All ranks change it at the same step.
        """
        return Stage(synchronises_gradients=self.exchanges == "gradients")

    def before_forward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Runs before a forward with gradients, outside no_sync and outside an optimizer's step."""

    def after_backward(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Runs at the end of a synchronising backward: all Work is complete, ``backward()`` is about to return."""

    # --- weights: called with the buckets of the optimizer, from its public step hooks

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        """Runs before ``optimizer`` changes weights, and before it evaluates a closure."""

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        """Runs after ``optimizer.step`` has returned."""

    def synchronize(self, buckets: Sequence[Bucket], group: BucketGroup) -> None:
        """Makes the weights those of the global model, if there is one: ``model.bagua.synchronize()``. Collective."""

    # --- set-up

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
        """Prepares for a model that is to be wrapped. What this or ``lay_out`` raises leaves all ranks as they were.

        So neither changes model or optimizers, whose values are each rank's own yet; groups of its own are made by
        ``training.group.subgroup``, which are closed then.
        """
        self.training = training

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes new buckets: after ``attach``, for a new order or ``stage``, after ``load_state_dict``. Collective."""

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Starts, once parameters, buffers and optimizer states are equal on all ranks. Collective."""

    def detach(self) -> None:
        """Ends: another algorithm synchronises the model from now on, or none. Waits for what is under way."""

    # --- checkpoints; ``parameter_state`` is in them without these

    def state_dict(self) -> dict[str, Any]:
        """Returns everything else that it remembers from step to step; {} if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned, on all ranks. ``lay_out`` follows.

        Both are called on a shallow copy, which replaces the original unless one of them raises on some rank: what the
        attributes refer to is replaced, not written to.
        """
        if state:
            raise InvalidArgument(f"algorithm {self.name!r} keeps no state, but was given {sorted(state)}")

    def state_of_all(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Returns what ``load_state_dict`` gets on another number of ranks, from the states of all ranks, by rank.

        Ranks that exchange weights begin from the mean of all weights then. By default that of the first rank.
        """
        return states[0]

    def options(self) -> dict[str, Any]:
        """Returns the options it runs with, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if default is dataclasses.MISSING or default is None:
                continue
            accepted = (int, float) if type(default) is float else field.metadata.get("types", (type(default),))
            if type(value) not in accepted:
                raise InvalidArgument(
                    f"algorithm {self.name!r}: option {field.name} is {value!r} ({type(value).__name__}), "
                    f"expected {type(default).__name__}, such as the default {default!r}"
                )
