"""What of the verbs crosses ranks, with its derivatives and its rule under vmap: what makes programs closed.

A verb is a part that torch differentiates by itself (an expansion over this rank's clients, a sum over them) and one of
these operators over all tensors of a pytree, which are elementwise in this rank's view:

    operator      computes                     of a tangent     of a cotangent
    broadcast     the values themselves        broadcast        reduce_sum
    reduce_sum    their sums over ranks        reduce_sum       broadcast
    reduce_mean   those, by all clients        reduce_mean      broadcast(cotangent / clients)

So the cotangents of what the clients share add up first on each rank, then over the ranks.

torch.library knows no rule for forward mode. The derivatives are a kernel of the Autograd key, which runs a function of
a single level of torch.func: that way they hold under every transform, nested, and under torch.compile. It takes names
that torch keeps to itself. They are tried when this module is imported; where they give other numbers than they should,
torch.autograd.Functions around the operators replace them, which torch.compile cannot differentiate.
"""

from __future__ import annotations

import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua.errors import InternalError, InvalidArgument
from bagua.federated.names import names_in, selected
from bagua.federated.placement import local_placement, placement_of
from bagua.federated.reduction import sum_over_ranks

NAMESPACE = "bagua_federated"
Tensors = list[torch.Tensor]

_library = torch.library.Library(NAMESPACE, "DEF")
_recorded: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("bagua_verbs", default=None)


@contextmanager
def record() -> Iterator[list[str]]:
    """The names of the verbs that run inside, in their order, those of derivatives too.

    Example:
        >>> from bagua import federated
        >>> @federated.program(clients=3)
        ... def loss(x, y):
        ...     return federated.reduce_mean(federated.broadcast(x) * y)
        >>> with federated.record() as verbs:
        ...     gradient = torch.func.grad(loss)(torch.tensor(1.0), torch.ones(3))
        >>> verbs
        ['broadcast', 'reduce_mean', 'broadcast', 'reduce_sum']
    """
    verbs: list[str] = []
    token = _recorded.set(verbs)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # or a device's backward would not see the list
            yield verbs
    finally:
        _recorded.reset(token)


# ---- what they compute, and what their cotangents become


def _broadcast(values: Sequence[torch.Tensor], key: str) -> Tensors:
    return [value.clone() for value in values]


def _cotangents_of_broadcast(cotangents: Tensors, key: str) -> Tensors:
    return call("reduce_sum", cotangents, key)


def _reduce_sum(values: Sequence[torch.Tensor], key: str) -> Tensors:
    return sum_over_ranks(placement_of(key), values, names_in(key), "reduce_sum")


def _cotangents_of_sum(cotangents: Tensors, key: str) -> Tensors:
    return call("broadcast", cotangents, key)


def _reduce_mean(values: Sequence[torch.Tensor], key: str) -> Tensors:
    placement = placement_of(key)
    return [total.div_(placement.size) for total in sum_over_ranks(placement, values, names_in(key), "reduce_mean")]


def _cotangents_of_mean(cotangents: Tensors, key: str) -> Tensors:
    size = placement_of(key).size
    return call("broadcast", [cotangent / size for cotangent in cotangents], key)


def _check_total(values: Sequence[torch.Tensor], key: str) -> Tensors:
    placement = placement_of(key)
    if any(bool((value == 0).any()) for value in values):
        raise InvalidArgument(
            f"the weights of the {placement.size} {placement.name} that take part add up to 0, so there is no mean: "
            "give one at least a weight, or skip the round"
        )
    return [value.clone() for value in values]


def _cotangents_of_total(cotangents: Tensors, key: str) -> Tensors:
    return cotangents


_RULES: dict[str, tuple[Callable, Callable]] = {
    "broadcast": (_broadcast, _cotangents_of_broadcast),
    "reduce_sum": (_reduce_sum, _cotangents_of_sum),
    "reduce_mean": (_reduce_mean, _cotangents_of_mean),
    # No verb: what a weighted mean divides by, equal on all ranks.
    "check_total": (_check_total, _cotangents_of_total),
}


def _batch_first(values: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[Tensors, list[int | None]]:
    """Moves the axis of a batch to the front, since all ranks must have it in the same position."""
    moved = [value if dim is None else value.movedim(dim, 0) for value, dim in zip(values, dims, strict=True)]
    return moved, [None if dim is None else 0 for dim in dims]


def _define(name: str) -> Any:
    compute, _ = _RULES[name]
    _library.define(f"{name}(Tensor[] values, str placement) -> Tensor[]")

    def kernel(values: Tensors, placement: str) -> Tensors:
        verbs = _recorded.get()
        if verbs is not None and name != "check_total":
            verbs.append(name)
        return compute(values, placement)

    def fake(values: Tensors, placement: str) -> Tensors:
        return [torch.empty_like(value) for value in values]

    def batched(info: Any, in_dims: tuple, values: Tensors, placement: str) -> tuple[Tensors, Any]:
        moved, dims = _batch_first(values, in_dims[0])
        return call(name, moved, placement), dims

    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


_OPERATORS = {name: _define(name) for name in _RULES}


# ---- their derivatives


def _of_present(
    function: Callable[[Tensors, str], Tensors], tensors: Sequence[torch.Tensor | None], key: str
) -> Tensors:
    """function(the tensors that are not None, the key with their names), with None where they are None."""
    there = [i for i, tensor in enumerate(tensors) if tensor is not None]
    results: list = [None] * len(tensors)
    if there:
        found = function([tensors[i] for i in there], selected(key, there))
        for index, result in zip(there, found, strict=True):
            results[index] = result
    return results


def _methods(name: str) -> dict[str, staticmethod]:
    """What a function over (what forward needs, key, *values) does for derivatives, by either mechanism."""
    transpose = _RULES[name][1]

    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        ctx.key = inputs[1]
        ctx.likes = [(value.shape, value.dtype, value.device) for value in inputs[2:]]
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        return (None, None, *_of_present(transpose, cotangents, ctx.key))

    def jvp(ctx: Any, _forward: Any, _key: Any, *tangents: torch.Tensor | None) -> tuple:
        # torch 2.13 makes float64 tangents of numbers without axes, whatever their primals are.
        cast = [t if t is None else t.to(like[1]) for t, like in zip(tangents, ctx.likes, strict=True)]
        rule = _cotangents_of_total if name == "check_total" else functools.partial(call, name)
        results = _of_present(rule, cast, ctx.key)
        for index, (shape, dtype, device) in enumerate(ctx.likes):
            if results[index] is None:  # torch wants all or none
                results[index] = torch.zeros(shape, dtype=dtype, device=device)
        return tuple(results)

    methods = {"setup_context": setup_context, "backward": backward, "jvp": jvp}
    return {title: staticmethod(method) for title, method in methods.items()}


def install_derivatives(
    library: Any,
    operator: Any,
    methods: dict[str, staticmethod],
    flatten: Callable[..., tuple] = lambda *arguments: arguments,
    unflatten: Callable[..., tuple] = lambda *arguments: arguments,
    has_any: Callable[[], bool] = lambda: True,
) -> None:
    """As a kernel of the Autograd key. Raises where torch does not have what that takes.

    Args:
        library: that has the operator's kernels.
        methods: setup_context, backward and jvp, as of a torch.autograd.Function over (what forward needs, *arguments).
        flatten: the operator's arguments as that function's, whose tensors are in no list; `unflatten` is its inverse.
        has_any: whether results of this call have a derivative, where something requires it.
    """
    from torch._functorch.autograd_function import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    def forward(keyset: Any, *arguments: Any) -> Any:
        # Enabled, or the levels of nested transforms above this one would see no derivative, only zeros.
        with torch.enable_grad(), _set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
            result = operator.redispatch(keyset & torch._C._after_autograd_keyset, *unflatten(*arguments))
            return result if isinstance(result, torch.Tensor) else tuple(result)

    name = operator._schema.name.partition("::")[2]
    methods = {"forward": staticmethod(forward), **methods}
    # Torch runs them from C++ wherever code is compiled around a graph break, and would compile them there.
    plain = {title: staticmethod(torch.compiler.disable(method.__func__)) for title, method in methods.items()}
    function = type(name, (_SingleLevelFunction,), plain)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if not has_any():
            return forward(keyset, *flatten(*arguments))
        with enable_single_level_autograd_function():
            result = function.apply(keyset, *flatten(*arguments))
            return result if isinstance(result, torch.Tensor) else list(result)

    library.impl(name, kernel, "Autograd", with_keyset=True)


def _install_kernels() -> dict[str, Callable[[Tensors, str], Tensors]]:
    """Derivatives as kernels of the Autograd key."""
    for name, operator in _OPERATORS.items():
        flatten, unflatten = lambda values, key: (key, *values), lambda key, *values: (list(values), key)
        install_derivatives(_library, operator, _methods(name), flatten, unflatten)
    return dict(_OPERATORS)


def _functions() -> dict[str, Callable[[Tensors, str], Tensors]]:
    """Derivatives by public names of torch only."""

    def make(name: str) -> Callable[[Tensors, str], Tensors]:
        operator = _OPERATORS[name]

        def forward(_nothing: None, key: str, *values: torch.Tensor) -> tuple:
            return tuple(operator(list(values), key))

        def batched(info: Any, in_dims: tuple, _nothing: None, key: str, *values: torch.Tensor) -> tuple:
            moved, dims = _batch_first(values, in_dims[2:])
            return tuple(call(name, moved, key)), tuple(dims)

        methods = {"forward": staticmethod(forward), "vmap": staticmethod(batched), **_methods(name)}
        function = type(name, (torch.autograd.Function,), methods)
        return lambda values, key: list(function.apply(None, key, *values))

    return {name: make(name) for name in _OPERATORS}


_calls: dict[str, Callable[[Tensors, str], Tensors]] = dict(_OPERATORS)


def call(name: str, values: Tensors, key: str) -> Tensors:
    """The operator on all tensors at once."""
    return _calls[name](values, key)


def _hold() -> bool:
    """Whether derivatives are right: of a function whose second derivative takes every rule, in three ways."""
    key = _TRIED.key
    y = torch.tensor([1.0, -2.0, 3.0])

    def loss(x: torch.Tensor) -> torch.Tensor:
        values = call("broadcast", [x], key)[0].expand(3)
        means = call("reduce_mean", [torch.sin(values * y).sum(0)], key)
        return means[0] + call("reduce_sum", [(values**3).sum(0)], key)[0]

    x = torch.tensor(0.5)
    first = (y * torch.cos(x * y)).mean() + 9 * x**2
    second = -(y**2 * torch.sin(x * y)).mean() + 18 * x
    found = [torch.func.grad(loss)(x), torch.func.jvp(loss, (x,), (torch.ones(()),))[1]]
    found_second = [
        torch.func.grad(torch.func.grad(loss))(x),
        torch.func.jvp(torch.func.grad(loss), (x,), (torch.ones(()),))[1],
        torch.func.jacfwd(torch.func.jacfwd(loss))(x),
        torch.func.vmap(torch.func.grad(torch.func.grad(loss)))(x.expand(2))[1],
    ]
    return all(torch.allclose(one, first) for one in found) and all(torch.allclose(one, second) for one in found_second)


def _choose() -> str:
    """Installs the mechanism that holds, and says which."""
    why = "they give other derivatives than they should"
    try:
        _calls.update(_install_kernels())
        if _hold():
            return "kernels"
    except Exception as error:  # of names that torch does not have, or has in another form
        why = f"{type(error).__name__}: {error}"
    _calls.update(_functions())
    if not _hold():
        raise InternalError(f"torch {torch.__version__} differentiates bagua.federated wrongly by either mechanism")
    warnings.warn(
        f"bagua.federated: torch.compile cannot differentiate programs with torch {torch.__version__}, whose kernels "
        f"for derivatives cannot be used ({why}); without torch.compile nothing changes",
        RuntimeWarning,
        stacklevel=2,
    )
    return "functions"


_TRIED = local_placement("tried", 3)
MECHANISM = _choose()
