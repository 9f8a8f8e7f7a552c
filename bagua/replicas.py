"""What makes the ranks' models copies of each other: an equal start and equal buffers. Rank 0 is the original.

Data path: before the first step (parameters, buffers, optimizer state) and before each training forward
(buffers). Invariant: values arrive bit for bit, whatever their dtype; they travel as bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from bagua.errors import InvalidArgument
from bagua.group import ProcessGroup, Work

_ALIGN_BYTES = 16  # a multiple of every item size, so that a slice of bytes can be viewed as any dtype


def broadcast_model(model: torch.nn.Module, group: ProcessGroup) -> None:
    """Makes all parameters (frozen ones too) and buffers equal to rank 0's, in place."""
    if group.size == 1:
        return
    works = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensor.detach()
        if tensor.is_contiguous():
            works.append(group.broadcast(_bytes_of(tensor), 0, label=name))
        else:
            copy = tensor.contiguous()
            group.broadcast(_bytes_of(copy), 0, label=name).wait()
            tensor.copy_(copy)
    for work in works:
        work.wait()


def broadcast_optimizer(optimizer: torch.optim.Optimizer, group: ProcessGroup) -> None:
    """Makes the state and the options (such as lr) of ``optimizer`` equal to rank 0's.

    Tensors travel one by one, so that no rank holds the state twice.
    """
    if group.size == 1:
        return
    own_tensors: list[torch.Tensor] = []
    own = _take_out_tensors(optimizer.state_dict(), own_tensors)
    original = group.broadcast_object(own, 0)
    is_equal = own == original  # True on rank 0
    tensors = own_tensors if is_equal else _empty_tensors(original)
    for index, tensor in enumerate(tensors):
        sent = tensor.detach().contiguous()
        group.broadcast(_bytes_of(sent), 0, label=f"optimizer state {index}").wait()
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
    if not is_equal:
        optimizer.load_state_dict(_put_in_tensors(original, iter(tensors)))


class _TensorSpec(tuple):
    """Stands for a tensor in a tree: (shape, dtype)."""

    __slots__ = ()


def _take_out_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(tree, torch.Tensor):
        tensors.append(tree)
        return _TensorSpec((tuple(tree.shape), tree.dtype))
    if isinstance(tree, dict):
        return {key: _take_out_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_take_out_tensors(value, tensors) for value in tree)
    return tree


def _empty_tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, _TensorSpec):
        shape, dtype = tree
        return [torch.empty(shape, dtype=dtype)]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [tensor for child in children for tensor in _empty_tensors(child)]


def _put_in_tensors(tree: Any, tensors: Any) -> Any:
    if isinstance(tree, _TensorSpec):
        return next(tensors)
    if isinstance(tree, dict):
        return {key: _put_in_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_put_in_tensors(value, tensors) for value in tree)
    return tree


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks in one message, through memory that is kept.

    Buffers are looked up by owner and name each time, so a buffer that a forward replaces is found.

    Raises:
        InvalidArgument: from ``run``, when a buffer has changed its shape or dtype.
    """

    def __init__(self, model: torch.nn.Module, group: ProcessGroup) -> None:
        self._group = group
        self._slots: list[tuple[torch.nn.Module, str, str, torch.Tensor]] = []  # owner, attribute, full name, slot
        places = []
        end = 0
        for name, buffer in model.named_buffers():
            owner_name, _, attribute = name.rpartition(".")
            begin, end = end, end + buffer.numel() * buffer.element_size()
            places.append((model.get_submodule(owner_name), attribute, name, buffer, begin, end))
            end += -end % _ALIGN_BYTES
        self._memory = group.empty(end, torch.uint8) if places else torch.empty(0, dtype=torch.uint8)
        for owner, attribute, name, buffer, begin, stop in places:
            slot = self._memory[begin:stop].view(buffer.dtype).view(buffer.shape)
            self._slots.append((owner, attribute, name, slot))

    def run(self) -> Work | None:
        """Blocks until every buffer equals rank 0's. Returns the completed message, if there was one."""
        if self._group.size == 1 or not self._slots:
            return None
        buffers = [self._current(*slot) for slot in self._slots]
        if self._group.rank == 0:
            for buffer, (_, _, _, slot) in zip(buffers, self._slots, strict=True):
                slot.copy_(buffer)
        work = self._group.broadcast(self._memory, 0, label="buffers", blocking=True)
        work.wait()
        if self._group.rank != 0:
            for buffer, (_, _, _, slot) in zip(buffers, self._slots, strict=True):
                buffer.copy_(slot)
        return work

    @staticmethod
    def _current(owner: torch.nn.Module, attribute: str, name: str, slot: torch.Tensor) -> torch.Tensor:
        buffer = getattr(owner, attribute)
        if not isinstance(buffer, torch.Tensor) or buffer.shape != slot.shape or buffer.dtype != slot.dtype:
            now = f"{tuple(buffer.shape)} {buffer.dtype}" if isinstance(buffer, torch.Tensor) else repr(buffer)
            raise InvalidArgument(
                f"buffer {name!r} was {tuple(slot.shape)} {slot.dtype} when the model was wrapped and is now {now}; "
                "call with_bagua again after such a change, or pass broadcast_buffers=False"
            )
        # .data has its own version counter: a second forward before backward must not look like an
        # in-place change of what the first one saved (BatchNorm saves its statistics).
        return buffer.data


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
