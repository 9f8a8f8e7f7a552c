"""Refuses to write NaN into the weights when a rank's gradient was NaN or Inf and the algorithm uses a codec.

Beside the data path, at its end: ``step.py`` asks after backward and before an optimizer step. All ranks decide
alike without a message: what they look at is the result, equal on all of them. For the parameters of an optimizer that
was passed to with_bagua, or has stepped before, the error is raised when it is really stepped, so that a GradScaler
can skip the step; for others at the end of backward.

On a device the host would have to wait for all of backward to know. Late, which is the default there, it looks when the
next forward or backward begins: a step that should have been refused has changed weights by then, and is an error.
Where there is no next one, the end of the wrap tells of it, or that of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from bagua.buckets import Bucket, are_finite, finite_flag
from bagua.data_parallel.followed_optimizers import FollowedOptimizers
from bagua.distributed.devices import HostCopy
from bagua.errors import InvalidArgument


class NonFiniteGuard:
    """Watches the buckets of a model under an algorithm that uses a codec: those too that travel without.

    Args:
        optimizers: those for which ``check_step`` will be called before they change weights.
    """

    def __init__(self, optimizers: FollowedOptimizers) -> None:
        self._optimizers = optimizers
        self._watched: tuple[Bucket, ...] = ()
        self._is_asked = False
        self._suspects: list[Bucket] = []  # buckets with NaN after the last synchronising backward
        self._refused: frozenset[int] = frozenset()  # parameters whose gradients an earlier wrap has found not finite
        self._late: _Late | None = None

    def watch(self, buckets: Sequence[Bucket], num_ranks: int, is_asked: bool) -> None:
        """Takes the buckets of a new layout. A single rank sends nothing, so nothing is quantised.

        Args:
            is_asked: by the algorithm; a codec in what is sent asks for it, too.
        """
        self._watched, self._is_asked = tuple(buckets) if num_ranks > 1 else (), is_asked

    def inherit(self, earlier: NonFiniteGuard, refused: frozenset[int]) -> None:
        """Takes the place of ``earlier``, which has settled, with the gradients that are there.

        Args:
            refused: the ids of parameters with which, beside those, no optimizer may step while theirs are not finite.
        """
        self._suspects, self._refused = earlier._suspects, earlier._refused | refused

    @property
    def is_needed(self) -> bool:
        """Whether a codec is used in any bucket, or the algorithm asks for it."""
        if not self._watched:
            return False
        return self._is_asked or any(bucket.declaration.codec is not None for bucket in self._watched)

    def look_later(self, buckets: Sequence[Bucket]) -> None:
        """All gradients are synchronised; ``settle`` will tell of these buckets, and of the watched ones."""
        watched = self._watched if self.is_needed else ()
        looks = {bucket.index: (bucket, bucket.look_later()) for bucket in (*buckets, *watched)}
        self._suspects, self._refused = [], frozenset()
        self._late = _Late(list(looks.values()), watched) if looks else None

    def settle(self) -> tuple[bool, bool, InvalidArgument | None]:
        """Whether the last backward left finite gradients, and all steps that followed it were skipped after all.

        Also what to raise: a step that was not skipped has changed weights by NaN. Waits for the device. Where no step
        has followed yet, one that comes is refused in time.
        """
        late = self._late
        if late is None:
            return True, False, None
        was_skipped, bad = late.skipped_steps(), late.bad_buckets()
        watched = [bucket for bucket in late.watched if bucket in bad]
        wrong = [bucket for bucket in watched if self._was_used(bucket, late.steps, was_skipped)]
        self._suspects = [bucket for bucket in watched if bucket not in wrong]
        if late.steps or wrong:
            self._late = None
        return not bad, late.are_all_skipped(), self._error(wrong, is_late=True) if wrong else None

    def look_at_steps(self) -> tuple[bool, bool]:
        """What ``settle`` says first of steps that have been made; leaves to it to tell of them."""
        late = self._late
        if late is None or not late.steps:
            return True, False
        return not late.bad_buckets(), late.are_all_skipped()

    @property
    def has_suspects(self) -> bool:
        """Whether the host knows of gradients that are not finite and no step has used yet."""
        return bool(self._suspects or self._refused)

    @property
    def has_steps(self) -> bool:
        """Whether a step was seen of which ``settle`` may have to tell."""
        return self._late is not None and bool(self._late.steps)

    def _was_used(self, bucket: Bucket, steps: Sequence[_Step], was_skipped: Sequence[_Step]) -> bool:
        """Whether weights came of its gradients, or may have: no optimizer is known that steps them."""
        ids = {id(member.parameter) for member in bucket.members}
        if not ids & self._optimizers.stepped_ids():
            return True
        # A scaler that skips a step has looked at the same gradients.
        return any(ids & step.parameter_ids and not step.was_finite() for step in steps if step not in was_skipped)

    def forget_steps(self) -> None:
        """The weights that the last steps have made are given up; the gradients are there, for one that may come."""
        if self._late is not None:
            checked = self._optimizers.stepped_ids()
            self._late.steps = []
            self._late.watched = [b for b in self._late.watched if any(id(m.parameter) in checked for m in b.members)]

    def check_backward(self) -> None:
        """All gradients are synchronised; raises InvalidArgument if no later check can."""
        self._suspects, self._refused = [], frozenset()
        if not self.is_needed:
            return
        self._suspects = [bucket for bucket in self._watched if not bucket.is_finite()]
        if not self._suspects:
            return
        checked = self._optimizers.stepped_ids()
        unchecked = [b for b in self._suspects if not _is_finite_of(b, {id(m.parameter) for m in b.members} - checked)]
        if unchecked:
            raise self._error(unchecked, "; for a GradScaler to do so, pass the optimizer to with_bagua")

    def check_step(self, optimizer: torch.optim.Optimizer, is_certain: bool) -> None:
        """``optimizer`` is about to change weights by the gradients that are there, unless its closure raises first.

        Raises:
            InvalidArgument: a gradient that it would use is NaN; names buckets, parameters and codec.
        """
        if self._suspects:
            stepped = {id(parameter) for options in optimizer.param_groups for parameter in options["params"]}
            bad = [bucket for bucket in self._suspects if not _is_finite_of(bucket, stepped)]
            if bad:
                raise self._error(bad)
        if self._refused:
            parameters = [p for options in optimizer.param_groups for p in options["params"] if id(p) in self._refused]
            if not are_finite(gradients_of(parameters)):
                raise InvalidArgument(
                    f"a gradient that {type(optimizer).__name__} would step with is NaN or Inf on some rank since the "
                    "backward before with_bagua. No rank has changed a weight; skip the step with zero_grad(), as "
                    "torch.amp.GradScaler does"
                )
        if self._late is not None and is_certain:
            self._late.steps.append(_Step(optimizer, self._late))

    def _error(self, buckets: Sequence[Bucket], more: str = "", is_late: bool = False) -> InvalidArgument:
        codecs = [bucket.declaration.codec for bucket in buckets]
        under = ["" if codec is None else f" under codec {codec!r}" for codec in codecs]
        told = "; ".join(f"{b.label} ({', '.join(b.names)}){how}" for b, how in zip(buckets, under, strict=True))
        which = "which a codec cannot average" if any(codecs) else "which would be in all that comes of the bucket"
        if is_late:
            return InvalidArgument(
                f"in the last step a gradient was NaN or Inf on some rank, {which}: {told}. The weights have changed "
                "by it on all ranks: load a checkpoint. torch.amp.GradScaler skips such a step; "
                'with_bagua(..., nonfinite_check="sync") refuses it, and waits for the device in each backward',
                bucket=buckets[0].label,
            )
        return InvalidArgument(
            f"a gradient is NaN or Inf on some rank, {which}: {told}. No rank has changed a "
            f"weight; skip the step with zero_grad(), as torch.amp.GradScaler does{more}",
            bucket=buckets[0].label,
        )


class _Step:
    """A step, and whether its gradients in the watched buckets are finite as they are now: the program may have changed
    them since the backward, also by ``.data``, of which no version tells.

    Args:
        late: of the backward before it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, late: _Late) -> None:
        self.parameter_ids = ids = {id(p) for options in optimizer.param_groups for p in options["params"]}
        # Not at buckets as a whole: between the gradients is what a codec has left there, NaN too.
        parameters = (member.parameter for bucket in late.watched for member in bucket.members)
        grads = gradients_of(parameter for parameter in parameters if id(parameter) in ids)
        self._are_finite = HostCopy(finite_flag(grads, late.watched[0].device)) if grads else None
        found_inf = getattr(optimizer, "found_inf", None)
        self.found_inf = None if found_inf is None or found_inf.is_cpu else HostCopy.of(found_inf)

    def was_finite(self) -> bool:
        """Whether its own gradients were; waits for the device."""
        return self._are_finite is None or bool(self._are_finite.get())


class _Late:
    """What is known of a backward only once the device has come to its end."""

    def __init__(self, looks: list[tuple[Bucket, Callable[[], bool]]], watched: Sequence[Bucket]) -> None:
        self._looks, self.watched = looks, watched
        self._bad: list[Bucket] | None = None
        self.steps: list[_Step] = []  # made since

    def bad_buckets(self) -> list[Bucket]:
        """Those that were not finite; waits for the device."""
        if self._bad is None:
            self._bad = [bucket for bucket, is_finite in self._looks if not is_finite()]
        return self._bad

    def skipped_steps(self) -> list[_Step]:
        """Those of which a GradScaler has made nothing; waits for the device."""
        return [step for step in self.steps if step.found_inf is not None and bool(step.found_inf.get() > 0)]

    def are_all_skipped(self) -> bool:
        """Whether there are steps, and none of them changed weights; waits for the device."""
        return bool(self.steps) and len(self.skipped_steps()) == len(self.steps)


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def is_skipped_by_scaler(optimizer: torch.optim.Optimizer, waits: bool = True) -> bool:
    """Whether GradScaler makes this step do nothing: it steps fused optimizers anyway, with ``found_inf`` set.

    Args:
        waits: for a device that knows; without, a step whose ``found_inf`` is on one is none that is skipped, and
            ``NonFiniteGuard.settle`` tells later.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and (waits or found_inf.is_cpu) and bool(found_inf > 0)


def _is_finite_of(bucket: Bucket, parameter_ids: set[int]) -> bool:
    return are_finite(gradients_of(m.parameter for m in bucket.members if id(m.parameter) in parameter_ids))
