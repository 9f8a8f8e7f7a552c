"""find_unused_parameters: what a parameter contributes that this rank's backward left out.

Data path: end of backward, between the last gradient and the last buckets. Invariant: every rank sends
the same buckets and one small message about use, whatever its own backward used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.bucket import GradientStorage
from bagua.group import ProcessGroup, ReduceOp


class UnusedParameters:
    """Keeps which parameters this rank has used since the last synchronisation.

    Attributes:
        is_used: a byte per parameter, set to 1 as its gradient becomes ready, in no_sync too.
    """

    def __init__(self, storage: GradientStorage, group: ProcessGroup) -> None:
        self.is_used = bytearray(len(storage.parameters))
        self._storage, self._group = storage, group

    def fill_in(self, missing: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Prepares the buckets for the parameters that are ``missing`` from this backward.

        A gradient that an earlier no_sync backward left still counts; otherwise zeros do. A parameter
        that no rank has used keeps its gradient as it was.

        Returns:
            (view, value) pairs to put back when communication has ended.
        """
        used = torch.frombuffer(bytearray(self.is_used), dtype=torch.uint8)
        self._group.all_reduce(used, ReduceOp.MAX, label="used parameters", blocking=True).wait()
        self.is_used[:] = bytes(len(self.is_used))
        is_used_anywhere = used.tolist()
        kept = []
        for index in missing:
            parameter, view = self._storage.parameters[index], self._storage.views[index]
            if not is_used_anywhere[index] and parameter.grad is view:
                kept.append((view, view.clone()))
            elif not is_used_anywhere[index] or parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            if is_used_anywhere[index]:
                parameter.grad = view
        return kept
