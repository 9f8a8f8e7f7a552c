"""federated.trace: from a function that calls programs, or derivatives of them, to a graph.

torch traces the function with tensors that have shapes only (traced.py). Here its operators become the nodes of a
Graph: each value gets a placement, the server or the clients, and what clients compute outside of map_fn is made
independent of how many of them there are. Nothing communicates, and nothing depends on the number of clients but sizes.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.programs.graph import (
    BROADCAST,
    CHECK_TOTAL,
    CODE,
    EVERYWHERE,
    MAP,
    OF_AGGREGATORS,
    SERVER,
    Graph,
    Node,
    NumClients,
    Value,
    leaf_name,
    name_of,
    refusal,
    refusal_of_call,
    without_dead_nodes,
)
from bagua.federated.programs.unbatched import Mixed, place_operator
from bagua.federated.verbs import operators, traced
from bagua.federated.verbs.placement import placement_of


def trace(function: Callable, *args: Any) -> Graph:
    """The program as a graph whose nodes are the verbs; client functions are nodes, traced for one client.

    The function is run once, with tensors that have no values: branches on numbers that it is given are decided, and
    loops unrolled. No rank is talked to. What no result depends on is not in the graph.

    Args:
        function: of pytrees, that calls programs, or a derivative of such a function by torch.func.
        args: what it is to be called with; only structure, shapes and dtypes matter. What programs use must come
            from them: tensors from around the function become constants of the graph.

    Example:
        >>> from bagua import federated
        >>> @federated.program(clients=3)
        ... def loss(x, y):
        ...     return federated.reduce_mean(federated.map_fn(torch.dot, (federated.broadcast(x), y)))
        >>> print(federated.trace(loss, torch.ones(2), torch.ones(3, 2)))
        loss over 3 clients:
            x                            # float32[2] at server
            y                            # float32[2] at clients
            broadcast = broadcast(x)     # float32[2] at clients
            dot = map dot(broadcast, y)  # float32[] at clients
            mean = reduce_mean(dot)      # float32[] at server
            return mean
        <BLANKLINE>
        dot, of one client:
            x0                      # float32[2]
            x1                      # float32[2]
            dot = aten.dot(x0, x1)  # float32[]
            return dot
        >>> gradient = federated.trace(torch.func.grad(loss), torch.ones(2), torch.ones(3, 2))
        >>> gradient.verbs()
        ['broadcast', 'reduce_sum']

    Raises:
        InvalidArgument: values of the server meet values of clients outside of the verbs, client data come from around
            the function, values of different clients are mixed, or what the verbs raise.
    """
    leaves, structure = pytree.tree_flatten(args)
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(indices) < len(leaves):
        other = next(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        raise InvalidArgument(
            f"trace of a function of {other!r}, a {type(other).__name__}, expected tensors: give numbers and the like "
            "by functools.partial"
        )
    found: list[Any] = []

    def flat(*tensors: torch.Tensor) -> list[torch.Tensor]:
        results, out_structure = pytree.tree_flatten(function(*pytree.tree_unflatten(list(tensors), structure)))
        found[:] = [out_structure, results]
        return [result for result in results if isinstance(result, torch.Tensor)]

    if traced.tracing():
        raise InvalidArgument("a trace inside of a trace: call the function itself")
    if torch._C._functorch.maybe_current_level() is not None:
        raise InvalidArgument("trace inside of a transform of torch.func: trace the transform of the function")
    names = _names(function, args)
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidArgument(f"two tensors of the arguments are called {twice}: rename an argument or a key")
    # They are objects of their own: torch takes an object that is given twice for one argument.
    examples = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    with traced.run_trace() as run:
        module = traced.graph_of(flat, examples)
        out_structure, results = found
        graph = _Conversion(run, module, names).graph(_title(function))
    tensors = iter(graph.outputs)
    graph.outputs = [next(tensors) if isinstance(result, torch.Tensor) else result for result in results]
    graph.structures = (structure, out_structure)
    graph.programs = dict(run.programs)
    return without_dead_nodes(graph).signed()


def _title(function: Callable) -> str:
    while hasattr(function, "func"):  # of functools.partial
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def _names(function: Callable, args: tuple) -> list[str]:
    """Returns the name of each leaf of the arguments, such as "params_w"."""
    try:
        parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        parameters = []
    names = []
    for path, _ in pytree.tree_flatten_with_path(args)[0]:
        index = path[0].idx
        first = parameters[index] if index < len(parameters) else f"x{index}"
        names.append(leaf_name(first, path[1:]))
    return names


class _Conversion:
    """Turns torch's graph into ours.

    Args:
        run: the trace that it was made in.
        module: torch's graph, of the function or of a client function.
        names: of its inputs; None: by number.
    """

    def __init__(self, run: traced.Trace, module: fx.GraphModule, names: list[str] | None):
        self._run = run
        self._module = module
        self._names = names
        self._taken: set[str] = set()
        self._filled_with: dict[Value, tuple[Any, dict]] = {}
        self._known: dict[fx.Node, Any] = {}
        self._nodes: list[Node] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._functions: dict[str, Graph] = {}
        self._keys: dict[str, str] = {}  # of the functions in the trace, by name
        self._placements: dict[str, int] = {}

    def graph(self, name: str) -> Graph:
        clients = self._whose_inputs_are_placed()
        inputs = []
        for number, node in enumerate(n for n in self._module.graph.nodes if n.op == "placeholder"):
            title = self._names[number] if self._names else f"x{number}"
            self._known[node] = value = self._value(title, node.meta["val"], clients.get(node))
            inputs.append(value)
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                self._known[node] = self._constant(node, getattr(self._module, node.target))
            elif node.op == "call_function":
                self._known[node] = self._convert(node)
        (results,) = next(node for node in self._module.graph.nodes if node.op == "output").args
        outputs = [self._known[result] for result in results]
        return Graph(name, inputs, self._nodes, outputs, None, self._constants, self._placements, self._functions)

    # ---- placements

    def _whose_inputs_are_placed(self) -> dict[fx.Node, str]:
        """The clients, by inputs that go into a map or a reduction as they are, or meet such values in operators."""
        nodes = [node for node in self._module.graph.nodes if node.op == "call_function"]
        placed: dict[fx.Node, str] = {}
        while True:
            before = len(placed)
            for node in reversed(nodes):
                verb = traced.NAMES.get(node.target)
                if verb == BROADCAST or (not verb and _is_made_from_nothing(node)):
                    continue
                where = self._placement_of(node, verb).name if verb else placed.get(node)
                if where is not None:
                    placed.update((argument, where) for argument in node.all_input_nodes)
            for node in nodes:
                verb = traced.NAMES.get(node.target)
                if verb in (BROADCAST, MAP):
                    placed[node] = self._placement_of(node, verb).name
                elif not verb and not _is_made_from_nothing(node):
                    found = next((placed[x] for x in node.all_input_nodes if self._is_placed(x, placed)), None)
                    if found is not None:
                        placed[node] = found
            if len(placed) == before:
                return {node: where for node, where in placed.items() if self._has_clients_axis(node, where)}

    def _is_placed(self, node: fx.Node, placed: dict[fx.Node, str]) -> bool:
        return node in placed and (node.op != "placeholder" or self._has_clients_axis(node, placed[node]))

    def _has_clients_axis(self, node: fx.Node, where: str) -> bool:
        shape = node.meta["val"].shape if node.op == "placeholder" else ()
        return len(shape) > 0 and shape[0] == self._run.placements[where].num_local

    def _placement_of(self, node: fx.Node, verb: str) -> Any:
        key = self._run.client_functions[node.args[1]].placement if verb == MAP else node.args[2]
        placement = placement_of(key)
        self._placements.setdefault(placement.name, placement.size)
        return placement

    # ---- nodes

    def _convert(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self._known[node.args[0]][node.args[1]]
        verb = traced.NAMES.get(node.target)
        if verb:
            return self._verb(node, verb)
        args, kwargs = _plain(fx.map_arg((node.args, node.kwargs), lambda given: self._known[given]))
        target = str(node.target)
        if target == CHECK_TOTAL:
            values, name = args[0], placement_of(args[2]).name
            totals = [self._value(value.name, like, None) for value, like in zip(values, node.meta["val"], strict=True)]
            self._nodes.append(Node("", target, tuple(values), {}, totals, name))
            return totals
        if not _is_made_from_nothing(node) and (why := refusal(node.target)):
            if target == f"{operators.NAMESPACE}.gather.default":
                why = "which needs every client's values: they do not leave the clients"
            raise InvalidArgument(f"the traced function runs {target}, {why}{_line_of(node)}")
        if why := refusal_of_call(node.target, args, kwargs, self._nodes):
            raise InvalidArgument(f"the traced function calls {target} {why}{_line_of(node)}")
        return self._operator(node, target, args, kwargs)

    def _verb(self, node: fx.Node, verb: str) -> list[Value]:
        placement = self._placement_of(node, verb)
        values = [self._known[given] for given in node.args[0]]
        if verb != BROADCAST:
            values = [self._spread(value, 0, placement.name) for value in values]
        for value in values:
            if verb == BROADCAST and value.placement not in (SERVER, EVERYWHERE):
                raise InvalidArgument(f"broadcast of {value.name}, which is at the {value.placement} already")
            if verb != BROADCAST and value.placement == EVERYWHERE:
                raise InvalidArgument(
                    f"{verb} over {placement.name} of a tensor of shape {list(value.shape)} from around the traced "
                    "function: what clients have must be an argument of it"
                )
            if verb != BROADCAST and value.placement != placement.name:
                raise InvalidArgument(
                    f"{verb} over {placement.name} of {value.name}: {list(value.shape)}, which is at the "
                    f"{value.placement}: federated.broadcast it"
                )
            if value.axis not in (None, 0):
                raise InvalidArgument(f"{verb} of {value.name}, whose axis {value.axis} is the clients': expected 0")
        target, randomness = "", "error"
        if verb == MAP:
            made = self._run.client_functions[node.args[1]]
            target, randomness = self._function(made), made.randomness
        where = None if verb.startswith("reduce") else placement.name
        base = {MAP: target.split("(")[-1].rstrip(")")}.get(verb, verb.removeprefix("reduce_"))
        results = [self._value(base, like, where) for like in node.meta["val"]]
        self._nodes.append(Node(verb, target, tuple(values), {}, results, placement.name, randomness))
        return results

    def _function(self, made: traced.ClientFunction) -> str:
        """Its name among the functions of this graph."""
        for name, key in self._keys.items():
            if key == made.key:
                return name
        name, number = made.name, 1
        while name in self._functions:
            number += 1
            name = f"{made.name}_{number}"
        self._keys[name] = made.key
        code = made.structures is not None
        self._functions[name] = _graph_of_code(made) if code else _Conversion(self._run, made.module, None).graph(name)
        return name

    def _operator(self, node: fx.Node, target: str, args: tuple, kwargs: dict) -> Any:
        like = node.meta["val"]
        kept = _is_nothing_new(target, args, kwargs, like)
        if kept is not None:
            return kept
        if isinstance(like, torch.Tensor) and _is_made_from_nothing(node):
            return self._filled(target, args, like)
        reads_bits = target == "aten.view.dtype"
        if name_of(target) in _KEEP_A_FILL and not reads_bits and self._is_filled(args[0]):
            number = _converted(self._filled_with[args[0]][0], args[0].dtype, like.dtype)
            return self._filled("aten.full.default", (None, number), like)
        if reads_bits and args[0].dtype.itemsize != like.dtype.itemsize:
            args = (self._contiguous(args[0]), *args[1:])
        elif name_of(target) in ("view", "_unsafe_view") and not reads_bits:
            target = "aten.reshape.default"  # other strides than those that were traced are as good
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value)]
        where = next((value.placement for value in inputs if value.axis is not None), None)
        axis = None
        if where is not None:
            try:
                args, axis = place_operator(
                    node.target, target, args, kwargs, like, where, self._num_local(where), self._spread
                )
            except Mixed as error:
                raise InvalidArgument(f"outside of map_fn, the traced function runs {error}{_line_of(node)}") from None
            if name_of(target) == "squeeze":
                target = "aten.squeeze.dims"
        likes = [like] if isinstance(like, torch.Tensor) else list(like)  # some are None, where nothing was asked for
        # Not of what is drawn: clients would draw other numbers, or learn the seed.
        is_drawn = traced.is_drawn(node) or target in OF_AGGREGATORS
        is_constant = where is None and not is_drawn and all(value.placement == EVERYWHERE for value in inputs)
        base = name_of(target).strip("_")
        results = [one if one is None else self._value(base, one, where, axis, is_constant) for one in likes]
        self._nodes.append(Node("", target, args, kwargs, results))
        return results[0] if isinstance(like, torch.Tensor) else results

    def _filled(self, target: str, args: tuple, like: torch.Tensor) -> Value:
        """Replaces zeros_like, new_ones and their kin by aten.full, which depends on no value."""
        name = name_of(target)
        number = 1 if "ones" in name else 0 if "zero" in name or "empty" in name else args[-1]
        source = args[0] if isinstance(args[0], Value) and name.endswith("_like") else None
        shape: list[Any] = list(like.shape)
        where, axis = (None, None) if source is None or source.axis is None else (source.placement, source.axis)
        if axis is not None:
            shape[axis] = NumClients(where)
        result = self._value("full", like, where, axis, where is None)
        kwargs = {"dtype": like.dtype, "device": like.device}
        self._nodes.append(Node("", "aten.full.default", (shape, number), kwargs, [result]))
        self._filled_with[result] = (number, kwargs)
        return result

    def _is_filled(self, value: Any) -> bool:
        return value in self._filled_with and value.placement == EVERYWHERE

    def _spread(self, value: Value, axis: int, where: str) -> Value:
        """A constant of equal elements, one for each client, as the clients' own; others as they are."""
        if not self._is_filled(value) or value.shape[axis : axis + 1] != (self._num_local(where),):
            return value
        number, kwargs = self._filled_with[value]
        shape: list[Any] = list(value.shape)
        result = Value(self._name(value.name), (*shape[:axis], *shape[axis + 1 :]), value.dtype, where, axis)
        shape[axis] = NumClients(where)
        self._nodes.append(Node("", "aten.full.default", (shape, number), kwargs, [result]))
        return result

    def _contiguous(self, value: Value) -> Value:
        """A copy in which the elements of the last axis follow one another, as reading them in another size takes."""
        result = Value(self._name("clone"), value.shape, value.dtype, value.placement, value.axis)
        kwargs = {"memory_format": torch.contiguous_format}
        self._nodes.append(Node("", "aten.clone.default", (value,), kwargs, [result]))
        return result

    def _constant(self, node: fx.Node, tensor: torch.Tensor) -> Value:
        if not isinstance(tensor, torch.Tensor):
            raise traced.unkept(type(tensor).__name__, _line_of(node))
        title = f"constant_{len(self._constants)}"
        self._constants[title] = tensor.detach()
        result = self._value(title, tensor, None, None, True)
        self._nodes.append(Node("", title, (), {}, [result]))
        return result

    def _num_local(self, where: str) -> int:
        return self._run.placements[where].num_local

    def _name(self, base: str) -> str:
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}_{number}"
        self._taken.add(name)
        return name

    def _value(
        self, base: str, like: torch.Tensor, where: str | None, axis: int | None = 0, is_constant: bool = False
    ) -> Value:
        shape = list(like.shape)
        if where is None:
            axis = None
        elif axis is not None:
            del shape[axis]
        return Value(self._name(base), tuple(shape), like.dtype, where or (EVERYWHERE if is_constant else SERVER), axis)


def _graph_of_code(made: traced.ClientFunction) -> Graph:
    """A graph of one node, which calls the function."""
    inputs = [Value(f"x{number}", like.shape, like.dtype, SERVER) for number, like in enumerate(made.inputs)]
    results = [Value(f"y{number}", like.shape, like.dtype, SERVER) for number, like in enumerate(made.outputs)]
    node = Node("", f"{CODE}{made.name}", tuple(inputs), {}, list(results))
    graph = Graph(made.name, inputs, [node], list(results), made.structures)
    graph.install({made.name: made.function})
    return graph


# Operators that give equal elements from equal elements, when they read no bits.
_KEEP_A_FILL = ("view", "expand", "unsqueeze", "reshape", "_to_copy")


def _converted(number: Any, dtype: torch.dtype, to: torch.dtype) -> Any:
    """The number that is left of one in a tensor of `dtype` when it is converted: of 2.7 in int64, 2."""
    return number if dtype == to else torch.full((), number, dtype=dtype, device="cpu").to(to).item()


def _plain(argument: Any) -> Any:
    """Returns the value without torch.fx's kinds of lists and dictionaries."""
    if isinstance(argument, dict):
        return {key: _plain(value) for key, value in argument.items()}
    if isinstance(argument, (list, tuple)):
        return (tuple if isinstance(argument, tuple) else list)(map(_plain, argument))
    return argument


def _is_made_from_nothing(node: fx.Node) -> bool:
    """Returns True if the operator takes no value from its arguments, but a shape at most."""
    name = name_of(str(node.target)) if isinstance(node.target, torch._ops.OpOverload) else ""
    return name in (
        "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "zeros", "ones", "full",
        "empty", "empty_like", "new_empty", "_efficientzerotensor", "_new_zeros_with_same_feature_meta",
    )  # fmt: skip


def _is_nothing_new(target: str, args: tuple, kwargs: dict, like: Any) -> Any:
    """The argument that the operator returns as it is, if so."""
    name = name_of(target)
    value = args[1] if name == "copy" and len(args) == 2 else args[0] if args else None
    if not isinstance(value, Value) or not isinstance(like, torch.Tensor) or value.dtype != like.dtype:
        return None
    shape = list(value.shape)
    if value.axis is not None:
        shape.insert(value.axis, like.shape[value.axis] if value.axis < like.dim() else -1)
    if shape != list(like.shape):
        return None
    if name in ("alias", "copy", "view", "_unsafe_view", "expand", "lift_fresh_copy"):
        return value
    if name == "permute" and list(args[1]) == list(range(like.dim())):
        return value
    if name == "_to_copy" and "device" not in kwargs:  # which is there where it is another than the value's
        return value
    return None


def _line_of(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    return f" ({lines[-1]})" if lines else ""
