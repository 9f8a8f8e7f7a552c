"""Makes the ranks' models and optimizers equal to rank 0's when a model is wrapped.

Data path: before the first step (parameters, buffers, optimizer state). Invariant: values arrive bit for bit, whatever
their dtype; they travel as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bagua.buckets import is_dense
from bagua.data_parallel.checks import is_sharded
from bagua.distributed import plain_data
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument


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

    The first two, the constructor and ``receive``, may refuse and change nothing. ``take_over`` runs ``load_state_dict``
    on the ranks whose states are not like rank 0's, when the models are equal already; what that raises ends the group.
    Tensors travel one by one, so that no rank holds a state twice, but for those that ``state_dict`` copies.

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
        """Receives all but the tensors from rank 0; collective, one message for all optimizers."""
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
        """Receives the tensors, and loads all of it into the optimizers; collective."""
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
    """Returns True if these are the tensors that the optimizer steps with, not copies of them."""
    held: list[torch.Tensor] = []
    _take_out_tensors([optimizer.state, optimizer.param_groups], held)
    return {t.data_ptr() for t in tensors if t.numel()} <= {t.data_ptr() for t in held}


def _is_same(tree: Any, other: Any) -> bool:
    try:
        return bool(tree == other)
    except Exception:  # NumPy arrays and the like cannot be compared so; rank 0's are right in any case
        return False


def _load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Runs ``load_state_dict``, and undoes its casts of states to the dtype of their parameter."""
    sent: list[torch.Tensor] = []
    _take_out_tensors(state_dict, sent)
    groups = optimizer.param_groups
    optimizer.load_state_dict(state_dict)
    _write_into(groups, optimizer.param_groups)
    optimizer.param_groups = groups
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


def _write_into(groups: list[dict[str, Any]], loaded: list[dict[str, Any]]) -> None:
    """Writes the options that were loaded into the dicts and tensors that the program may hold."""
    for group, new in zip(groups, loaded, strict=True):
        for key in group.keys() - new.keys():
            del group[key]
        for key, value in new.items():
            held = group.get(key)
            if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
                held.detach().copy_(value)
            else:
                group[key] = value


def _dtypes_in(optimizer: torch.optim.Optimizer) -> list[torch.dtype]:
    tensors: list[torch.Tensor] = []
    _take_out_tensors(optimizer.state_dict(), tensors)
    return [tensor.dtype for tensor in tensors]


def _uncast(loaded: Any, sent: Any) -> Any:
    """Returns ``loaded``, with the tensors of ``sent`` in place of those with another dtype."""
    if isinstance(loaded, torch.Tensor) and isinstance(sent, torch.Tensor):
        return loaded if loaded.dtype == sent.dtype else sent
    if isinstance(loaded, dict) and isinstance(sent, dict):
        loaded.update({key: _uncast(value, sent[key]) for key, value in loaded.items() if key in sent})
    elif isinstance(loaded, (list, tuple)) and isinstance(sent, (list, tuple)):
        return type(loaded)(map(_uncast, loaded, sent))
    return loaded


class _TensorSpec(tuple):
    """A stand-in for a tensor in a tree: (number, shape, strides, dtype, type of its device).

    The number is its index among those that travel: trees whose entries are in another order are not the same. It has
    strides because fused optimizers go through a parameter and its states by their memory; contiguous ones where the
    tensor is not dense.
    """

    __slots__ = ()


def _take_out_tensors(tree: Any, tensors: list[torch.Tensor]) -> Any:
    def take_out(tensor: torch.Tensor) -> _TensorSpec:
        tensors.append(tensor)
        strides = (tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")).stride()
        return _TensorSpec((len(tensors) - 1, tuple(tensor.shape), strides, tensor.dtype, tensor.device.type))

    return _mapped(tree, torch.Tensor, take_out)


def _empty_tensors(tree: Any, devices: Mapping[str, torch.device]) -> list[torch.Tensor]:
    """Allocates the tensors of a tree's specs, on this rank's devices of the same types."""
    tensors: list[torch.Tensor] = []

    def add(spec: _TensorSpec) -> None:
        _, shape, strides, dtype, kind = spec
        tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=devices.get(kind, kind)))

    _mapped(tree, _TensorSpec, add)
    return tensors


def _devices_of(optimizer: torch.optim.Optimizer) -> dict[str, torch.device]:
    """Returns this rank's devices of what the optimizer steps, by their types."""
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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
