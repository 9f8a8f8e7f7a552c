"""Rank 0's buffers, sent to all ranks at the end of a synchronising backward; those of experts within their group.

Data path: the last buckets -> **buffers** -> the end of backward. So nothing waits before a forward, and evaluation
sees equal buffers on all ranks. Invariants: values arrive bit for bit, as bytes, one message per device. The buffers
are those that the model has at that moment; ranks whose buffers differ in size get the error of the collective. What
the graph of another forward may have saved is not written to: the buffer gets new memory then.
"""

from __future__ import annotations

import weakref

import torch

from bagua.data_parallel.scope import IGNORED, Scope
from bagua.distributed.process_group import ProcessGroup, Work

__all__ = ["BufferBroadcast"]

_ALIGN_BYTES = 16  # a multiple of every item size, so that a slice of bytes can be viewed as any dtype


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks.

    Args:
        model: held weakly.
        scope: the ranks; buffers of another group than the model's are those of its first rank.
    """

    def __init__(self, model: torch.nn.Module, scope: Scope) -> None:
        self._model, self._scope = weakref.ref(model), scope
        # One per group and device: the message, whether this rank sends it, its memory, and the buffers in it.
        self._under_way: list[tuple[Work, bool, torch.Tensor, list[torch.Tensor]]] = []

    def start(self, src: int = 0) -> list[tuple[ProcessGroup, Work]]:
        """Starts one broadcast of rank ``src``'s buffers per group and device, and returns them."""
        model, started = self._model(), []
        self._under_way = []
        if model is None or self._scope.group.size == 1:
            return []
        together: dict[tuple[int, torch.device], list[torch.Tensor]] = {}  # by part and device
        for name, buffer in model.named_buffers():
            part = self._scope.part_of(name)
            if part == IGNORED or self._scope.groups[part].size == 1:
                continue
            if buffer.numel() and type(buffer) is not torch.nn.parameter.UninitializedBuffer:
                together.setdefault((part, buffer.device), []).append(buffer)
        for (part, device), buffers in together.items():
            memory = torch.empty(sum(map(_padded_bytes, buffers)), dtype=torch.uint8, device=device)
            group, root = self._scope.groups[part], src if part == 0 else 0
            if group.rank == root:
                for buffer, place in zip(buffers, _places(memory, buffers), strict=True):
                    place.copy_(buffer.detach())
            work = group.broadcast(memory, root, label="buffers")
            self._under_way.append((work, group.rank == root, memory, buffers))
            started.append((group, work))
        return started

    def finish(self, may_write: bool) -> None:
        """Waits until every buffer equals that of the rank that sends.

        Args:
            may_write: False if the graph of another forward may be alive, which may have saved a buffer.
        """
        under_way, self._under_way = self._under_way, []
        for work, is_sender, memory, buffers in under_way:
            work.wait()
            if is_sender:
                continue
            for buffer, value in zip(buffers, _places(memory, buffers), strict=True):
                if may_write:
                    buffer.data.copy_(value)  # .data: a version of its own, as BatchNorm saves its statistics
                else:
                    self._replace(buffer, value)

    def _replace(self, buffer: torch.Tensor, value: torch.Tensor) -> None:
        model = self._model()
        if model is None or (buffer.is_cpu and torch.equal(buffer, value)):
            return
        new = torch.empty_like(buffer).copy_(value)
        for module in model.modules():
            for name, held in module._buffers.items():
                if held is buffer:
                    module._buffers[name] = new


def _padded_bytes(buffer: torch.Tensor) -> int:
    return buffer.nbytes + -buffer.nbytes % _ALIGN_BYTES


def _places(memory: torch.Tensor, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of the message, each of the dtype and shape of its buffer."""
    begin, places = 0, []
    for buffer in buffers:
        places.append(memory[begin : begin + buffer.nbytes].view(buffer.dtype).view(buffer.shape))
        begin += _padded_bytes(buffer)
    return places
