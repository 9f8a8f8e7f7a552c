"""The checks of with_bagua: models, optimizers and settings that cannot be synchronised, or that differ between ranks.

Beside the data path, before anything is changed. The checks raise for what one rank can see by itself; the descriptions
are compared between the ranks (distributed/consensus.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from bagua.algorithms import Algorithm
from bagua.buckets import check_parameter, is_dense
from bagua.distributed.devices import check_supported
from bagua.distributed.tensors import address_of, local_tensor
from bagua.errors import InvalidArgument


def describe_model(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], ignored: Collection[str] = ()
) -> dict[str, str]:
    """Describes what must be equal on all ranks of a model and its optimizers, section to value.

    Args:
        ignored: names of parameters and buffers that may differ.

    Example:
        >>> describe_model(torch.nn.Linear(2, 1, bias=False), [])
        {"parameter 'weight'": '(1, 2) torch.float32 on cpu requires_grad=True'}
    """
    described = {}
    for name, parameter in _named(model.named_parameters(), ignored):
        kind = f"{parameter.dtype} on {parameter.device.type} requires_grad={parameter.requires_grad}"
        described[f"parameter {name!r}"] = f"{tuple(parameter.shape)} {kind}{_layout_of(parameter)}"
    for name, buffer in _named(model.named_buffers(), ignored):
        described[f"buffer {name!r}"] = f"{tuple(buffer.shape)} {buffer.dtype} on {buffer.device.type}"
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, optimizer in enumerate(optimizers):
        described.update(describe_optimizer(index, optimizer, name_of, ignored))
    return described


def _named(tensors: Iterable[tuple[str, torch.Tensor]], ignored: Collection[str]) -> Iterable[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in tensors if name not in ignored)


def _layout_of(parameter: torch.Tensor) -> str:
    """Describes how gradients lie in memory, as they are added up so, and which part of a DTensor this rank holds.

    Axes of one element have no order.
    """
    if hasattr(parameter, "to_local"):
        mesh, part = parameter.device_mesh, parameter.to_local()
        over = mesh.mesh_dim_names or ""
        where = f"part {tuple(mesh.get_coordinate() or ())} of a mesh {over} of {tuple(mesh.shape)}"
        where += f" by {parameter.placements}"
        return f" {where}, {tuple(part.shape)}{_layout_of(part)}"
    is_strided = parameter.requires_grad and parameter.layout is torch.strided
    if not is_strided or parameter.is_contiguous() or not is_dense(parameter):
        return ""
    strides = [0 if n == 1 else stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)]
    return f" strides={strides}"


def describe_optimizer(
    index: int, optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], ignored: Collection[str] = ()
) -> dict[str, str]:
    """Describes one optimizer: its class, and its parameters by index, since states are keyed by index.

    Options such as lr are not compared: with_bagua sets them to rank 0's.

    Args:
        name_of: the names of the model's parameters by their ids; other parameters are described by their shapes.
        ignored: names of those that may differ.
    """
    groups = [[p for p in group["params"] if name_of.get(id(p)) not in ignored] for group in optimizer.param_groups]
    sizes = [len(group) for group in groups]
    described = {f"optimizer {index}": f"{type(optimizer).__name__} with parameter groups of {sizes}"}
    for number, group in enumerate(groups):
        for position, parameter in enumerate(group):
            name = name_of.get(id(parameter))
            known_as = f"{tuple(parameter.shape)} {parameter.dtype} of another model" if name is None else repr(name)
            described[f"parameter {position} of group {number} of optimizer {index}"] = known_as
    return described


def is_sharded(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the states of the parameters are spread over the ranks."""
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def check_is_model(model: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise InvalidArgument(
            f"the model is {_kind_of(model)}, expected a torch.nn.Module: with_bagua(model, optimizers)"
        )


def optimizers_in(given: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Returns one optimizer, or several, as a tuple.

    Raises:
        InvalidArgument: naming what is none.
    """
    try:
        is_one = isinstance(given, torch.optim.Optimizer)
        optimizers = (given,) if is_one else tuple(given)
    except TypeError:
        raise InvalidArgument(
            f"optimizers is {_kind_of(given)}, expected a torch optimizer or a list of them: {_instead_of(given)}"
        ) from None
    for index, one in enumerate(optimizers):
        if not isinstance(one, torch.optim.Optimizer):
            raise InvalidArgument(
                f"optimizers[{index}] is {_kind_of(one)}, expected a torch optimizer: {_instead_of(one)}"
            )
    return optimizers


def _kind_of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def _instead_of(value: Any) -> str:
    if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
        return "pass the one that it schedules, its .optimizer"
    return "such as torch.optim.SGD(model.parameters(), lr=0.1), or leave it out where gradients are exchanged"


def check_model(
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    taken_parameter_ids: Iterable[int],
    ignored: Collection[str] = (),
) -> None:
    """Raises InvalidArgument for what cannot be synchronised, as far as one rank can see by itself.

    Args:
        taken_parameter_ids: of other wrapped models.
        ignored: names of parameters and buffers that are not to be synchronised.
    """
    taken = set(taken_parameter_ids)
    for name, tensor in _named((*model.named_parameters(), *model.named_buffers()), ignored):
        _check_initialized(name, tensor)
    for name, parameter in _named(model.named_parameters(), ignored):
        _check_memory(parameter, f"parameter {name!r}")
    for name, buffer in _named(model.named_buffers(), ignored):
        if hasattr(buffer, "to_local"):
            raise InvalidArgument(
                f"buffer {name!r} is a DTensor; bagua sends plain buffers: leave it out by ignore=[{name!r}]"
            )
        _check_memory(buffer, f"buffer {name!r}")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            raise InvalidArgument(
                f"{f'module {name!r}' if name else 'the model'} is torch's DistributedDataParallel, which synchronises "
                "gradients itself; pass its .module to with_bagua instead"
            )
        is_sparse = isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse
        if is_sparse and f"{name}.weight" not in ignored:
            raise InvalidArgument(
                f"module {name!r} ({type(module).__name__}) gives sparse gradients; bagua sends dense ones: "
                "construct it with sparse=False"
            )
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        raise InvalidArgument("no parameter of the model requires a gradient; there is nothing to synchronise")
    for name, parameter in _named(model.named_parameters(), ignored):
        if parameter.requires_grad:
            check_parameter(name, parameter)
        if id(parameter) in taken:
            raise InvalidArgument(
                f"parameter {name!r} is synchronised by another model that was wrapped before; wrap the outermost "
                "module only, or call .bagua.remove() on the other one first"
            )
    for index, optimizer in enumerate(optimizers):
        if not any(id(p) in trainable for group in optimizer.param_groups for p in group["params"]):
            raise InvalidArgument(f"optimizers[{index}] ({type(optimizer).__name__}) steps no parameter of this model")
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                _check_memory(value, f"the state {key!r} of optimizers[{index}] ({type(optimizer).__name__})")


def _check_initialized(name: str, tensor: Any) -> None:
    if isinstance(tensor, (torch.nn.parameter.UninitializedParameter, torch.nn.parameter.UninitializedBuffer)):
        raise InvalidArgument(f"{name!r} has no shape yet: call the model once before with_bagua (lazy modules)")


def _check_memory(value: Any, what: str) -> None:
    """Raises InvalidArgument for a tensor whose elements cannot be sent, or not be written where they are."""
    if not isinstance(value, torch.Tensor):
        return
    value = local_tensor(value)
    if not value.is_cpu:
        check_supported(value.device, what)
    if value.layout is not torch.strided:
        raise InvalidArgument(f"{what} has layout {value.layout}; convert it with .to_dense() first")
    address_of(value, what)
    if value.numel() > 0 and any(n > 1 and stride == 0 for n, stride in zip(value.shape, value.stride(), strict=True)):
        raise InvalidArgument(
            f"{what} of shape {tuple(value.shape)} is expanded: several of its elements share one memory location, so "
            "it cannot hold rank 0's values; replace it by a copy (.clone())"
        )


def check_exchanges(algorithm: Algorithm) -> None:
    """Raises InvalidArgument for an algorithm that does not say what it exchanges, or has no hook to do it in."""
    if algorithm.exchanges not in ("gradients", "weights"):
        raise InvalidArgument(
            f"algorithm {algorithm.name!r} has exchanges = {algorithm.exchanges!r}, expected 'gradients' or 'weights'"
        )
    kind = type(algorithm)
    hooks = [hook for hook in _WEIGHT_HOOKS if getattr(kind, hook) is not getattr(Algorithm, hook)]
    if algorithm.exchanges == "weights" and not hooks and not vars(algorithm).keys() & _WEIGHT_HOOKS:
        raise InvalidArgument(
            f"algorithm {algorithm.name!r} exchanges weights, but {kind.__name__} defines no hook to do so in, so the "
            "ranks would part; define before_optimizer_step or after_optimizer_step, as in bagua/algorithms/base.py"
        )


_WEIGHT_HOOKS = {"before_forward", "after_backward", "before_optimizer_step", "after_optimizer_step"}


def check_fully_sharded(model: torch.nn.Module, algorithm: Algorithm) -> None:
    """Raises InvalidArgument for gradients that torch's fully_shard reduces itself."""
    for name, module in model.named_modules() if algorithm.exchanges == "gradients" else ():
        if any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__):
            raise InvalidArgument(
                f"{f'module {name!r}' if name else 'the model'} is under fully_shard, which reduces gradients itself; "
                "compress them by bagua.fsdp.compress(model, codec), or exchange weights with an algorithm such as "
                "'local_sgd' and group=mesh['dp_replicate']"
            )


def check_steps_all(optimizers: Sequence[torch.optim.Optimizer], algorithm_name: str) -> None:
    """Raises InvalidArgument for an optimizer that steps only some of the parameters on each rank."""
    for optimizer in optimizers:
        if is_sharded(optimizer):
            raise InvalidArgument(
                f"algorithm {algorithm_name!r} averages weights that every rank has stepped by itself, but with a "
                f"{type(optimizer).__name__} each rank steps its part of them; use an algorithm that averages gradients"
            )


def optimizers_of_parameters(
    model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm_name: str
) -> dict[int, int]:
    """Returns the index of the optimizer that steps each trainable parameter, by the parameter's id.

    Raises:
        InvalidArgument: none or several do, so that it is not clear when its weights may be exchanged; or one does in
            part only.
    """
    check_steps_all(optimizers, algorithm_name)
    found: dict[int, int] = {}
    name_of = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for index, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in name_of):
            if found.setdefault(id(parameter), index) != index:
                raise InvalidArgument(
                    f"algorithm {algorithm_name!r} exchanges weights once per optimizer step, but parameter "
                    f"{name_of[id(parameter)]!r} is stepped by optimizers {found[id(parameter)]} and {index}; "
                    "give each parameter to one"
                )
    unstepped = [name for parameter_id, name in name_of.items() if parameter_id not in found]
    if unstepped:
        raise InvalidArgument(
            f"algorithm {algorithm_name!r} exchanges weights when they are stepped, but no optimizer that was passed "
            f"to with_bagua steps {unstepped[0]!r}{f' and {len(unstepped) - 1} more' if unstepped[1:] else ''}; pass "
            "all optimizers of the model, and freeze what none of them steps"
        )
    return found


def check_types(settings: dict[str, tuple[Any, type | tuple[type, ...]]]) -> None:
    """Raises InvalidArgument for a setting whose value is not of its type, and for numbers below 1."""
    for name, (value, expected) in settings.items():
        types = expected if isinstance(expected, tuple) else (expected,)
        if type(value) not in types or (expected is int and value < 1):
            wanted = "an integer of at least 1" if expected is int else f"a {types[0].__name__}"
            raise InvalidArgument(f"{name} is {value!r}, expected {wanted}")
