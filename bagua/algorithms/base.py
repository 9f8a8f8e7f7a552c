"""The plug-in interface of communication algorithms, on one screen: one class, one file.

Data path: scheduler -> **policy** -> engine. An algorithm decides what a bucket sends, with which codec and when. It
never loops over elements and never touches a transport. Options are the keyword-only dataclass fields of the class.

Two kinds: one exchanges *gradients*, bucket by bucket while backward runs (``communicate``); the other leaves
gradients alone and exchanges *weights* around the optimizer's step, through the same buckets. What few algorithms need
is in ``_hooks.py``: stages, checkpoints of their own, optimizers of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, Literal

import torch

from bagua.algorithms._bucket_group import BucketGroup
from bagua.algorithms._hooks import Hooks
from bagua.buckets import Bucket
from bagua.distributed.process_group import Work
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class ParameterState:
    """What an algorithm remembers of each parameter from one optimizer step to the next; zeros at first.

    The library keeps it, moves it when buckets are laid out anew and puts it into checkpoints. What is written in
    backward counts once an optimizer has stepped with those gradients: a step that is skipped, because a gradient is
    NaN or Inf, changes nothing, and neither does a backward in which no rank has used the parameter.

    Attributes:
        dtype: of what is kept.
        shape: None: that of the gradient; kept side by side as the gradients are in their bucket. Otherwise the shape
            for a parameter.
        is_scaled: whether it counts in the unit of the gradients, as what ``feedback`` names does, so that it has to
            grow with a GradScaler's scale.
    """

    dtype: torch.dtype = torch.float32
    shape: Callable[[torch.nn.Parameter], tuple[int, ...]] | None = None
    is_scaled: bool = False


@dataclasses.dataclass(kw_only=True)
class Algorithm(Hooks):
    """Base class of all algorithms; a subclass defines ``communicate``, or hooks around the optimizer's step.

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
    # What its buckets hold in the main. Weights: every trainable parameter belongs to one of the optimizers, and a
    # bucket to one optimizer, whose hooks are called with its buckets alone.
    exchanges: ClassVar[Literal["gradients", "weights"]] = "gradients"

    def communicate(self, bucket: Bucket, group: BucketGroup) -> Work | Generator[Work, None, None] | None:
        """All gradients of ``bucket`` are ready: starts its communication, during backward, and does not wait for it.

        Called for one bucket after the other, in the same order on all ranks. ``bucket.flat`` holds the gradients, and
        their result at the end of backward, which waits for all that was started. What is started with the bucket
        itself, ``group.all_reduce(bucket, codec=...)``, may be read where autograd has put it.

        A generator starts an operation, yields its Work, and goes on when that is complete, once two more buckets have
        been started or at the end of backward: at a place in the order of operations that is the same on all ranks.

        A shallow copy is also asked, up to its first operation or look at ``bucket.flat``, whenever buckets are laid
        out: what would be sent is known in advance then.
        """
        raise NotImplementedError(f"{type(self).__name__}.communicate")

    def parameter_state(self) -> dict[str, ParameterState]:
        """What it remembers of each parameter, by name: ``bucket.state(name)`` in ``communicate``."""
        return {}

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        """``optimizer`` is about to change weights; not called for steps that a GradScaler skips.

        Where its closure computes the gradients, called after the first evaluation; before it where a backward has left
        gradients, and ``step`` is neither torch.optim's nor bagua.optim's and so may use them first, as SAM does.

        Args:
            buckets: all, or where weights are exchanged those of ``optimizer``.
        """

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: BucketGroup
    ) -> None:
        """``optimizer`` has changed weights; not called for steps that a GradScaler skips."""

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
