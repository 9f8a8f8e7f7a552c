"""What torch.no_grad, writes into detached tensors, and functions with their own derivatives mean in graphs.

torch's graphs have operators and nothing of the modes in which they ran, so that their derivatives would go through
what the program computed without any. While a function is traced, `GradModes` puts three operators in, whose values are
those that they are given:

    operator                    of a cotangent     of a tangent     stands for
    no_grad(value)              nothing            value's          what ran under torch.no_grad
    written(value, before)      before's           value's          what a write under torch.no_grad left in a tensor;
                                                   or before's      one into what .detach() gives has no tangent
    of_function(value, name)    an error           an error         what a torch.autograd.Function computed by itself

As in torch, forward mode goes through torch.no_grad.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from bagua.errors import InvalidArgument
from bagua.federated.operators import MECHANISM, NAMESPACE, install_derivatives

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(schema: str, backward: Callable, jvp: Callable, batched: Callable) -> Any:
    """An operator that gives its first argument."""
    name = schema.partition("(")[0]
    _library.define(schema)
    operator = getattr(getattr(torch.ops, NAMESPACE), name).default
    _library.impl(name, lambda value, *rest: value.clone(), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda value, *rest: torch.empty_like(value), lib=_library)
    torch.library.register_vmap(f"{NAMESPACE}::{name}", batched, lib=_library)

    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        ctx.arguments = inputs[2:]  # behind the keys of the dispatcher and the value
        ctx.dtype = output.dtype
        ctx.set_materialize_grads(False)

    if MECHANISM == "kernels":  # without, torch warns of what has no derivative
        methods = {"setup_context": setup_context, "backward": backward, "jvp": jvp}
        install_derivatives(_library, operator, {title: staticmethod(one) for title, one in methods.items()})
    return operator


_no_grad = _define(
    "no_grad(Tensor value) -> Tensor",
    lambda ctx, cotangent: (None, None),
    # torch 2.13 makes float64 tangents of numbers without axes, whatever their primals are.
    lambda ctx, _keys, tangent: _no_grad(tangent.to(ctx.dtype)),
    lambda info, dims, value: (_no_grad(value), dims[0]),
)


def _tangent_of_written(ctx: Any, _keys: None, of_value: Any, of_before: Any, _is_detached: None) -> torch.Tensor:
    known = of_before if of_value is None else of_value
    of_value, of_before = (
        torch.zeros_like(known, dtype=ctx.dtype) if one is None else one.to(ctx.dtype) for one in (of_value, of_before)
    )
    return of_before if ctx.arguments[1] else _written(of_value, of_before, False)


def _batch_of_written(info: Any, dims: tuple, value: torch.Tensor, before: torch.Tensor, is_detached: bool) -> tuple:
    both = [
        one.expand(info.batch_size, *one.shape) if dim is None else one.movedim(dim, 0)
        for one, dim in zip((value, before), dims, strict=False)
    ]
    return _written(*both, is_detached), 0


_written = _define(
    "written(Tensor value, Tensor before, bool is_detached) -> Tensor",
    lambda ctx, cotangent: (None, None, cotangent, None),
    _tangent_of_written,
    _batch_of_written,
)


def _refuse_derivative(ctx: Any, *derivatives: Any) -> tuple:
    if all(one is None for one in derivatives):
        return (None,) * 3
    raise InvalidArgument(
        f"a derivative of what {ctx.arguments[0]}, a torch.autograd.Function, computes, in a graph, which does not "
        "have the function's own: write it in torch's operators, such as x + (y - x).detach() for the value of y with "
        "the derivative of x"
    )


_of_function = _define(
    "of_function(Tensor value, str function) -> Tensor",
    _refuse_derivative,
    lambda ctx, _keys, tangent, _function: _refuse_derivative(ctx, tangent)[0],
    lambda info, dims, value, function: (_of_function(value, function), dims[0]),
)

OPERATORS = (_no_grad, _written, _of_function)
"""That may be in graphs."""


def without_cotangents(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What verbs give under torch.no_grad."""
    return [_no_grad(tensor) if _has_derivatives(tensor) else tensor for tensor in tensors]


@contextmanager
def seen(given: Sequence[torch.Tensor]) -> Iterator[Callable[[Any], tuple]]:
    """Puts these operators into the graph of what runs inside, which torch traces.

    Args:
        given: to the function.

    Yields:
        What makes, of what the function returns, what its graph has to return.
    """
    with _NoSetData(), _GradModes(given) as modes:
        yield modes.returned


class _NoSetData(TorchFunctionMode):
    """Torch's graphs would have the value from before, and say nothing."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == torch.Tensor.data.__set__:  # another object each time
            raise InvalidArgument(
                f"the traced function sets .data of a tensor of shape {list(args[0].shape)}, which graphs do not have: "
                "use the new tensor, or write into the old one by .copy_ under torch.no_grad()"
            )
        return function(*args, **(kwargs or {}))


_OF_NO_GRAD, _DETACHED, _SPOILED = "of torch.no_grad", "detached", "spoiled"


class _GradModes(TorchDispatchMode):
    """Sees every operator below all transforms, where torch's tracer, too, sees it."""

    supports_higher_order_operators = True

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._given = set(map(_memory_of, given))
        self._whole: dict[int, torch.Tensor] = {}  # of what others are views, by its memory
        self._constant: set[int] = set()  # memory to whose tensors no cotangent leads,
        self._fixed: set[int] = set()  # and no tangent either
        self._views = WeakIdKeyDictionary()  # that are not followed, and why

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(function, torch._ops.OpOverload) or function.namespace not in ("aten", "prims"):
            return function(*args, **kwargs)
        self._refuse_spoiled(function, pytree.tree_leaves((args, kwargs)))
        written = _written_by(function, args, kwargs)
        if written:
            return self._write(function, args, kwargs, written)
        viewed = _viewed_by(function, args)
        if viewed is not None:
            return self._view(function, args, kwargs, viewed)
        is_followed = torch.is_grad_enabled()
        if is_followed:
            args, kwargs = self._without_cotangents((args, kwargs))
        result = function(*args, **kwargs)
        name = "" if is_followed else _function_around()
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stem = function._schema.name.partition("::")[2]
        is_new = stem.startswith("new_") or stem.endswith("_like")  # which takes shapes only, or draws
        is_fixed = is_new or torch.is_inference_mode_enabled() or all(map(self._is_fixed, inputs))
        is_constant = is_fixed or (not is_followed and not name) or all(map(self._is_constant, inputs))
        make = functools.partial(self._make, is_followed, name, is_constant, is_fixed)
        return pytree.tree_map_only(torch.Tensor, make, result)

    def returned(self, values: Any) -> tuple:
        return tuple(self._without_cotangents(list(values)))

    def _make(self, is_followed: bool, name: str, is_constant: bool, is_fixed: bool, tensor: Any) -> Any:
        """What the function around gets of what an operator has made."""
        if _has_derivatives(tensor) and not is_followed:
            if torch.is_inference_mode_enabled():  # without tangents, too
                tensor = torch.ops.aten.detach.default(tensor)
            tensor = _of_function(tensor, name) if name else _no_grad(tensor)
        # Not kept itself: torch would give a view of it where it means to give the only one.
        for kept, memories in ((is_constant, self._constant), (is_fixed, self._fixed)):
            (memories.add if kept else memories.discard)(_memory_of(tensor))
        return tensor

    def _view(self, function: Any, args: tuple, kwargs: dict, viewed: torch.Tensor) -> Any:
        result = function(*args, **kwargs)
        self._whole.setdefault(_memory_of(viewed), viewed)
        why = self._views.get(viewed)
        if function is torch.ops.aten.detach.default and why != _SPOILED:
            why = _DETACHED
        elif not torch.is_grad_enabled() and not _function_around():
            why = why or _OF_NO_GRAD
        if why:
            for view in pytree.tree_leaves(result):
                self._views[view] = why
        return result

    def _without_cotangents(self, arguments: Any) -> Any:
        """Views that were made under torch.no_grad, where they are used outside of it."""

        def given(tensor: torch.Tensor) -> torch.Tensor:
            return _no_grad(tensor) if self._views.get(tensor) == _OF_NO_GRAD and _has_derivatives(tensor) else tensor

        return pytree.tree_map_only(torch.Tensor, given, arguments)

    def _write(self, function: Any, args: tuple, kwargs: dict, written: list[torch.Tensor]) -> Any:
        is_followed, name = torch.is_grad_enabled(), ""
        if not is_followed:
            name = _function_around()
        is_detached = any(self._views.get(one) == _DETACHED for one in written) or torch.is_inference_mode_enabled()

        def given(tensor: torch.Tensor) -> torch.Tensor:
            is_other = not any(tensor is one for one in written) and _has_derivatives(tensor)
            if is_other and is_detached:
                if not self._is_fixed(tensor):
                    self._views.update(dict.fromkeys(written, _SPOILED))
                return torch.ops.aten.detach.default(tensor)
            is_unseen = not is_followed or self._views.get(tensor) == _OF_NO_GRAD
            return _no_grad(tensor) if is_other and is_unseen else tensor

        args, kwargs = pytree.tree_map_only(torch.Tensor, given, (args, kwargs))
        memories = [_memory_of(one) for one in written]
        if not is_detached:
            self._fixed.difference_update(memories)
        if (is_followed and not is_detached) or name:
            self._constant.difference_update(memories)
            return function(*args, **kwargs)
        # What is given, and constants, may not be written into, which is told later.
        roots = [
            self._whole.get(memory, one)
            for memory, one in zip(memories, written, strict=True)
            if isinstance(one, FakeTensor) and _has_derivatives(one)
            if memory not in (self._given | self._fixed if is_detached else self._given | self._constant)
        ]
        before = [torch.ops.aten.clone.default(root) for root in roots]
        result = function(*args, **kwargs)
        for root, earlier in zip(roots, before, strict=True):
            torch.ops.aten.copy_.default(root, _written(root, earlier, is_detached))
        return result

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return self._is_fixed(tensor) or tensor in self._views or _memory_of(tensor) in self._constant

    def _is_fixed(self, tensor: torch.Tensor) -> bool:
        is_computed = isinstance(tensor, FakeTensor) and _has_derivatives(tensor)
        return not is_computed or _memory_of(tensor) in self._fixed

    def _refuse_spoiled(self, function: Any, leaves: list[Any]) -> None:
        if any(isinstance(leaf, torch.Tensor) and self._views.get(leaf) == _SPOILED for leaf in leaves):
            raise InvalidArgument(
                f"the traced function uses ({function}) what .detach() gave after it has written values with "
                "derivatives into it, of which graphs know nothing: write under torch.no_grad(), or make a new tensor"
            )


def _has_derivatives(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written_by(function: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The arguments into which the operator writes."""
    arguments = function._schema.arguments
    pairs = [*zip(arguments, args, strict=False), *((one, kwargs[one.name]) for one in arguments if one.name in kwargs)]
    given = [value for one, value in pairs if one.alias_info is not None and one.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _viewed_by(function: Any, args: tuple) -> torch.Tensor | None:
    """The argument of which the operator gives views."""
    if all(one.alias_info is None for one in function._schema.returns):
        return None
    return next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)), None)


def _function_around() -> str:
    """The torch.autograd.Function whose forward runs, but for this package's, which graphs have; "" where none does."""
    forwards = {
        getattr(inspect.unwrap(one.forward), "__code__", None): one
        for one in _subclasses(torch.autograd.Function)
        if not one.__module__.startswith("bagua.")
    }
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code in forwards:
            return forwards[frame.f_code].__name__
        frame = frame.f_back
    return ""


def _subclasses(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def without_needless(module: fx.GraphModule) -> fx.GraphModule:
    """The functional graph without the no_grad of what is used only where another one follows."""
    is_sealed: set[fx.Node] = set()  # all that it leads to is a no_grad

    def seals(user: fx.Node, node: fx.Node) -> bool:
        return user.target is _no_grad or (user.target is _written and user.args[1] is not node) or user in is_sealed

    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and node.users and all(seals(user, node) for user in node.users):
            is_sealed.add(node)
    for node in module.graph.nodes:
        if node.target is _no_grad and node in is_sealed:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module
