"""Refuses to write NaN into the weights when a rank's gradient was NaN or Inf under a codec.

Beside the data path, at its end: ``step.py`` asks after backward and before an optimizer step. All ranks decide
alike without a message (Bucket.is_finite). For the parameters of an optimizer passed to with_bagua the
error is raised when that optimizer is really stepped, so that a GradScaler can skip the step; for others,
or inside an optimizer's closure, it is raised at the end of backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bagua.bucket import Bucket
from bagua.errors import InvalidArgument
from bagua.group import ProcessGroup


class NonFiniteGuard:
    """Watches the buckets of a model of which some travel under a codec; small ones travel without.

    Args:
        optimizers: those for which ``check_step`` will be called before they change weights.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self.is_in_closure = False  # of an optimizer's step
        self._watched: tuple[Bucket, ...] = ()
        self._suspects: list[Bucket] = []  # buckets with NaN after the last synchronising backward

    def watch(self, buckets: Sequence[Bucket], group: ProcessGroup) -> None:
        """Takes the buckets of a new layout. A single rank sends nothing, so nothing is quantised."""
        uses_codec = group.size > 1 and any(bucket.declaration.codec is not None for bucket in buckets)
        self._watched = tuple(buckets) if uses_codec else ()

    def check_backward(self) -> None:
        """All gradients are synchronised; raises InvalidArgument if no later check can."""
        self._suspects = [bucket for bucket in self._watched if not bucket.is_finite()]
        if not self._suspects:
            return
        if self.is_in_closure:
            raise self._error(self._suspects)
        checked = set().union(*(_parameter_ids(ref()) for ref in self._optimizers))
        unchecked = [
            b for b in self._suspects if _has_nonfinite_gradient(b, {id(m.parameter) for m in b.members} - checked)
        ]
        if unchecked:
            raise self._error(unchecked, "; for a GradScaler to do so, pass the optimizer to with_bagua")

    def check_step(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """``optimizer.step(*args, **kwargs)`` is about to run (``args[0]`` is the optimizer).

        Raises:
            InvalidArgument: a gradient that it would use is NaN; names buckets, parameters and codec.
        """
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self.is_in_closure = closure is not None  # its backwards run after this check
        if not self._suspects:
            return
        bad = [bucket for bucket in self._suspects if _has_nonfinite_gradient(bucket, _parameter_ids(optimizer))]
        if bad:
            raise self._error(bad)

    def leave_step(self) -> None:
        """The optimizer step has returned."""
        self.is_in_closure = False

    def _error(self, buckets: Sequence[Bucket], more: str = "") -> InvalidArgument:
        codecs = [bucket.declaration.codec for bucket in buckets]
        under = ["" if codec is None else f" under codec {codec!r}" for codec in codecs]
        told = "; ".join(f"{b.label} ({', '.join(b.names)}){how}" for b, how in zip(buckets, under, strict=True))
        return InvalidArgument(
            f"a gradient is NaN or Inf on some rank, which a codec cannot average: {told}. No rank has changed a "
            f"weight; skip the step with zero_grad(), as torch.amp.GradScaler does{more}",
            bucket=buckets[0].label,
        )


def is_skipped_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether GradScaler makes this step do nothing: it steps fused optimizers anyway, with ``found_inf`` set."""
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf > 0)


def _parameter_ids(optimizer: torch.optim.Optimizer | None) -> set[int]:
    groups = () if optimizer is None else optimizer.param_groups
    return {id(parameter) for group in groups for parameter in group["params"]}


def _has_nonfinite_gradient(bucket: Bucket, parameter_ids: set[int]) -> bool:
    grads = [m.parameter.grad for m in bucket.members if id(m.parameter) in parameter_ids]
    return any(grad is not None and not bool(grad.isfinite().all()) for grad in grads)
