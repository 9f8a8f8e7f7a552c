"""Error feedback: what the codes of one step leave out is added to what the next step encodes.

Data path: policy -> **residuals** -> the compressed all_reduce, which reads and renews them.

Two residuals, as the paper has them (C_LP_S, arXiv 2107.01499; arXiv 1901.09847): of what a rank contributes, and of
the stripe of the result that it encodes for everybody. Each is kept twice: the one that the last optimizer step left,
and the one of the step under way, which takes its place when an optimizer steps and is forgotten when a gradient is
NaN or Inf, so that a step that is skipped changes nothing. Invariant, but for float rounding: what was sent +
residual = what was to be sent, added up over all steps. Residuals have the scale of the gradients as they come: when a
GradScaler changes its scale, the residual of the step before counts by the ratio of the two, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua import _C
from bagua.algorithms._checkpoints import check_writer, writer_of
from bagua.buckets import Bucket, Member
from bagua.distributed.arguments import ReduceOp
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.tensors import Residuals
from bagua.errors import InvalidArgument

STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Copy:
    """Both residuals of every bucket that travels under a codec, by the bucket's index."""

    def __init__(self) -> None:
        self.worker: dict[int, torch.Tensor] = {}
        self.owner: dict[int, torch.Tensor] = {}


class ErrorFeedback:
    """The residuals of one model's gradients on this rank.

    A parameter keeps its residuals when buckets are laid out anew.

    Args:
        dtype: theirs, float32 or bfloat16. bfloat16 takes half the memory and rounds what it keeps, so that a little is
            lost after all.
        group: the ranks that train together.
        hierarchical: only the ranks that lead their nodes encode, and have residuals.

    """

    def __init__(self, dtype: torch.dtype, group: ProcessGroup, hierarchical: bool) -> None:
        self._dtype, self._group = dtype, group
        encoders = group.nodes.leaders if hierarchical else range(group.size)
        self._num_encoders = len(encoders)
        self._place = list(encoders).index(group.rank) if group.rank in encoders else None
        self._buckets: list[Bucket] = []
        self._stripes: dict[int, tuple[int, int]] = {}  # by bucket: first element and number of what this rank owns
        self._kept, self._under_way = _Copy(), _Copy()
        self._is_under_way = False  # a backward has renewed them and no optimizer step has followed
        self._before = _Copy()  # of the backward under way, where it is not the first one since the step

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Takes over a new layout; collective."""
        coded = [bucket for bucket in buckets if bucket.declaration.codec is not None and self._group.size > 1]
        if not self._is_under_way:
            self._under_way = _Copy()
        self._kept = self._moved(self._kept, coded)
        self._under_way = self._moved(self._under_way, coded) if self._is_under_way else self._zeros(coded)
        self._buckets = coded
        self._stripes = {bucket.index: self._stripe(bucket) for bucket in coded}

    def residuals_of(self, bucket: Bucket) -> Residuals | None:
        """For the all_reduce of ``bucket`` in the backward under way; None where nothing is encoded."""
        if bucket.index not in self._kept.worker:
            return None
        source, destination = self._under_way if self._is_under_way else self._kept, self._under_way
        if self._is_under_way:
            self._before.worker[bucket.index] = source.worker[bucket.index].clone()
            self._before.owner[bucket.index] = source.owner[bucket.index].clone()
        return Residuals(
            source.worker[bucket.index],
            destination.worker[bucket.index],
            source.owner[bucket.index],
            destination.owner[bucket.index],
        )

    def end_backward(self, buckets: Iterable[Bucket]) -> None:
        """All buckets are exchanged; where one holds NaN or Inf the step will be skipped, so all is as before it."""
        self._is_under_way = bool(self._buckets) and all(bucket.is_finite() for bucket in buckets)
        for bucket in self._buckets if self._place is not None else ():
            # Between gradients nothing is sent: what the codec leaves there would widen its blocks from step to step.
            bucket.zero_padding(self._under_way.worker[bucket.index])
        self._before = _Copy()

    def leave_out(self, indices: Iterable[int]) -> None:
        """What was exchanged for these parameters is used by nobody: their residuals stay as before the backward."""
        wanted = set(indices)
        before = self._before if self._is_under_way else self._kept
        for bucket, member in self._members():
            if member.index in wanted:
                begin, end = bucket.place_of(member)
                _copy_part(before.worker[bucket.index], self._under_way.worker[bucket.index], begin, end)
                first = self._stripes[bucket.index][0]
                _copy_part(before.owner[bucket.index], self._under_way.owner[bucket.index], begin - first, end - first)

    def commit(self) -> None:
        """An optimizer steps with the gradients that were exchanged."""
        if self._is_under_way:
            self._kept, self._under_way = self._under_way, self._kept
            self._is_under_way = False

    def state_dict(self) -> dict[str, Any]:
        """As the last optimizer step left them: worker by parameter name, owner by bucket."""
        worker = {}
        for bucket, member in self._members():
            begin, end = bucket.place_of(member)
            worker[member.name] = self._kept.worker[bucket.index][begin:end].clone()
        owner = [self._kept.owner[bucket.index].clone() for bucket in self._buckets]
        return {"place": writer_of(self._group), "worker": worker, "owner": owner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what ``state_dict`` returned on this rank for the same layout.

        Raises:
            InvalidArgument: it is of other parameters, another dtype or another number of ranks.
        """
        check_writer(state["place"], self._group, "what this rank's codes have left out")
        own = self.state_dict()
        for kind, theirs, ours in (
            ("worker", dict(state["worker"]), own["worker"]),
            ("owner", dict(enumerate(state["owner"])), dict(enumerate(own["owner"]))),
        ):
            described = [{key: (value.numel(), value.dtype) for key, value in side.items()} for side in (theirs, ours)]
            if described[0] != described[1]:
                different = next(iter(dict(described[0].items() ^ described[1].items())))
                theirs, ours = (side.get(different, "not there") for side in described)
                raise InvalidArgument(
                    f"the {kind} residual of {different!r} is {theirs} in the checkpoint and {ours} here (elements, "
                    "type); load it with as many ranks, the same algorithm and the same options"
                )
        for bucket, member in self._members():
            begin, end = bucket.place_of(member)
            self._kept.worker[bucket.index][begin:end] = state["worker"][member.name]
        for bucket, owner in zip(self._buckets, state["owner"], strict=True):
            self._kept.owner[bucket.index].copy_(owner)
        self._is_under_way = False

    def _members(self) -> Iterator[tuple[Bucket, Member]]:
        """With their buckets, those that have residuals on this rank."""
        for bucket in self._buckets if self._place is not None else ():
            for member in bucket.members:
                yield bucket, member

    def _stripe(self, bucket: Bucket) -> tuple[int, int]:
        """The first element of what this rank owns, and their number."""
        if self._place is None:
            return 0, 0
        return _C.owned_stripe(bucket.numel, self._num_encoders, self._place, bucket.declaration.codec)

    def _zeros(self, buckets: Sequence[Bucket]) -> _Copy:
        copy = _Copy()
        for bucket in buckets:
            copy.worker[bucket.index] = torch.zeros(0 if self._place is None else bucket.numel, dtype=self._dtype)
            copy.owner[bucket.index] = torch.zeros(self._stripe(bucket)[1], dtype=self._dtype)
        return copy

    def _moved(self, old: _Copy, buckets: Sequence[Bucket]) -> _Copy:
        """``old``, of the present layout and emptied by it, in the layout ``buckets``."""
        new = self._zeros(buckets)
        place_in_new = {
            member.index: (bucket, *bucket.place_of(member)) for bucket in buckets for member in bucket.members
        }
        for bucket in self._buckets:
            whole = torch.zeros(bucket.numel, dtype=self._dtype)  # what all owners together have
            first, numel = self._stripes[bucket.index]
            whole[first : first + numel] = old.owner[bucket.index]
            self._group.all_reduce(whole, ReduceOp.SUM, label="residuals", blocking=True).wait()
            for member in (member for member in bucket.members if member.index in place_in_new):
                begin, end = bucket.place_of(member)
                into, into_begin, into_end = place_in_new[member.index]
                if self._place is not None:
                    new.worker[into.index][into_begin:into_end] = old.worker[bucket.index][begin:end]
                first, numel = self._stripe(into)
                low, high = max(into_begin, first), min(into_end, first + numel)
                if low < high:
                    from_begin = begin + low - into_begin
                    new.owner[into.index][low - first : high - first] = whole[from_begin : from_begin + high - low]
            del old.worker[bucket.index], old.owner[bucket.index]
        return new


def _copy_part(source: torch.Tensor, destination: torch.Tensor, begin: int, end: int) -> None:
    begin, end = max(begin, 0), min(max(end, 0), source.numel())
    if begin < end:
        destination[begin:end] = source[begin:end]
