"""Gradients that are not copied into their buckets: communication reads them where autograd has put them.

Data path: gradient ready -> **lent** -> encoder -> bucket. A codec reads every gradient once, so copying them into a
bucket first would double what moves through memory, at the time at which the processor is busiest. Until the result
has come ``parameter.grad`` is autograd's own tensor; then it is the view into the bucket, as for copied gradients.
Invariant: at any time those that are lent are at most a quarter of all gradients, or two buckets where that is more, so
that they do not add up to another copy of all gradients where the network is slow; the others are copied as they become
ready.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.algorithms.base import Algorithm
from bagua.buckets import Bucket, Member
from bagua.distributed.process_group import Work

_LIMIT = 0.25  # of the gradients: what their codes of 8 bits would take


class BorrowedGradients:
    """The gradients of one backward that are lent to communication.

    Args:
        algorithm: says whether its ``communicate`` takes ``bucket.parts``.
        buckets: the layout.
    """

    def __init__(self, algorithm: Algorithm, buckets: Sequence[Bucket]) -> None:
        coded = [bucket for bucket in buckets if algorithm.takes_parts and _encodes_at_once(bucket)]
        self._begins = {member.index: bucket.place_of(member)[0] for bucket in coded for member in bucket.members}
        sizes = [bucket.num_bytes for bucket in coded]
        self._limit_bytes = max(_LIMIT * sum(sizes), 2 * max(sizes, default=0))  # two: one under way, and the next
        self._lent: dict[int, torch.Tensor] = {}
        self._lent_bytes = 0
        self._num_back = 0  # of the communications under way, in their order: those that are known to have ended

    def begin(self) -> None:
        """A backward begins; what one that failed has left is forgotten."""
        self._lent.clear()
        self._lent_bytes = self._num_back = 0

    def lend(self, member: Member, grad: torch.Tensor, pending: Sequence[tuple[Bucket, Work]]) -> bool:
        """Lends a gradient that has become ready and lies as its view does; False where it has to be copied there.

        Where too many are lent, those of ``pending`` come back first whose communication has ended.
        """
        if member.index not in self._begins:
            return False
        if self._lent_bytes + member.num_bytes > self._limit_bytes:
            self.give_back_completed(pending)
            if self._lent_bytes + member.num_bytes > self._limit_bytes:
                return False
        self._lent[member.index] = grad
        self._lent_bytes += member.num_bytes
        return True

    def gather(self, bucket: Bucket) -> None:
        """Before its communication: sets ``bucket.parts``, or clears what is between the gradients in its memory."""
        bucket.parts = None
        if any(member.index in self._lent for member in bucket.members):
            begins, lent = self._begins, self._lent
            bucket.parts = [(begins[m.index], lent.get(m.index, m.view)) for m in bucket.members]
        elif bucket.declaration.codec is not None:
            bucket.zero_padding()

    def give_back_completed(self, pending: Sequence[tuple[Bucket, Work]]) -> None:
        """Those whose communication has ended meanwhile; it ends in the order of ``pending``."""
        while self._num_back < len(pending) and pending[self._num_back][1].is_completed():
            self.give_back(pending[self._num_back][0])
            self._num_back += 1

    def give_back(self, bucket: Bucket) -> None:
        """The result is in the bucket: its parameters' gradients are there from now on."""
        if bucket.parts is None:
            return
        bucket.parts.clear()  # the Work of the operation keeps the list, until somebody waits for it
        bucket.parts = None
        for member in bucket.members:
            grad = self._lent.pop(member.index, None)
            if grad is not None:
                self._lent_bytes -= member.num_bytes
                if member.parameter.grad is grad:  # a hook of the user's may have put something else there
                    member.parameter.grad = member.view


def _encodes_at_once(bucket: Bucket) -> bool:
    """Not after a stage at full precision, which works on the bucket."""
    declaration = bucket.declaration
    return declaration.operation == "all_reduce" and declaration.codec is not None and not declaration.hierarchical
