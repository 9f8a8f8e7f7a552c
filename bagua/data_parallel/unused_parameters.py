"""find_unused_parameters: what a parameter contributes that this rank's backward has not used.

Data path: end of backward, around the last buckets. Invariant: every rank sends the same buckets and behind
them one small message about use, whatever its own backward used: which buckets are already under way differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import BucketStorage
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work


class UnusedParameters:
    """Keeps which parameters this rank has used since the last synchronisation.

    Attributes:
        is_used: a byte per parameter, set to 1 as its gradient becomes ready, in no_sync too.
    """

    def __init__(self, storage: BucketStorage, group: ProcessGroup) -> None:
        self.is_used = bytearray(len(storage.parameters))
        self._storage, self._group = storage, group
        self._used = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._agreeing: Work | None = None
        self._missing: Sequence[int] = ()
        self._kept: dict[int, torch.Tensor] = {}  # of missing parameters: what their views held

    def fill_in(self, missing: Sequence[int]) -> None:
        """Prepares the buckets for the parameters that are ``missing`` from this backward.

        A gradient that an earlier no_sync backward left still counts; otherwise zeros do.
        """
        self._missing, self._kept = missing, {}
        for index in missing:
            parameter, view = self._storage.parameters[index], self._storage.members[index].view
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is view:
                self._kept[index] = view.clone()
            else:
                view.copy_(parameter.grad)

    def start_agreeing(self) -> Work:
        """Sends what this rank has used. All ranks call it at the same point: behind the last bucket."""
        self._used = torch.frombuffer(bytearray(self.is_used), dtype=torch.uint8)
        self.is_used[:] = bytes(len(self.is_used))
        self._agreeing = self._group.all_reduce(self._used, ReduceOp.MAX, label="used parameters")
        return self._agreeing

    def finalize(self) -> list[int]:
        """All buckets are exchanged: parameters that no rank has used, which are returned, keep their gradients."""
        unused = []
        self._agreeing.wait()
        is_used_anywhere = self._used.tolist()
        for index in self._missing:
            view = self._storage.members[index].view
            if is_used_anywhere[index]:
                self._storage.parameters[index].grad = view
                continue
            unused.append(index)
            if index in self._kept:
                view.copy_(self._kept[index])
        self._kept = {}
        return unused
