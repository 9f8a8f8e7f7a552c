"""The plug-in interface of communication algorithms: one class, one file, all hooks on this page.

Data path: scheduler -> **policy** -> engine. An algorithm decides what a bucket sends, with which
codec and when. It never loops over elements and never touches a transport. Options are the
keyword-only dataclass fields of the class; an unknown option is an error that lists these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import torch

from bagua.bucket import Bucket
from bagua.errors import InvalidArgument
from bagua.group import ProcessGroup, Work


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


@dataclasses.dataclass(kw_only=True)
class Algorithm:
    """Base class of all algorithms; a subclass must define ``declare`` and ``communicate``.

    Every rank calls the same hooks in the same order, so each may use collectives of ``group``.

    Example:
        >>> @register                                                            # doctest: +SKIP
        ... @dataclasses.dataclass(kw_only=True)
        ... class HalfPrecision(Algorithm):
        ...     name = "half_precision"
        ...     def declare(self, bucket):
        ...         return Declaration("all_reduce", codec="fp16")
        ...     def communicate(self, bucket, group):
        ...         return group.all_reduce(bucket.flat, ReduceOp.AVG, codec="fp16", label=bucket.label)
    """

    name: ClassVar[str] = ""  # as in with_bagua(model, algorithm=name); set by ``register``

    def bucket_class(self, parameter: torch.nn.Parameter) -> Hashable:
        """Parameters of different classes never share a bucket. Depends on shape and dtype only."""
        return ""

    def declare(self, bucket: Bucket) -> Declaration:
        """What ``communicate`` sends for ``bucket``; asked whenever buckets are laid out."""
        raise NotImplementedError(f"{type(self).__name__}.declare")

    def communicate(self, bucket: Bucket, group: ProcessGroup) -> Work | None:
        """All gradients of ``bucket`` are ready: start its communication and return the Work, or None.

        Called during backward, in the same bucket order on all ranks; ``bucket.flat`` belongs to the
        Work until the end of backward, which waits for it.
        """
        raise NotImplementedError(f"{type(self).__name__}.communicate")

    def before_forward(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        """A forward with gradients begins, outside no_sync."""

    def after_backward(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        """A synchronising backward has ended: all Work is complete, ``backward()`` is about to return."""

    def before_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        """``optimizer`` is about to change weights; not called for steps that a GradScaler skips."""

    def after_optimizer_step(
        self, optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], group: ProcessGroup
    ) -> None:
        """``optimizer`` has changed weights; not called for steps that a GradScaler skips."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it remembers from step to step; {} if nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what ``state_dict`` returned."""
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
