"""Makes the ranks' models and optimizers equal to rank 0's when a model is wrapped, those of experts in their group.

Data path: before the first step (parameters, buffers, optimizer state). Invariants: values arrive bit for bit, whatever
their dtype, as bytes; they are written into the dicts and tensors that are there, which the program may hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bagua.buckets import is_dense
from bagua.data_parallel.checks import is_sharded
from bagua.data_parallel.scope import IGNORED, Scope, synchronised_options
from bagua.distributed import plain_data
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.tensors import local_tensor
from bagua.errors import InvalidArgument


def broadcast_model(model: torch.nn.Module, scope: Scope, src: int = 0) -> None:
    """Makes all parameters (frozen ones too) and buffers equal to those of rank ``src``, in place.

    Those of another group than the model's become equal to those of its first rank.
    """
    if scope.group.size == 1:
        return
    works = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        part = scope.part_of(name)
        if part == IGNORED or scope.groups[part].size == 1:
            continue
        group, src_of_part = scope.groups[part], src if part == 0 else 0
        tensor = local_tensor(tensor.detach())
        if tensor.is_contiguous():
            works.append(group.broadcast(_bytes_of(tensor), src_of_part, label=name))
        else:
            copy = tensor.contiguous()
            group.broadcast(_bytes_of(copy), src_of_part, label=name).wait()
            tensor.copy_(copy)
    for work in works:
        work.wait()


class OptimizerStates:
    """Makes ``state`` and the options (such as lr) of ``optimizers`` equal to one rank's, in three parts.

    The first two, the constructor and ``receive``, may refuse and change nothing. ``take_over`` changes the optimizers,
    when the models are equal already. Tensors travel one by one, so that no rank holds a state twice.

    Args:
        optimizers: in the same order on all ranks. Those whose states are spread over the ranks keep them.
        model: the one that they step.
        scope: the ranks. States of a parameter of another group than the model's become equal to those of that group's
            first rank; states of ignored parameters, and options of parameter groups of nothing else, are left alone.
        src: the rank whose states and options the others get.

    Raises:
        InvalidArgument: on rank ``src``, one holds what is not sent between ranks.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module, scope: Scope, src: int = 0
    ) -> None:
        equal = [optimizer for optimizer in optimizers if not is_sharded(optimizer)] if scope.group.size > 1 else []
        parts = scope.part_of_parameters(model)
        self._of_parts = [
            _StatesOfPart(equal if group.size > 1 else (), group, src if part == 0 else 0, part, parts)
            for part, group in enumerate(scope.groups)
        ]

    def receive(self) -> None:
        """Receives all but the tensors; collective, one message for all optimizers of a group."""
        for one in self._of_parts:
            one.receive()

    def take_over(self) -> None:
        """Receives the tensors, and gives all of it to the optimizers; collective."""
        for one in self._of_parts:
            one.take_over()


class _StatesOfPart:
    """The states of the parameters of one group; those of the model's own bring the options, too.

    Args:
        part: of the group in the Scope.
        parts: of parameters, by id; those that are missing are of part 0.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        group: ProcessGroup,
        src: int,
        part: int,
        parts: Mapping[int, int],
    ) -> None:
        self._optimizers, self._group, self._src = tuple(optimizers), group, src
        self._part, self._parts = part, parts
        self._tensors: list[list[torch.Tensor]] = [[] for _ in self._optimizers]
        self._trees = [self._tree_of(*both) for both in zip(self._optimizers, self._tensors, strict=True)]
        self._texts = [
            _text_of(index, *both) for index, both in enumerate(zip(self._optimizers, self._trees, strict=True))
        ]

    def receive(self) -> None:
        if not self._optimizers:
            return
        texts = self._group.broadcast_plain(self._texts, self._src)
        for index, text in enumerate(texts):
            if text != self._texts[index]:  # otherwise the tensors that are here take its values
                self._trees[index] = plain_data.loads(text, [_TensorSpec])
                _check_not_spread(index, self._optimizers[index], self._trees[index])
                self._tensors[index] = _empty_tensors(self._trees[index], self._optimizers[index])

    def take_over(self) -> None:
        for optimizer, tree, tensors in zip(self._optimizers, self._trees, self._tensors, strict=True):
            for index, tensor in enumerate(tensors):
                sent = tensor.detach().contiguous()
                self._group.broadcast(_bytes_of(sent), self._src, label=f"optimizer state {index}").wait()
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(sent)
            if self._group.rank != self._src:
                values = _mapped(tree, _TensorSpec, lambda spec, tensors=tensors: tensors[spec[0]])
                self._write(optimizer, *values)

    def _options_of(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Returns the parameter groups whose options are sent."""
        return synchronised_options(optimizer, self._parts) if self._part == 0 else []

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        for options in optimizer.param_groups:
            yield from (p for p in options["params"] if self._parts.get(id(p), 0) == self._part)

    def _tree_of(self, optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
        """Returns options and states by parameter, in the order of the parameters, with specs for the tensors."""
        options = [{key: group[key] for key in group if key != "params"} for group in self._options_of(optimizer)]
        states = [optimizer.state.get(parameter) for parameter in self._parameters_of(optimizer)]

        def take_out(whole: torch.Tensor) -> _TensorSpec:
            tensor = local_tensor(whole)
            tensors.append(tensor)
            strides = (tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")).stride()
            kind, is_spread = tensor.device.type, tensor is not whole
            return _TensorSpec((len(tensors) - 1, tuple(tensor.shape), strides, tensor.dtype, kind, is_spread))

        return _mapped((options, states), torch.Tensor, take_out)

    def _write(
        self, optimizer: torch.optim.Optimizer, options: list[dict[str, Any]], states: list[dict[str, Any] | None]
    ) -> None:
        for group, received in zip(self._options_of(optimizer), options, strict=True):
            _write_dict(group, {**received, "params": group["params"]})
        for parameter, state in zip(self._parameters_of(optimizer), states, strict=True):
            if state is None:
                optimizer.state.pop(parameter, None)
            else:
                held = optimizer.state.get(parameter)
                optimizer.state[parameter] = _write_dict(held, state) if isinstance(held, dict) else state


def _write_dict(held: dict[str, Any], received: dict[str, Any]) -> dict[str, Any]:
    for key in held.keys() - received.keys():
        del held[key]
    for key, value in received.items():
        there = held.get(key)
        if isinstance(there, torch.Tensor) and value is local_tensor(there):
            continue  # it has arrived where it belongs
        is_tensor = isinstance(there, torch.Tensor) and isinstance(value, torch.Tensor)
        if is_tensor and there.shape == value.shape and there.dtype == value.dtype:
            there.detach().copy_(value)
        else:
            held[key] = value
    return held


def _text_of(index: int, optimizer: torch.optim.Optimizer, tree: Any) -> bytes:
    try:
        return plain_data.dumps(tree, [_TensorSpec])
    except InvalidArgument as error:
        raise InvalidArgument(
            f"the state or the options of optimizers[{index}] ({type(optimizer).__name__}), which the other ranks are "
            f"to get, cannot be sent: {error}"
        ) from None


class _TensorSpec(tuple):
    """A stand-in for a tensor in a tree: (number, shape, strides, dtype, type of its device, True of a DTensor's part).

    It has strides because fused optimizers go through a parameter and its states by their memory; contiguous ones where
    the tensor is not dense.
    """

    __slots__ = ()


def _empty_tensors(tree: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Allocates the tensors of a tree's specs, on this rank's devices of the same types."""
    devices = {p.device.type: p.device for options in optimizer.param_groups for p in options["params"]}
    tensors: list[torch.Tensor] = []

    def add(spec: _TensorSpec) -> None:
        _, shape, strides, dtype, kind, _ = spec
        tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=devices.get(kind, kind)))

    _mapped(tree, _TensorSpec, add)
    return tensors


def _check_not_spread(index: int, optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Raises InvalidArgument for parts of DTensors among states that this rank lacks: it cannot put them together."""
    spread: list[bool] = []
    _mapped(tree, _TensorSpec, lambda spec: spread.append(spec[-1]))
    if any(spread):
        raise InvalidArgument(
            f"optimizers[{index}] ({type(optimizer).__name__}) has states of DTensors that differ between the ranks in "
            "what they hold; wrap the model before its first step, or load the optimizer's state on all ranks"
        )


def _mapped(tree: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns the tree with ``change`` of each leaf of this kind in its place, in the order of its entries."""
    if isinstance(tree, kind):
        return change(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, kind, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, kind, change) for value in tree)
    return tree


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
