"""What makes the ranks' models copies of each other: an equal start and equal buffers. Rank 0 is the original.

Data path: before the first step (parameters, buffers, optimizer state) and before each training forward
(buffers). Invariant: values arrive bit for bit, whatever their dtype; they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua.buckets import is_dense
from bagua.data_parallel.failures import ending
from bagua.data_parallel.validation import is_sharded
from bagua.distributed import plain_data
from bagua.distributed.consensus import agree
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument

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


class OptimizerStates:
    """Makes the states and the options (such as lr) of ``optimizers`` equal to rank 0's, in three parts.

    Their ``state_dict`` and their objects may refuse in the first two, which change nothing. ``load_state_dict`` runs
    in the last, on the ranks whose states are not like rank 0's, when the models are equal already: what an optimizer's
    own one raises, or a hook of it, is told to all ranks and ends the group. Tensors travel one by one, so that no rank
    holds a state twice, but for those that ``state_dict`` copies.

    Args:
        optimizers: in the same order on all ranks. Those whose states are spread over the ranks keep them.
        group: the ranks.

    Raises:
        InvalidArgument: on rank 0, one holds what is not sent between ranks.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], group: ProcessGroup) -> None:
        equal = [optimizer for optimizer in optimizers if not is_sharded(optimizer)]
        self._optimizers, self._group = tuple(equal) if group.size > 1 else (), group
        self._devices = [*map(_devices_of, self._optimizers)]
        self._tensors: list[list[torch.Tensor]] = [[] for _ in self._optimizers]
        self._trees = [
            _take_out_tensors(optimizer.state_dict(), tensors)
            for optimizer, tensors in zip(self._optimizers, self._tensors, strict=True)
        ]
        self._are_held = [*map(_are_held, self._optimizers, self._tensors)]
        is_original = group.rank == 0
        self._texts = [*map(_text_of, range(len(self._trees)), self._optimizers, self._trees)] if is_original else []

    def receive(self) -> None:
        """All but the tensors comes from rank 0; collective, one message for all optimizers."""
        if not self._optimizers:
            return
        texts = self._group.broadcast_plain(self._texts, 0)
        if self._group.rank == 0:
            return
        for index, text in enumerate(texts):
            tree = plain_data.loads(text, [_TensorSpec])
            if self._are_held[index] and _is_same(self._trees[index], tree):
                self._trees[index] = None
            else:
                self._trees[index], self._tensors[index] = tree, _empty_tensors(tree, self._devices[index])

    def take_over(self) -> None:
        """The tensors follow, and the optimizers take all of it; collective."""
        for optimizer, tree, tensors in zip(self._optimizers, self._trees, self._tensors, strict=True):
            for index, tensor in enumerate(tensors):
                sent = tensor.detach().contiguous()
                self._group.broadcast(_bytes_of(sent), 0, label=f"optimizer state {index}").wait()
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(sent)
            if self._group.rank != 0 and tree is not None:
                _load(optimizer, _mapped(tree, _TensorSpec, lambda spec, tensors=tensors: tensors[spec[0]]))


def _text_of(index: int, optimizer: torch.optim.Optimizer, tree: Any) -> bytes:
    try:
        return plain_data.dumps(tree, [_TensorSpec])
    except InvalidArgument as error:
        raise InvalidArgument(
            f"the state or the options of optimizers[{index}] ({type(optimizer).__name__}), which the other ranks are "
            f"to get from rank 0, cannot be sent: {error}"
        ) from None


def _are_held(optimizer: torch.optim.Optimizer, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are the tensors that the optimizer steps with, no copies: what is written to them is its state."""
    held: list[torch.Tensor] = []
    _take_out_tensors([optimizer.state, optimizer.param_groups], held)
    return {t.data_ptr() for t in tensors if t.numel()} <= {t.data_ptr() for t in held}


def _is_same(tree: Any, other: Any) -> bool:
    try:
        return bool(tree == other)
    except Exception:  # objects that do not tell, such as NumPy arrays: taking rank 0's is right in any case
        return False


def _load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """``load_state_dict``, which casts states to the dtype of their parameter; rank 0's have their own."""
    sent: list[torch.Tensor] = []
    _take_out_tensors(state_dict, sent)
    optimizer.load_state_dict(state_dict)
    if _dtypes_in(optimizer) == [tensor.dtype for tensor in sent]:
        return
    for group, sent_group in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, key in zip(group["params"], sent_group["params"], strict=True):
            if key in state_dict["state"]:
                optimizer.state[parameter] = _uncast(optimizer.state[parameter], state_dict["state"][key])
    if _dtypes_in(optimizer) != [tensor.dtype for tensor in sent]:
        raise InvalidArgument(
            f"the load_state_dict of a {type(optimizer).__name__} changes the dtypes of the states that come from rank "
            "0, which keeps its own; let it take over what state_dict returns as it is"
        )


def _dtypes_in(optimizer: torch.optim.Optimizer) -> list[torch.dtype]:
    tensors: list[torch.Tensor] = []
    _take_out_tensors(optimizer.state_dict(), tensors)
    return [tensor.dtype for tensor in tensors]


def _uncast(loaded: Any, sent: Any) -> Any:
    """``loaded``, with the tensors of ``sent`` in the place of those whose dtype is another."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor):
        return loaded if loaded.dtype == sent.dtype else sent
    if isinstance(loaded, dict) and isinstance(sent, dict):
        loaded.update({key: _uncast(value, sent[key]) for key, value in loaded.items() if key in sent})
    elif isinstance(loaded, (list, tuple)) and isinstance(sent, (list, tuple)):
        return type(loaded)(map(_uncast, loaded, sent))
    return loaded


class _TensorSpec(tuple):
    """Stands for a tensor in a tree: (number, shape, strides, dtype, type of its device).

    The number is its index among those that travel: trees whose entries are in another order are not the same. Strides,
    since fused optimizers go through a parameter and its states by their memory; contiguous ones where it is not dense.
    """

    __slots__ = ()


def _take_out_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    def take_out(tensor: torch.Tensor) -> _TensorSpec:
        tensors.append(tensor)
        strides = (tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")).stride()
        return _TensorSpec((len(tensors) - 1, tuple(tensor.shape), strides, tensor.dtype, tensor.device.type))

    return _mapped(tree, torch.Tensor, take_out)


def _empty_tensors(tree: Any, devices: Mapping[str, torch.device]) -> list[torch.Tensor]:
    """What the specs of a tree stand for, on this rank's devices of the same types."""
    tensors: list[torch.Tensor] = []

    def add(spec: _TensorSpec) -> None:
        _, shape, strides, dtype, kind = spec
        tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=devices.get(kind, kind)))

    _mapped(tree, _TensorSpec, add)
    return tensors


def _devices_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Where this rank keeps what the optimizer steps, by the type of the device."""
    return {p.device.type: p.device for options in optimizer.param_groups for p in options["params"]}


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The tree with ``change`` of each leaf of this kind in its place, in the order of its entries."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, kind, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, kind, change) for value in tree)
    return tree


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks in one message per device, through memory that is kept.

    Buffers are looked up by owner and name each time, so a buffer that a forward replaces is found. Before them travels
    a byte that tells whether rank 0 can send its own: if not, all ranks raise, and the group stays whole.
    """

    def __init__(self, model: torch.nn.Module, group: ProcessGroup) -> None:
        self._group = group
        self._slots: list[tuple[torch.nn.Module, str, str, torch.Tensor]] = []  # owner, attribute, full name, slot
        slots_in_memory = []
        cpu = torch.device("cpu")
        ends = {cpu: _ALIGN_BYTES}
        for name, buffer in model.named_buffers():
            owner_name, _, attribute = name.rpartition(".")
            begin = ends.get(buffer.device, 0)
            end = begin + buffer.numel() * buffer.element_size()
            slots_in_memory.append((model.get_submodule(owner_name), attribute, name, buffer, begin, end))
            ends[buffer.device] = end + -end % _ALIGN_BYTES
        if not slots_in_memory:
            ends[cpu] = 0
        # The CPU's comes first: it tells whether the others hold anything.
        self._memories = {device: group.empty(end, torch.uint8, device) for device, end in ends.items()}
        self._is_refused = self._memories[cpu][:1]
        for owner, attribute, name, buffer, begin, stop in slots_in_memory:
            slot = self._memories[buffer.device][begin:stop].view(buffer.dtype).view(buffer.shape)
            self._slots.append((owner, attribute, name, slot))

    def run(self) -> list[Work]:
        """Blocks until every buffer equals rank 0's. Returns the completed messages.

        Raises:
            InvalidArgument: on all ranks, if on one a buffer has changed its shape or dtype, or has become one that
                torch cannot write or read. Only where it is rank 0's shapes or dtypes does the group go on.
        """
        if self._group.size == 1 or not self._slots:
            return []
        buffers = [getattr(owner, attribute, None) for owner, attribute, _, _ in self._slots]
        error = self._refusal(buffers)
        if self._group.rank == 0:
            self._is_refused.fill_(error is not None)
        if self._group.rank == 0 and error is None:
            self._copy(buffers, is_sent=True)
        works = []
        for memory in self._memories.values():
            works.append(self._group.broadcast(memory, 0, label="buffers", blocking=True))
            works[-1].wait()
        if self._is_refused.item():
            agree(self._group, lambda: _raised(error), "change the buffers of all ranks alike")
        if error is not None:
            raise ending(self._group, error)
        if self._group.rank != 0:
            self._copy(buffers, is_sent=False)
        return works

    def _copy(self, buffers: Sequence[torch.Tensor], is_sent: bool) -> None:
        for buffer, (_, _, name, slot) in zip(buffers, self._slots, strict=True):
            try:
                # .data has its own version counter: a second forward before backward must not look like an
                # in-place change of what the first one saved (BatchNorm saves its statistics).
                source, target = (buffer, slot) if is_sent else (slot, buffer.data)
                target.copy_(source)
            except Exception as error:  # torch's, of a new buffer that is expanded, sparse or the like
                rank = self._group.rank
                told = (
                    f"rank {rank}: buffer {name!r} cannot be {'read' if is_sent else 'written'}: {error}; put a plain "
                    "copy in its place, or pass broadcast_buffers=False"
                )
                raise ending(self._group, InvalidArgument(told, rank=rank)) from error

    def _refusal(self, buffers: Sequence[Any]) -> InvalidArgument | None:
        for buffer, (_, _, name, slot) in zip(buffers, self._slots, strict=True):
            if isinstance(buffer, torch.Tensor) and buffer.shape == slot.shape and buffer.dtype == slot.dtype:
                continue
            now = f"{tuple(buffer.shape)} {buffer.dtype}" if isinstance(buffer, torch.Tensor) else repr(buffer)
            return InvalidArgument(
                f"rank {self._group.rank}: buffer {name!r} was {tuple(slot.shape)} {slot.dtype} when the model was "
                f"wrapped and is now {now}; call with_bagua again after such a change, or pass broadcast_buffers=False",
                rank=self._group.rank,
            )
        return None


def _raised(error: InvalidArgument | None) -> tuple[None, dict[str, Any]]:
    if error is not None:
        raise error
    return None, {}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
