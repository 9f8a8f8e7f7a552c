"""What torch.no_grad, writes into detached tensors, and functions with their own derivatives mean in graphs.

torch's graphs have operators and nothing of the modes in which they ran, so that their derivatives would go through
what the program computed without any. While a function is traced, `kept_in_graph` puts three operators in, whose values
are those that they are given:

    operator                    of a cotangent     of a tangent     stands for
    no_grad(value)              nothing            value's          what ran under torch.no_grad
    written(value, before)      before's           value's          what a write under torch.no_grad left in a tensor;
                                                   or before's      one into what .detach() gives has no tangent
    of_function(value, name)    an error           an error         what a torch.autograd.Function computed by itself

As in torch, forward mode goes through torch.no_grad.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from bagua.errors import InvalidArgument
from bagua.federated.operators import NAMESPACE, install_derivatives

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def _define(schema: str, backward: Callable, jvp: Callable, batched: Callable, has_any: Callable = lambda: True) -> Any:
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

    methods = {"setup_context": setup_context, "backward": backward, "jvp": jvp}
    methods = {title: staticmethod(method) for title, method in methods.items()}
    install_derivatives(_library, operator, methods, has_any=has_any)
    return operator


_no_grad = _define(
    "no_grad(Tensor value) -> Tensor",
    lambda ctx, cotangent: (None, None),
    # torch 2.13 makes float64 tangents of numbers without axes, whatever their primals are.
    lambda ctx, _keys, tangent: _no_grad(tangent.to(ctx.dtype)),
    lambda info, dims, value: (_no_grad(value), dims[0]),
    lambda: forward_ad._current_level >= 0,
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

# Marks what is left as it is; not in any graph that leaves this file.
_library.define("same(Tensor value) -> Tensor")
_same = torch.ops.bagua_federated.same.default
_library.impl("same", lambda value: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::same", lambda value: torch.empty_like(value), lib=_library)

OPERATORS = (_no_grad, _written, _of_function)  # that may be in graphs


def without_cotangents(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What verbs give under torch.no_grad."""
    return [_no_grad(tensor) if _has_derivatives(tensor) else tensor for tensor in tensors]


@contextmanager
def kept_in_graph(given: Sequence[torch.Tensor]) -> Iterator[Callable[[Any], tuple]]:
    """Puts these operators into the graph of what runs inside, which torch traces, in one thread at a time.

    Args:
        given: to the function.

    Yields:
        What makes, of what the function returns, what its graph has to return.
    """
    modes = _GradModes(given)
    before = vars(_SingleLevelFunction).get("apply")
    _running.append(modes)
    _SingleLevelFunction.apply = classmethod(_apply)
    try:
        with (
            torch.inference_mode(False),
            torch.autograd.set_multithreading_enabled(False),  # as around the trace; the line before enables it
            torch.enable_grad(),
            _NoSetData(),
            modes,
        ):
            yield modes.returned
    finally:
        _running.pop()
        if before is None:
            del _SingleLevelFunction.apply
        else:
            _SingleLevelFunction.apply = before


_running: list[_GradModes] = []  # from the outermost trace in


def _apply(cls: type, *arguments: Any) -> Any:
    """Function.apply, below all transforms. Torch has no hook there, and programs keep the method itself."""
    plain = super(_SingleLevelFunction, cls).apply
    innermost = _running[-1:]  # none where the trace, of another thread, has just ended
    is_traced = any(mode is one for mode in _get_current_dispatch_mode_stack() for one in innermost)
    if not is_traced or not issubclass(cls, torch.autograd.Function):
        return plain(*arguments)
    return innermost[0].apply(cls, plain, arguments)


class _NoSetData(TorchFunctionMode):
    """Torch's graphs would have the tensor from before, and say nothing."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == torch.Tensor.data.__set__:  # another object each time
            raise InvalidArgument(
                f"the traced function sets .data of a tensor of shape {list(args[0].shape)}, which graphs do not have: "
                "use the new tensor, or write into the old one by .copy_ under torch.no_grad()"
            )
        if function in (torch.Tensor.detach_, torch.detach_):
            raise InvalidArgument(
                f"the traced function calls detach_() of a tensor of shape {list(args[0].shape)}, which graphs do not "
                "have: use .detach()"
            )
        return function(*args, **(kwargs or {}))


@dataclass(eq=False)
class _Detached:
    """What detach gave, in memory of its own, since it has other derivatives; writes into either are repeated."""

    source: torch.Tensor
    result: TensorWeakRef


class _GradModes(TorchDispatchMode):
    """Sees every operator below all transforms, where torch's tracer, too, sees it."""

    supports_higher_order_operators = True

    def __init__(self, given: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._given = set(map(_memory_of, given))
        self._whole: dict[int, torch.Tensor] = {}  # of what others are views, by its memory
        self._constant: set[int] = set()  # memory to whose tensors no cotangent leads,
        self._fixed: set[int] = set()  # and no tangent either
        self._marked = WeakIdKeyDictionary()  # tensors with another's memory, and what makes what they are of them
        self._detached: list[_Detached] = []
        # Of the Functions that run, from the outermost in: whether gradients are enabled around it, and the memory
        # that it has made; None for one that is transparent.
        self._functions: list[tuple[bool, set[int] | None]] = []

    def _is_followed(self) -> bool:
        return self._functions[-1][0] if self._functions else torch.is_grad_enabled()

    def apply(self, function: type, plain: Callable, arguments: tuple) -> Any:
        """A torch.autograd.Function's."""
        is_followed = self._is_followed()
        is_transparent = function.__module__.startswith("bagua.") or function is CheckpointFunction
        made: set[int] | None = None if is_transparent else set()
        self._functions.append((is_followed, made))
        try:
            results = plain(*arguments)
        finally:
            self._functions.pop()
        if is_transparent or not is_followed:
            return results
        memories = {_memory_of(one) for one in arguments if isinstance(one, torch.Tensor)}
        for result in pytree.tree_leaves(results):
            if not isinstance(result, torch.Tensor) or not _has_derivatives(result):
                continue
            is_alias = _memory_of(result) in memories and not any(result is one for one in arguments)
            if is_alias:
                self._marked[result] = functools.partial(_as_of_function, function.__name__)
            else:
                # Below autograd, to which the Function's own derivative is known, and below this mode.
                with torch._C._AutoDispatchBelowAutograd(), _without(self):
                    torch.ops.aten.copy_.default(result, _of_function(result, function.__name__))
        return results

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if _running[-1] is not self:  # of a client function, which is traced within
            return function(*args, **kwargs)
        is_followed = self._is_followed()
        if not isinstance(function, torch._ops.OpOverload) or function.namespace not in ("aten", "prims"):
            if is_followed:
                args, kwargs = self._used((args, kwargs))
            return function(*args, **kwargs)
        written = _written_by(function, args, kwargs)
        if written:
            return self._write(function, args, kwargs, written)
        if function is torch.ops.aten.detach.default:
            return self._detach(args[0])
        viewed = _viewed_by(function, args)
        if viewed is not None:
            return self._view(function, args, kwargs, viewed)
        if is_followed:
            args, kwargs = self._used((args, kwargs))
        result = function(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        stem = function._schema.name.partition("::")[2]
        is_new = stem.startswith("new_") or stem.endswith("_like")  # which takes shapes only, or draws
        is_fixed = is_new or torch.is_inference_mode_enabled() or all(map(self._is_fixed, inputs))
        is_constant = is_fixed or not is_followed or all(map(self._is_constant, inputs))
        make = functools.partial(self._make, is_followed, is_constant, is_fixed)
        return pytree.tree_map_only(torch.Tensor, make, result)

    def returned(self, values: Any) -> tuple:
        return tuple(self._used(list(values)))

    def _make(self, is_followed: bool, is_constant: bool, is_fixed: bool, tensor: Any) -> Any:
        """What the function around gets of what an operator has made."""
        if _has_derivatives(tensor) and not is_followed:
            if torch.is_inference_mode_enabled():  # without tangents, too
                tensor = torch.ops.aten.detach.default(tensor)
            tensor = _no_grad(tensor)
        # Not kept itself: torch would give a view of it where it means to give the only one.
        self._note_made(tensor, is_constant, is_fixed)
        return tensor

    def _note_made(self, tensor: torch.Tensor, is_constant: bool, is_fixed: bool) -> None:
        memory = _memory_of(tensor)
        for is_in, memories in ((is_constant, self._constant), (is_fixed, self._fixed)):
            (memories.add if is_in else memories.discard)(memory)
        for _, made in self._functions:
            if made is not None:
                made.add(memory)

    def _detach(self, source: torch.Tensor) -> torch.Tensor:
        if not _has_derivatives(source):
            return torch.ops.aten.detach.default(source)
        result = _same(torch.ops.aten.detach.default(source))
        self._note_made(result, True, True)
        self._detached.append(_Detached(source, TensorWeakRef(result)))
        return result

    def _view(self, function: Any, args: tuple, kwargs: dict, viewed: torch.Tensor) -> Any:
        result = function(*args, **kwargs)
        memory = _memory_of(viewed)
        self._whole.setdefault(memory, viewed)
        mark = self._marked.get(viewed)
        if mark is None and not self._is_followed() and memory not in self._constant:
            mark = _no_grad
        if mark is not None:
            for view in pytree.tree_leaves(result):
                self._marked[view] = mark
        return result

    def _used(self, arguments: Any) -> Any:
        """With what they stand for instead of marked tensors."""

        def given(tensor: torch.Tensor) -> torch.Tensor:
            mark = self._marked.get(tensor)
            return tensor if mark is None or not _has_derivatives(tensor) else mark(tensor)

        return pytree.tree_map_only(torch.Tensor, given, arguments)

    # ---- writes

    def _write(self, function: Any, args: tuple, kwargs: dict, written: list[torch.Tensor]) -> Any:
        memories = [_memory_of(one) for one in written]
        is_inference = torch.is_inference_mode_enabled()
        is_followed = self._is_followed() and not any(
            made is not None and memory not in made for _, made in self._functions for memory in memories
        )

        def given(tensor: torch.Tensor) -> torch.Tensor:
            if any(tensor is one for one in written) or not _has_derivatives(tensor):
                return tensor
            if is_inference:
                return torch.ops.aten.detach.default(tensor)
            return self._used(tensor) if is_followed else _no_grad(tensor)

        others = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        others = [one for one in others if not any(one is target for target in written)]
        args, kwargs = pytree.tree_map_only(torch.Tensor, given, (args, kwargs))
        if not is_inference and not all(map(self._is_fixed, others)):
            self._fixed.difference_update(memories)
        if is_followed:
            if not all(map(self._is_constant, others)):
                self._constant.difference_update(memories)
            result = function(*args, **kwargs)
        else:
            # Each once. What is given, and constants, may not be written into, which is told later.
            wholes = {
                memory: (self._whole.get(memory, one), is_inference or not _has_derivatives(one))  # bits, for these
                for memory, one in zip(memories, written, strict=True)
                if isinstance(one, FakeTensor) and memory not in self._given | self._constant
            }
            roots = [(root, _same(root), keeps) for root, keeps in wholes.values() if _has_derivatives(root)]
            result = function(*args, **kwargs)
            for root, before, keeps_tangent in roots:
                torch.ops.aten.copy_.default(root, _written(root, before, keeps_tangent))
        self._detached = [one for one in self._detached if one.result() is not None]
        for memory in dict.fromkeys(memories):
            self._repeat(memory, None)
        return result

    def _repeat(self, memory: int, origin: _Detached | None) -> None:
        """A write into this memory in what was detached from its tensors, and in what those were detached from."""
        for one in self._detached:
            result = one.result()
            if result is None or one is origin:
                continue
            pairs = ((one.source, result), (result, one.source))
            for source, target in pairs:
                if _memory_of(source) == memory:
                    self._copy(source, target)
                    self._repeat(_memory_of(target), one)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """The values alone."""
        value = torch.ops.aten.detach.default(source)
        if not self._is_fixed(target):
            value = _written(value, _same(target), True)
        torch.ops.aten.copy_.default(target, value)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        return self._is_fixed(tensor) or self._marked.get(tensor) is _no_grad or _memory_of(tensor) in self._constant

    def _is_fixed(self, tensor: torch.Tensor) -> bool:
        is_computed = isinstance(tensor, FakeTensor) and _has_derivatives(tensor)
        return not is_computed or _memory_of(tensor) in self._fixed


def _as_of_function(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return _of_function(tensor, name)


@contextmanager
def _without(mode: TorchDispatchMode) -> Iterator[None]:
    """For operators that are not to be seen by it."""
    with torch.utils._python_dispatch._disable_current_modes() as modes:
        with contextlib.ExitStack() as stack:
            for one in modes:
                if one is not mode:
                    stack.enter_context(one)
            yield


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


# ---- graphs


def without_needless(module: fx.GraphModule) -> fx.GraphModule:
    """The functional graph with no more of these operators, and of copies for them, than its derivatives need."""

    def replace(node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        module.graph.erase_node(node)

    for node in module.graph.nodes:
        given = node.args[0] if node.args else None
        if node.target is torch.ops.aten.expand.default:  # of a copy to a tensor of the same shape
            is_needless = given.target in OPERATORS and given.meta["val"].shape == node.meta["val"].shape
        else:
            is_needless = node.target is torch.ops.aten.clone.default and given.target in OPERATORS
        if is_needless or node.target is _same:
            replace(node, given)
    for node in module.graph.nodes:
        if node.target is _written and not node.args[2]:
            before = node.args[1]
            while before.target is _written and not before.args[2]:
                before = before.args[1]  # to which a cotangent of that one goes
            node.args = (node.args[0], before, False)
    is_sealed: set[fx.Node] = set()  # what leads to a no_grad wherever it leads

    def seals(user: fx.Node, node: fx.Node) -> bool:
        if user.target is _written:
            return user.args[1] is not node
        return user.target in (_no_grad, torch.ops.aten.detach.default) or user in is_sealed

    for node in reversed(list(module.graph.nodes)):
        if node.op != "call_function":
            continue
        if not node.users:
            module.graph.erase_node(node)
        elif all(seals(user, node) for user in node.users):
            is_sealed.add(node)
    for node in module.graph.nodes:
        if node in is_sealed and (node.target is _no_grad or (node.target is _written and not node.args[2])):
            replace(node, node.args[0])
    module.recompile()
    return module
