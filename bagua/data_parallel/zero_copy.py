"""Gradients that are not copied into their buckets one by one: communication reads them where autograd has put them.

Data path: gradient ready -> **zero-copy** -> encoder -> bucket. A codec reads every gradient once, so copying them into
a bucket first would double what moves through memory, at the time at which the processor is busiest. Until the result
has come ``parameter.grad`` is autograd's own tensor; then it is the view into the bucket, as for copied gradients. On a
device those that are sent in full are copied when their bucket is launched, together: launches cost the host more than
the copies cost the device. The first backward copies all; then a bucket is treated so if the backward before sent it by
one such all_reduce, before the algorithm read its gradients. Where it does read them, they are copied at that moment.
Invariant: at any time those that are not copied are at most a quarter of all gradients, or two buckets where that is
more, so that they do not add up to another copy of all gradients where the network is slow; the others are copied as
they become ready.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from bagua.buckets import Bucket, Member, as_real

_LIMIT = 0.25  # of the gradients: what their codes of 8 bits would take


class ZeroCopy:
    """The gradients of one backward that stay where autograd has put them.

    Args:
        buckets: the layout; those whose ``declaration`` says so are read in place.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._bucket_of = {member.index: bucket for bucket in buckets for member in bucket.members}
        self._offsets = {m.index: bucket.place_of(m)[0] for bucket in buckets for m in bucket.members}
        self._buckets = tuple(buckets)
        self._in_place: dict[int, torch.Tensor] = {}  # by parameter
        self._in_place_bytes = self._limit_bytes = 0
        self._in_flight: deque[Bucket] = deque()
        self._segments: dict[int, list[tuple[int, torch.Tensor]]] = {}  # by bucket in flight

    def begin(self) -> None:
        """A backward begins; what one that failed has left is forgotten."""
        self._in_place.clear()
        self._in_flight.clear()
        self._segments.clear()
        sizes = [bucket.num_bytes for bucket in self._buckets if bucket.declaration.is_zero_copy]
        self._in_place_bytes = 0
        self._limit_bytes = max(_LIMIT * sum(sizes), 2 * max(sizes, default=0))  # two: one under way, and the next

    def keep(self, member: Member, grad: torch.Tensor) -> bool:
        """Leaves a gradient where it is that has become ready; False where it has to be copied into its bucket.

        Args:
            grad: lies as the view of ``member`` does.
        """
        if not self._bucket_of[member.index].declaration.is_zero_copy:
            return False
        if self._in_place_bytes + member.num_bytes > self._limit_bytes:
            self.release_completed()
            if self._in_place_bytes + member.num_bytes > self._limit_bytes:
                return False
        self._in_place[member.index] = grad
        self._in_place_bytes += member.num_bytes
        return True

    def launch(self, bucket: Bucket) -> None:
        """Its communication begins."""
        if bucket.declaration.codec is None:
            self._copy_together(bucket)
        in_place = self._in_place
        segments = None
        if in_place and any(member.index in in_place for member in bucket.members):
            segments = [(self._offsets[m.index], as_real(in_place.get(m.index, m.view))) for m in bucket.members]
            self._in_flight.append(bucket)
            self._segments[bucket.index] = segments

        def before_read() -> None:
            bucket.is_read, bucket.before_read = True, None
            self._copy_unsent(bucket)

        bucket.begin(segments, before_read)

    def _copy_together(self, bucket: Bucket) -> None:
        kept = [member for member in bucket.members if member.index in self._in_place]
        if kept:
            torch._foreach_copy_([member.view for member in kept], [self._in_place[member.index] for member in kept])
            self.release(bucket)

    def _copy_unsent(self, bucket: Bucket) -> None:
        """The gradients move into the bucket after all, unless an operation reads them where they are."""
        if bucket.take_segments() is None:
            return
        for member in bucket.members:
            grad = self._in_place.get(member.index)
            if grad is not None:
                member.fill(grad, is_alike=True)
        self.release(bucket)

    def release_completed(self) -> None:
        """Releases those that a communication has read which has ended meanwhile, in the order in which it began."""
        while self._in_flight and _is_read_and_completed(self._in_flight[0]):
            self.release(self._in_flight.popleft())

    def resume(self, bucket: Bucket) -> None:
        """The algorithm has waited for what it started, and may read the parameters' gradients."""
        if _is_read_and_completed(bucket):
            self.release(bucket)

    def finalize(self, bucket: Bucket) -> None:
        """The end of backward: all that was started for the bucket is complete."""
        self._copy_unsent(bucket)  # of an algorithm that has sent nothing this time
        self.release(bucket)

    def release(self, bucket: Bucket) -> None:
        """The result is in the bucket: its parameters' gradients are there from now on."""
        segments = self._segments.pop(bucket.index, None)
        if segments is not None:
            segments.clear()  # the Work keeps the list until somebody waits for it
        for member in bucket.members if self._in_place else ():
            grad = self._in_place.pop(member.index, None)
            if grad is not None:
                self._in_place_bytes -= member.num_bytes
                if member.parameter.grad is grad:  # a hook of the user's may have put something else there
                    member.parameter.grad = member.view


def _is_read_and_completed(bucket: Bucket) -> bool:
    # Until an operation takes the gradients before_read waits for them; what is complete may be of something else.
    return bucket.before_read is None and bool(bucket.works) and all(work.is_completed() for work in bucket.works)
