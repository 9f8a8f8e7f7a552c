"""The verbs while federated.trace runs: operators over whole placed values, of which a map is one.

Nothing is computed: torch traces with tensors that have shapes only, and what appears in the graph are these operators
and torch's own. A map names its client function, which is traced by itself, for one client. Derivatives of a map, and
a batch of maps, are maps of client functions that are made from the first one:

    map(f)(x)       tangents:   map of jvp(f) over x and its tangents
                    cotangents: map of vjp(f) over x and the cotangents of what f returns
                    batch:      map of vmap(f), the batch's axis being the first of a client's

which is why a derivative of a federated program is one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from bagua.errors import InternalError, InvalidArgument
from bagua.federated.verbs.linear import Linear, define
from bagua.federated.verbs.placement import Placement, placement_of, trace_in_force
from bagua.federated.verbs.recomputation import HAS_CHANGED, as_called_now

NAMESPACE = "bagua_traced"
Tensors = Sequence[torch.Tensor]


class Spec(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Spec:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def zeros(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class ClientFunction:
    """A client function, traced.

    Attributes:
        key: what a map's operator names it by.
        name: for readers, such as "vjp(loss)".
        module: its graph of torch's operators and, for programs inside of it, of those of this file.
        function: what was traced, of which derivatives are traced.
        inputs, outputs: of one client.
        randomness: as of map_fn.
        placement: the key of the clients.
        original: of a derivative or a batch, the client function that the program has called; else None.
        structures: of the arguments and results of code, which runs as it is, and has no module; else None.
    """

    key: str
    name: str
    module: fx.GraphModule | None
    function: Callable[..., Tensors]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    randomness: str
    placement: str
    original: ClientFunction | None = None
    structures: tuple[Any, Any] | None = None


@dataclass
class Trace:
    """The findings of one trace of a function."""

    client_functions: dict[str, ClientFunction] = field(default_factory=dict)
    placements: dict[str, Placement] = field(default_factory=dict)  # by name
    programs: dict[str, Callable] = field(default_factory=dict)  # that put them in force again
    closure_checks: list[Any] = field(default_factory=list)  # over the client functions that are traced now, inner last
    dual_level: int = -1  # of forward mode around the function that is traced now, where it has no meaning
    _derived: dict[tuple, ClientFunction] = field(default_factory=dict)

    def add_program(self, placement: Placement, program: Callable) -> None:
        known = self.placements.setdefault(placement.name, placement)
        if (known.size, known.num_local) != (placement.size, placement.num_local):
            raise InvalidArgument(
                f"a traced function runs programs over {known.size} and over {placement.size} {placement.name}: give "
                "one of them another name"
            )
        self.programs.setdefault(placement.name, program)

    def add(
        self,
        name: str,
        function: Callable[..., Tensors],
        inputs: Sequence[Spec],
        randomness: str,
        placement: str,
        original: ClientFunction | None = None,
    ) -> ClientFunction:
        function = as_called_now(function)
        module = graph_of_one(function, inputs)
        drawn = [node for node in module.graph.nodes if is_drawn(node)]
        if drawn and randomness == "error":
            raise InvalidArgument(
                f"the client function {name} draws random numbers ({drawn[0].target}): say map_fn(randomness="
                '"different") for others at each client, or "same"'
            )
        (results,) = next(node for node in module.graph.nodes if node.op == "output").args
        outputs = tuple(Spec.of(result.meta["val"]) for result in results)
        key = f"{len(self.client_functions)}"
        made = ClientFunction(key, name, module, function, tuple(inputs), outputs, randomness, placement, original)
        self.client_functions[key] = made
        return made

    def add_code(
        self, function: Callable, inputs: Sequence[Spec], outputs: Sequence[Spec], structures: tuple, placement: str
    ) -> ClientFunction:
        """A client function that runs as it is."""
        name = name_of_code(function)
        if any(
            made.structures and made.name == name and made.function != function
            for made in self.client_functions.values()
        ):
            raise InvalidArgument(f"two client functions with the name {name}, by which clients find them: rename one")
        key = f"{len(self.client_functions)}"
        made = ClientFunction(
            key, name, None, function, tuple(inputs), tuple(outputs), "error", placement, structures=structures
        )
        self.client_functions[key] = made
        return made

    def derive(self, base: ClientFunction, how: str, indices: tuple, function: Callable, inputs: Tensors) -> str:
        """The key of what is made from `base` at these indices of its inputs and outputs."""
        specs = tuple(Spec((*x.shape[1:],), x.dtype, x.device) for x in inputs)
        if how != "vmap" and any(map(is_drawn, base.module.graph.nodes)):
            raise InvalidArgument(
                f"the client function {base.name} draws random numbers, and its derivative would draw others: draw "
                "them outside of it, such as with federated.sampling.per_client, and make them an argument"
            )
        identity = (base.key, how, indices, specs)
        if identity not in self._derived:
            original = base.original or base
            self._check_same(original)
            name = f"{how}({base.name})"
            made = self.add(name, function, specs, base.randomness, base.placement, original)
            self._derived[identity] = made
        return self._derived[identity].key

    def _check_same(self, called: ClientFunction) -> None:
        """Refuses the derivative of a function that has become another one since it was called."""
        again = graph_of_one(called.function, called.inputs)
        if self._text(again) != self._text(called.module) or not _have_same_constants(again, called.module):
            raise InvalidArgument(f"the client function {called.name} {HAS_CHANGED}")

    def _text(self, module: fx.GraphModule) -> tuple:
        """Equal for graphs that compute the same, but for their constants."""
        numbers = {node: number for number, node in enumerate(module.graph.nodes)}
        texts: list[Any] = []
        for node in module.graph.nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda given: numbers[given])
            if NAMES.get(node.target) == "map":
                args = args[0], self._text(self.client_functions[args[1]].module)
            texts.append(f"{node.op} {node.target if callable(node.target) else ''} {args} {kwargs}")
        return tuple(texts)


def _have_same_constants(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Returns True if the constants of two graphs of the same operators are equal."""
    constants = [
        [getattr(module, node.target) for node in module.graph.nodes if node.op == "get_attr"]
        for module in (one, other)
    ]
    with below_the_trace():
        return all(map(_are_equal, *constants))


def _are_equal(one: Any, other: Any) -> bool:
    if one is other or not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    return one.dtype == other.dtype and torch.allclose(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True)


def name_of_code(function: Callable) -> str:
    """Returns the name by which clients find a function that runs as it is."""
    name = getattr(function, "__name__", "")  # a partial has none, and clients would call the whole function
    if not name.isidentifier():
        raise InvalidArgument(
            f"map_fn(vectorize=False) of {function!r} in a traced program, whose clients find it by its name: give it "
            "one, by def"
        )
    return name


def tracing() -> Trace | None:
    """The trace that runs here."""
    return None if torch.compiler.is_compiling() else trace_in_force.get()


@contextmanager
def run_trace() -> Iterator[Trace]:
    trace = Trace()
    token = trace_in_force.set(trace)
    try:
        with torch.autograd.set_multithreading_enabled(False):  # or a device's backward would not see the trace
            yield trace
    finally:
        trace_in_force.reset(token)


# ---- graphs


_lock = threading.RLock()  # torch traces in one thread at a time


def is_drawn(node: fx.Node) -> bool:
    """Returns True if the node gives random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()) or node.target in NAMES:
        return False
    indices = [index for index, one in enumerate(node.target._schema.arguments) if one.name == "dropout_p"]
    if not indices:
        return True
    default = node.target._schema.arguments[indices[0]].default_value
    given = node.args[indices[0]] if len(node.args) > indices[0] else node.kwargs.get("dropout_p", default)
    return given != 0  # attention draws for its dropout only


def graph_of(function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The operators that a function of tensors to tensors runs: pure ones, none of whose results is unused."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    earlier = sys.exc_info()[1]
    with _lock, torch._C._ForceDispatchKeyGuard(*keys):
        try:
            return _graph_of(function, examples)
        except BaseException as error:
            _clear_frames_of_torch(error, earlier)
            raise


_TORCHS = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def _clear_frames_of_torch(error: BaseException, earlier: BaseException | None) -> None:
    """Drops what torch's frames hold of what has failed, but for an `earlier` error that is being handled.

    In the middle of a dispatch that is guards, which would switch torch's keys off once the error is gone, and with
    them all that follows in this thread.
    """
    seen, rest = {id(None), id(earlier)}, [error]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        rest += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if frame.f_code.co_filename.startswith(_TORCHS):
                with contextlib.suppress(RuntimeError):  # of a frame that still runs
                    frame.clear()


def _graph_of(function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor]) -> fx.GraphModule:
    make = functools.partial(make_fx, tracing_mode="fake", _allow_non_fake_inputs=True)
    try:
        # With a table, though an empty one: without one torch 2.14 makes an alias of detach, through which the
        # derivatives of the graph would pass.
        with (
            torch.inference_mode(False),
            torch.autograd.set_multithreading_enabled(False),  # as around the trace; the line before enables it
            torch.enable_grad(),
            # Views as they were made: torch's derivatives of writes into them have as_strided otherwise.
            torch.autograd._force_original_view_tracking(True),
            _NoSetData(),
        ):
            first = _without_dead_nodes(make(function, decomposition_table={})(*examples))
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        _refuse_values(str(getattr(error, "func", "a branch")))
    except NotImplementedError as error:  # of torch 2.9, where later ones trace it
        if "Generator" in str(error):
            raise unkept("Generator", "") from None
        raise
    for node in first.graph.nodes:
        if isinstance(like := node.meta.get("val"), torch.Tensor) and not all(isinstance(d, int) for d in like.shape):
            _refuse_values(str(node.target))
        if node.target is torch.ops.aten._embedding_bag_forward_only.default:  # which has no derivative
            node.target = torch.ops.aten._embedding_bag.default
        if _writes(node) and getattr(node.args[0], "op", "") in ("get_attr", "placeholder"):
            _refuse_write(node)
    # In a second pass, since torch cannot make functions of torch.autograd functional.
    pure = torch.func.functionalize(lambda *xs: fx.Interpreter(first).run(*xs), remove="mutations")
    module = _without_dead_nodes(make(pure, decomposition_table=_PURE)(*examples))
    for node in module.graph.nodes:
        if _writes(node):
            _refuse_write(node)
        if node.target is torch.ops.aten.slice_scatter.default:
            node.args = (node.args[0], *_plain_slice(node.args[0].meta["val"], *node.args[1:]))
    return module


class _NoSetData(TorchFunctionMode):
    """Refuses to set .data: torch's graphs would have the tensor from before, silently."""

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function == torch.Tensor.data.__set__:  # another object each time
            raise InvalidArgument(
                f"the traced function sets .data of a tensor of shape {list(args[0].shape)}, which graphs do not have: "
                "use the new tensor, or write into the old one by .copy_ under torch.no_grad()"
            )
        return function(*args, **(kwargs or {}))


def _plain_slice(
    value: torch.Tensor, source: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple:
    """Returns what slice_scatter is given after the value, with indices between 0 and the size."""
    if -value.dim() <= dim < value.dim():
        start, end, _ = slice(start, end).indices(value.shape[dim])
        end = max(start, end)
    return source, dim, start, end, step


def _copy(value: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    result = source.to(value.dtype).expand(value.shape)
    return result.clone(memory_format=torch.contiguous_format if value.is_contiguous() else torch.preserve_format)


# Functional forms of writes: index_fill is wrong under vmap if every batch has its own number and all one tensor.
_PURE = {
    torch.ops.aten.index_fill.int_Tensor: torch._refs.index_fill,
    torch.ops.aten.copy.default: _copy,
}


def _refuse_values(what: str) -> NoReturn:
    raise InvalidArgument(
        f"the traced function runs {what}, for which a tensor's values must be known, and only shapes are: use "
        "torch.where instead of a branch or of indices by a mask, and tensors instead of .item()"
    ) from None


def unkept(kind: str, where: str) -> InvalidArgument:
    """The error about an object that a function uses, such as a Generator."""
    return InvalidArgument(
        f"the traced function uses a {kind}, which a graph cannot keep{where}: draw outside of it, such as with "
        "federated.sampling.per_client, and make the numbers an argument; or without a generator, after "
        "torch.manual_seed"
    )


def _writes(node: fx.Node) -> bool:
    return getattr(getattr(node.target, "_schema", None), "is_mutable", False)


def _refuse_write(node: fx.Node) -> NoReturn:
    tensor = getattr(node.args[0], "meta", {}).get("val")
    shape = f" of shape {list(tensor.shape)}" if isinstance(tensor, torch.Tensor) else ""
    raise InvalidArgument(
        f"the traced function writes into a tensor that it is given or takes from around it ({node.target}{shape}), "
        "such as the running statistics of a module: clone it first, and return new values instead"
    )


@contextmanager
def below_the_trace() -> Iterator[None]:
    """Leaves the trace: tensors have values inside, and no transform runs."""
    with temporarily_clear_interpreter_stack(), disable_proxy_modes_tracing(), unset_fake_temporarily():
        yield


def graph_of_one(function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[Spec]) -> fx.GraphModule:
    """The same of a client function, which is traced while something else is."""
    with below_the_trace(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        trace = trace_in_force.get()
        trace.closure_checks.append(None)  # what torch does to trace is not checked
        around, trace.dual_level = trace.dual_level, forward_ad._current_level
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                examples = [spec.empty() for spec in inputs]
            return graph_of(function, examples)
        finally:
            trace.closure_checks.pop()
            trace.dual_level = around


def _without_dead_nodes(module: fx.GraphModule) -> fx.GraphModule:
    for node in reversed(list(module.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and not _writes(node):
            module.graph.erase_node(node)
    module.recompile()
    return module


# ---- operators

_library = torch.library.Library(NAMESPACE, "DEF")


def _not_run(*_: Any) -> NoReturn:
    raise InternalError(f"{NAMESPACE}: operators that are there to be traced, not to be run")


def _cotangents_of_mean(cotangents: Tensors, names: list[str], key: str, options: list[int]) -> list[torch.Tensor]:
    return call("broadcast", [cotangent / placement_of(key).size for cotangent in cotangents], key)


def _placed(values: Tensors, names: list[str], key: str, options: list[int]) -> list[torch.Tensor]:
    return [value.new_empty((placement_of(key).num_local, *value.shape)) for value in values]


def _reduced(values: Tensors, names: list[str], key: str, options: list[int]) -> list[torch.Tensor]:
    return [value.new_empty(value.shape[1:]) for value in values]


def _results_of_map(values: Tensors, key: str) -> list[torch.Tensor]:
    n = values[0].shape[0]
    return [values[0].new_empty((n, *s.shape), dtype=s.dtype, device=s.device) for s in _function_of(key).outputs]


# The tag keeps torch from computing them while it traces, where all values are constants.
_TAGS = (torch.Tag.nondeterministic_seeded,)
_RULES = {  # a batch comes after the clients' axis
    "broadcast": Linear(_not_run, lambda values, names, key, _: call("reduce_sum", values, key), _placed, batch=(0, 1)),
    "reduce_sum": Linear(
        _not_run, lambda values, names, key, _: call("broadcast", values, key), _reduced, batch=(1, 0)
    ),
    "reduce_mean": Linear(_not_run, _cotangents_of_mean, _reduced, batch=(1, 0)),
}
_library.define("map(Tensor[] values, str key) -> Tensor[]", tags=_TAGS)
_library.impl("map", _not_run, "CompositeExplicitAutograd")
torch.library.register_fake(f"{NAMESPACE}::map", _results_of_map, lib=_library)
OPERATORS = {name: define(_library, name, rule, _TAGS) for name, rule in _RULES.items()}
OPERATORS["map"] = torch.ops.bagua_traced.map.default
NAMES = {operator: name for name, operator in OPERATORS.items()}


def call(name: str, values: Tensors, key: str) -> list[torch.Tensor]:
    """The operator of that name, with its derivatives."""
    return list(_Map.apply(key, *values) if name == "map" else OPERATORS[name](list(values), [], key, []))


def _function_of(key: str) -> ClientFunction:
    return trace_in_force.get().client_functions[key]


def _has_tangents(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _fill(indices: Sequence[int], results: Tensors, size: int) -> tuple:
    filled: list = [None] * size
    for index, result in zip(indices, results, strict=True):
        filled[index] = result
    return tuple(filled)


class _Map(torch.autograd.Function):
    """A client function over placed values."""

    @staticmethod
    def forward(key: str, *values: torch.Tensor) -> tuple:
        return tuple(OPERATORS["map"](list(values), key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, outputs: tuple) -> None:
        ctx.key = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output for output in outputs if not _has_tangents(output.dtype)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple:
        base, values = _function_of(ctx.key), ctx.saved_tensors
        given = tuple(i for i, cotangent in enumerate(cotangents) if cotangent is not None)
        wanted = tuple(i for i, x in enumerate(values) if ctx.needs_input_grad[i + 1] and _has_tangents(x.dtype))
        if not given or not wanted:
            return (None,) * (1 + len(values))

        def pull(*parts: torch.Tensor) -> tuple:
            inputs, outer = list(parts[: len(values)]), parts[len(values) :]

            def of_wanted(*chosen: torch.Tensor) -> tuple:
                outputs = base.function(*_replaced(inputs, wanted, chosen))
                return tuple(outputs[i] for i in given)

            return torch.func.vjp(of_wanted, *(inputs[i] for i in wanted))[1](tuple(outer))

        inputs = [*values, *(cotangents[i] for i in given)]
        key = trace_in_force.get().derive(base, "vjp", (given, wanted), pull, inputs)
        return (None, *_fill(wanted, call("map", inputs, key), len(values)))

    @staticmethod
    def jvp(ctx: Any, _key: None, *tangents: torch.Tensor | None) -> tuple:
        base, values = _function_of(ctx.key), ctx.saved_tensors
        floating = tuple(i for i, spec in enumerate(base.outputs) if _has_tangents(spec.dtype))
        moving = tuple(i for i, x in enumerate(values) if tangents[i] is not None and _has_tangents(x.dtype))
        if not floating or not moving:
            return (None,) * len(base.outputs)

        def push(*parts: torch.Tensor) -> tuple:
            inputs, pushed = list(parts[: len(values)]), parts[len(values) :]

            def of_moving(*chosen: torch.Tensor) -> tuple:
                outputs = base.function(*_replaced(inputs, moving, chosen))
                return tuple(outputs[i] for i in floating)

            primals = tuple(inputs[i] for i in moving)
            results, moved = torch.func.jvp(of_moving, primals, tuple(pushed))
            # torch 2.13 makes float64 tangents of numbers without axes, whatever their primals are.
            return tuple(tangent.to(result.dtype) for tangent, result in zip(moved, results, strict=True))

        inputs = [*values, *(tangents[i].to(values[i].dtype) for i in moving)]
        key = trace_in_force.get().derive(base, "jvp", (moving,), push, inputs)
        return _fill(floating, call("map", inputs, key), len(base.outputs))

    @staticmethod
    def vmap(info: Any, dims: tuple, key: str, *values: torch.Tensor) -> tuple:
        base = _function_of(key)
        moved = [x if dim is None else x.movedim(dim, 1) for x, dim in zip(values, dims[1:], strict=True)]
        is_batched = tuple(None if dim is None else 0 for dim in dims[1:])
        batched = torch.func.vmap(base.function, is_batched, randomness=info.randomness)
        derived = trace_in_force.get().derive(base, "vmap", (is_batched, info.randomness), batched, moved)
        return tuple(call("map", moved, derived)), (1,) * len(base.outputs)


def _replaced(values: Tensors, indices: Sequence[int], chosen: Tensors) -> list[torch.Tensor]:
    replaced = list(values)
    for index, value in zip(indices, chosen, strict=True):
        replaced[index] = value
    return replaced
