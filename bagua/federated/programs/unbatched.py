"""Computations of clients outside of map_fn, such as sums of cotangents: torch's operators along the clients' axis.

A graph must mean the same for any number of clients, and for each of them alone. So an operator on placed values is
followed only where it computes every client's result from that client's values: the rules say so for each kind, where
the clients' axis is afterwards, and which of its sizes stand for the number of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.federated.programs.graph import EVERYWHERE, NumClients, Value


class Mixed(Exception):
    """The operator is none that computes each client's result from its own values."""


def place_operator(
    overload: Any,
    target: str,
    args: tuple,
    kwargs: dict,
    like: Any,
    where: str,
    num_local: int,
    spread: Callable[[Value, int, str], Value],
) -> tuple[tuple, int]:
    """The arguments for any number of clients, and the clients' axis of the results.

    Args:
        overload: the operator, `target` its name.
        args, kwargs: with Values for tensors, one at least of which is placed.
        like: a tensor of the shape of the result, or a sequence of such.
        where: whose the placed values are, `num_local` of them.
        spread: a constant along an axis and a placement, as the clients' own where it is theirs.

    Raises:
        Mixed: with the words for the operator and what is wrong.
    """
    values = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value)]
    for value in values:
        if value.axis is None and value.placement != EVERYWHERE:
            raise Mixed(
                f"{target} on {value.name}: {value}, which is at the server, and on values of the {where}: "
                "federated.broadcast it"
            )
        if value.axis is not None and value.placement != where:
            raise Mixed(f"{target} on values of the {value.placement} and of the {where}")
    name = target.split(".")[1]
    shapes = [_full_shape(value, num_local) for value in values]
    if name in _RULES:
        axis, args = _RULES[name](args, shapes[0], like, NumClients(where), num_local)
    elif torch.Tag.pointwise in overload.tags or name in _ELEMENTWISE:
        axis = _elementwise(target, values, shapes, like)
        own = {
            value: spread(value, axis - like.dim() + len(s), where)
            for value, s in zip(values, shapes, strict=True)
            if value.axis is None and axis - like.dim() + len(s) >= 0
        }
        args = pytree.tree_map(lambda leaf: own.get(leaf, leaf) if isinstance(leaf, Value) else leaf, args)
        for value in own.values():
            if value.axis is None and _full_shape(value, num_local)[axis - like.dim()] != 1:
                raise Mixed(
                    f"{target} on a constant of {list(value.shape)}, which has an axis of {where}: make it an argument"
                )
    else:
        raise Mixed(f"{target} on values of the {where}, which may mix them: use map_fn, which has one client's")
    return args, axis


# Not tagged as such by torch.
_ELEMENTWISE = {"clone", "_to_copy", "detach", "copy"}


def _full_shape(value: Value, num_local: int) -> list[int]:
    shape = list(value.shape)
    if value.axis is not None:
        shape.insert(value.axis, num_local)
    return shape


def _elementwise(target: str, values: Sequence[Value], shapes: Sequence[list[int]], like: torch.Tensor) -> int:
    axes = {value.axis - len(shape) for value, shape in zip(values, shapes, strict=True) if value.axis is not None}
    if len(axes) > 1:
        raise Mixed(f"{target} on {', '.join(map(str, shapes))}, whose client axes do not line up: use map_fn")
    (axis,) = axes
    return axis + like.dim()


Rule = Callable[[tuple, list[int], Any, NumClients, int], tuple[int, tuple]]


def _positive(dim: int, num_dims: int) -> int:
    return dim % num_dims if num_dims else 0


def _permute(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    return [_positive(dim, len(shape)) for dim in args[1]].index(args[0].axis), args


def _transpose(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    first, second = (_positive(dim, len(shape)) for dim in args[1:3]) if len(args) > 1 else (0, len(shape) - 1)
    return {first: second, second: first}.get(args[0].axis, args[0].axis), args


def _sized(args: tuple, axis: int, clients: NumClients) -> tuple:
    sizes = list(args[1])
    sizes[axis] = clients
    return (args[0], sizes, *args[2:])


def _view(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    if isinstance(args[1], torch.dtype):  # reads bits, along the last axis where elements have another size
        if args[0].axis == len(shape) - 1 and args[0].dtype.itemsize != args[1].itemsize:
            raise Mixed(
                f"a view of {args[0].dtype} as {args[1]}, of another size, along the axis of {clients.placement} of "
                f"{args[0].name}: give it an axis more, or use map_fn"
            )
        return args[0].axis, args
    before = torch.Size(shape[: args[0].axis]).numel()
    for axis, size in enumerate(like.shape):
        if size == n and torch.Size(like.shape[:axis]).numel() == before:
            return axis, _sized((args[0], list(like.shape), *args[2:]), axis, clients)
    raise Mixed(f"a view of {shape} as {list(like.shape)}, which has no axis of {clients.placement}: use map_fn")


def _expand(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    axis = args[0].axis - len(shape) + like.dim()
    return axis, _sized(args, axis, clients)


def _unsqueeze(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    return args[0].axis + (_positive(args[1], len(shape) + 1) <= args[0].axis), args


def _without(dims: Sequence[int], args: tuple, shape: list[int], clients: NumClients) -> int:
    """The clients' axis once these are reduced."""
    reduced = {_positive(dim, len(shape)) for dim in dims}
    _not_along(reduced, args, clients)
    return args[0].axis - sum(dim < args[0].axis for dim in reduced)


def _not_along(dims: set[int], args: tuple, clients: NumClients) -> None:
    if args[0].axis in dims:
        raise Mixed(f"an operator along the axis of {clients.placement} of {args[0].name}: use a reduction")


def _select(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    return _without([args[1]], args, shape, clients), args


def _squeeze(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    """Names the dims, for aten.squeeze.dims: at one client, the clients' axis has one element too."""
    if len(args) < 2:
        if n == 1:
            raise Mixed(
                f"a squeeze of {shape} without dims, which takes the axis of {clients.placement} too: name dims"
            )
        named = range(len(shape))
    else:
        named = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
    dims = [dim for dim in named if shape[dim] == 1]
    return _without(dims, args, shape, clients), (args[0], dims)


def _reduction(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    dims = args[1] if len(args) > 1 and args[1] else range(len(shape))
    axis = _without(dims, args, shape, clients)
    return (args[0].axis if len(args) > 2 and args[2] else axis), args


def _along(position: int) -> Rule:
    """The rule of operators along one axis, which is the argument at this position."""

    def rule(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
        dim = args[position] if len(args) > position else 0
        _not_along({_positive(dim, len(shape))}, args, clients)
        return args[0].axis, args

    return rule


def _slice_backward(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    _not_along({_positive(args[2], len(shape))}, args, clients)
    return args[0].axis, _sized(args, args[0].axis, clients)


def _select_backward(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    axis = args[0].axis + (_positive(args[2], len(shape) + 1) <= args[0].axis)
    return axis, _sized(args, axis, clients)


def _cat(args: tuple, shape: list[int], like: Any, clients: NumClients, n: int) -> tuple[int, tuple]:
    first = args[0][0]
    _not_along({_positive(args[1] if len(args) > 1 else 0, len(shape))}, (first,), clients)
    if any(value.axis != first.axis for value in args[0]):
        raise Mixed(f"a concatenation of values whose axes of {clients.placement} do not line up: use map_fn")
    return first.axis, args


_RULES: dict[str, Rule] = {
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "view": _view,
    "_unsafe_view": _view,
    "reshape": _view,
    "expand": _expand,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "select": _select,
    "sum": _reduction,
    "mean": _reduction,
    "amax": _reduction,
    "amin": _reduction,
    "cat": _cat,
    "slice": _along(1),
    "slice_backward": _slice_backward,
    "select_backward": _select_backward,
    "split_with_sizes": _along(2),
    "split": _along(2),
}
