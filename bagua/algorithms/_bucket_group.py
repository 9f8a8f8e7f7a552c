"""The ranks, as an algorithm sees them: a ProcessGroup whose operations take buckets and record what they send.

Data path: policy -> **what is sent for a bucket** -> ProcessGroup -> engine. The arguments of an operation determine
everything else about it: the bucket's label in errors and in the timeline, whether gradients are read where autograd
has put them, cleared padding, error feedback, and what ``bucket.declaration`` says. So no algorithm declares anything,
and what is said of a bucket is what was sent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from bagua import codecs
from bagua.buckets import Bucket
from bagua.distributed.process_group import COUNTS_FORWARDS, ProcessGroup, ReduceOp, Work
from bagua.errors import InvalidArgument


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The record of what is sent for one bucket; shown by ``model.bagua.buckets`` and the timeline.

    Attributes:
        operation: the collective, such as ``"all_reduce"``; several in their order, joined by " + "; "" before the
            first exchange.
        codec: name of the codec of what travels, None for full precision.
        reason: why this bucket is treated differently from what the options ask, or "".
        hierarchical: inside the nodes at full precision first, then between them.
        is_zero_copy: gradients stay where autograd has put them until they are sent: encoded there, or on a device
            copied into the bucket together.
        is_sum: the result is the sum over ranks, so adding to it and exchanging it again would count it twice.
    """

    operation: str = ""
    codec: str | None = None
    reason: str = ""
    hierarchical: bool = False
    is_zero_copy: bool = False
    is_sum: bool = False

    def __str__(self) -> str:
        if not self.operation:
            return "not sent yet"
        text = f"{'hierarchical ' if self.hierarchical else ''}{self.operation}, {self.codec or 'full precision'}"
        return f"{text} ({self.reason})" if self.reason else text


def _recorded(name: str) -> Callable[..., Work]:
    """The operation ``name`` of a ProcessGroup, which takes a bucket in the place of a tensor and is recorded.

    It takes a ``label``, too, by default the bucket's, and as ``of`` the bucket that a message of its own stands for,
    with ``encoded``, the codec that made it.
    """

    @functools.wraps(getattr(ProcessGroup, name))
    def operation(
        self: BucketGroup, *args: Any, label: str = "", of: Bucket | None = None, encoded: str = "", **kwargs: Any
    ) -> Work:
        bucket = next((value for value in (*args, *kwargs.values()) if isinstance(value, Bucket)), of)
        codec = getattr(kwargs.get("codec"), "spec", kwargs.get("codec"))
        self._begin(bucket, Declaration(name, encoded or codec), False)
        args = tuple(value.flat if isinstance(value, Bucket) else value for value in args)
        kwargs = {key: value.flat if isinstance(value, Bucket) else value for key, value in kwargs.items()}
        if name == "all_gather" and not self._is_subgroup:
            kwargs["subject"], self._now.subject = self._now.subject, 0
        work = getattr(self.process_group, name)(*args, **kwargs)
        work.label = label or work.label or self._label(bucket)
        return self._end(bucket, work)

    return operation


@dataclasses.dataclass
class _UnderWay:
    """The bucket that is communicated now, for a group and its subgroups.

    Attributes:
        bucket: the one whose ``communicate`` runs.
        subject: what the first all_reduce or all_gather of a backward carries, so that ranks which are in different
            steps get an error; 0 once it has left.
    """

    bucket: Bucket | None = None
    subject: int = 0


class BucketGroup:
    """The ranks that train together; everything that a ProcessGroup has, and operations on buckets.

    Args:
        group: the ranks.
        record: called with each Work, its group, whether it is a bucket's, and its codec, "" for full precision.
        parent: of a subgroup.

    Attributes:
        process_group: the group itself.
        checks_results: True if reductions of buckets on the CPU note whether their result is finite.
    """

    def __init__(
        self,
        group: ProcessGroup,
        record: Callable[[Work, ProcessGroup, bool, str], None],
        parent: BucketGroup | None = None,
    ) -> None:
        self.process_group = group
        self.checks_results = False
        self._record, self._is_subgroup = record, parent is not None
        self._now: _UnderWay = _UnderWay() if parent is None else parent._now

    # --- the ranks

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.process_group.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.process_group.size

    def __getattr__(self, name: str) -> Any:
        if name == "process_group":  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.process_group, name)

    def subgroup(self, name: str, ranks: Sequence[int], timeout: timedelta | float) -> BucketGroup:
        """Makes a group of some of the ranks, see ``ProcessGroup.subgroup``."""
        return BucketGroup(self.process_group.subgroup(name, ranks, timeout), self._record, self)

    # --- operations

    def all_reduce(
        self,
        tensor: Bucket | torch.Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        codec: str | codecs.Codec | codecs.SeededCodec | None = None,
        hierarchical: bool = False,
        feedback: str | None = None,
        prepare: Callable[[], None] | None = None,
        reason: str = "",
        label: str = "",
        blocking: bool = False,
        parts: Sequence[tuple[int, torch.Tensor]] | None = None,
    ) -> Work:
        """Starts ``bagua.all_reduce``.

        Args:
            feedback: of a bucket under a codec, the name of a ``parameter_state`` of the shape of the gradients: what
                the codes leave out, at both ends, goes there and is added to what is encoded next.
            prepare: of a bucket, called before it is read, to change what is in it.
            reason: why a bucket is treated differently from what the options ask; shown in its declaration.
            parts: of a bucket, what is reduced instead of what it holds: first element and tensor of each part.
        """
        bucket = self._bucket_in(tensor)
        if feedback is not None and (bucket is None or self._is_subgroup):
            raise InvalidArgument(
                f"feedback={feedback!r} is for a bucket that all ranks reduce; leave it out for other tensors, and in "
                "subgroups"
            )
        spec = getattr(codec, "spec", codec)
        is_one_node = hierarchical and len(self.process_group.nodes.members) == 1
        if is_one_node:
            codec, spec, reason = None, None, reason or "one node"
        elif self.size == 1 and codec is not None:  # a rank by itself encodes nothing
            codec, spec, reason = None, None, reason or "one rank"
        reads_once = codec is not None or (bucket is not None and bucket.device.type != "cpu")
        is_direct = reads_once and not hierarchical and prepare is None and parts is None
        declaration = Declaration(
            "all_reduce", spec, reason, hierarchical and not is_one_node, is_sum=op == ReduceOp.SUM
        )
        is_zero_copy = self._begin(bucket, declaration, is_direct)
        if prepare is not None:
            if bucket is not None:
                bucket.memory(with_gradients=True)  # they are there before they are changed
            prepare()
        residuals = None
        if bucket is not None:
            if parts is None and is_zero_copy:
                parts = bucket.take_segments()
            if parts is None and codec is not None:
                bucket.zero_padding()
            if feedback is not None and codec is not None:
                residuals = bucket.residuals(feedback, codec, hierarchical)
        subject = 0
        if not self._is_subgroup:
            subject, self._now.subject = self._now.subject, 0
        work = self.process_group.all_reduce(
            tensor if bucket is None else bucket.memory(with_gradients=parts is None),
            op,
            codec=codec,
            hierarchical=hierarchical,
            label=label or self._label(bucket),
            blocking=blocking,
            feedback=residuals,
            parts=parts,
            checks_result=self.checks_results and bucket is not None and bucket is self._now.bucket,
            subject=subject,
        )
        return self._end(bucket, work, is_result=True)

    def neighbor_average(
        self,
        tensor: Bucket | torch.Tensor,
        topology: str = "ring",
        step: int = 0,
        *,
        codec: str | None = None,
        hierarchical: bool = False,
        reason: str = "",
        label: str = "",
        blocking: bool = False,
        parts: Sequence[tuple[int, torch.Tensor]] | None = None,
        flat: torch.Tensor | None = None,
    ) -> Work:
        """Starts ``bagua.neighbor_average``.

        Args:
            reason, parts: as for ``all_reduce``.
            flat: of a bucket, what is averaged instead of its own memory; of its size.
        """
        bucket = self._bucket_in(tensor)
        self._begin(bucket, Declaration(f"neighbor_average ({topology})", codec, reason, hierarchical), False)
        if bucket is not None:
            tensor = bucket.memory(with_gradients=parts is None) if flat is None else flat
        work = self.process_group.neighbor_average(
            tensor,
            topology,
            step,
            codec=codec,
            hierarchical=hierarchical,
            label=label or self._label(bucket),
            blocking=blocking,
            parts=parts,
        )
        return self._end(bucket, work)

    def difference_ring_average(
        self,
        bucket: Bucket,
        replicas: Sequence[torch.Tensor],
        *,
        codec: str | codecs.Codec | codecs.SeededCodec,
        flat: torch.Tensor,
    ) -> Work:
        """Starts ``ProcessGroup.difference_ring_average`` of the weights of ``bucket`` that are in ``flat``."""
        self._begin(bucket, Declaration("difference_ring_average", getattr(codec, "spec", codec)), False)
        work = self.process_group.difference_ring_average(flat, replicas, codec=codec, label=bucket.label)
        return self._end(bucket, work)

    reduce = _recorded("reduce")
    reduce_scatter = _recorded("reduce_scatter")
    all_gather = _recorded("all_gather")
    gather = _recorded("gather")
    scatter = _recorded("scatter")
    all_to_all = _recorded("all_to_all")
    broadcast = _recorded("broadcast")
    send = _recorded("send")
    recv = _recorded("recv")

    def _bucket_in(self, tensor: Bucket | torch.Tensor) -> Bucket | None:
        """The bucket whose memory an operation is for."""
        if isinstance(tensor, Bucket):
            return tensor
        current = self._now.bucket
        return current if current is not None and current.is_memory(tensor) else None

    def _label(self, bucket: Bucket | None) -> str:
        bucket = self._now.bucket if bucket is None else bucket
        return "" if bucket is None else bucket.label

    def _begin(self, bucket: Bucket | None, declaration: Declaration, is_direct: bool) -> bool:
        """Records what is to be sent; returns True if gradients may be read where autograd has put them."""
        current = self._now.bucket
        is_zero_copy = is_direct and bucket is not None and bucket is current and not bucket.is_read
        bucket = current if bucket is None else bucket
        if bucket is None:
            return False
        if is_zero_copy:
            declaration = dataclasses.replace(declaration, is_zero_copy=True)
        if bucket is current:
            bucket.sent.append(declaration)
        else:
            bucket.declaration = declaration
        return is_zero_copy

    def _end(self, bucket: Bucket | None, work: Work, is_result: bool = False) -> Work:
        current = self._now.bucket
        declared = current if bucket is None else bucket
        codec = None
        if declared is not None:
            codec = (declared.sent[-1] if declared is current else declared.declaration).codec
        self._record(work, self.process_group, declared is not None, codec or "")
        if current is not None:
            current.works.append(work)
            current.is_result = is_result and bucket is current and len(current.works) == 1
        return work

    # --- from the reducer

    def begin_backward(self, num_forwards: int, is_training: bool) -> None:
        """The first all_reduce from here on carries the number of the model's forwards in that mode."""
        self._now.subject = COUNTS_FORWARDS + (2 * num_forwards + is_training) % COUNTS_FORWARDS

    def begin(self, bucket: Bucket) -> None:
        """Assigns what is started until ``pause`` to ``bucket``, whose communication begins or continues."""
        self._now.bucket = bucket

    def pause(self) -> None:
        """Ends what belongs to a bucket for now."""
        bucket, self._now.bucket = self._now.bucket, None
        if bucket is not None and bucket.sent:
            bucket.declaration = bucket.sent[0] if len(bucket.sent) == 1 else _together(bucket.sent)


def _together(sent: Sequence[Declaration]) -> Declaration:
    operations = " + ".join(declaration.operation for declaration in sent)
    coded = next((declaration for declaration in sent if declaration.codec is not None), sent[0])
    return dataclasses.replace(coded, operation=operations, is_zero_copy=False, is_sum=False)
