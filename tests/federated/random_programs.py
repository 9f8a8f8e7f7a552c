"""Random federated programs as data, which any language of tensors and verbs can run.

A program is a dict that JSON keeps: the shapes of its inputs, steps over named values, and which of them it returns.

    ["broadcast", tree, tree]                        of server values, to placed ones
    ["map", arguments, body, tree]                   the client function; a list of arguments is splatted
    ["sum", tree, tree], ["mean", tree, tree]        of placed values, to server ones
    ["weighted", tree, weights, mask or null, tree]  as those
    ["map_sum", arguments, body, tree, chunk size or null, tree], and "map_mean": a map and its reduction in one
    ["server", body]
    ["repeat", times, steps, {name: name}]           after each round, the left names hold what the right ones do

Trees are lists and dicts with names of values as leaves. A body is a list of what a client, or the server, computes: a
client sees its arguments only, under the names that they have outside. It has operations as text, the result's name
first, and ["result", "grad" or "each", variable, body, name], for what the body makes of the variable, or of its rows.

`generate` and `draw` depend on nothing but a number and `VERSION`: they draw by numpy's RandomState, whose streams stay
the same for ever, and only what no libm computes. This file imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

VERSION = 1  # of what is drawn: programs and numbers of another one differ
NUM_PROGRAMS = 210

Shape = tuple[int, ...]
Program = dict[str, Any]

# ---- running


class Language(NamedTuple):
    """What runs a program.

    Attributes:
        operations: of bodies, by name: from tensors and constants to a tensor.
        verbs: "broadcast", "map", "sum", "mean", "weighted", "map_sum" and "map_mean", by name, as the steps have them.
        grad: from a function of one tensor to its gradient.
        vmap: from a function of one tensor to that over its first axis.
    """

    operations: dict[str, Callable]
    verbs: dict[str, Callable]
    grad: Callable[[Callable], Callable]
    vmap: Callable[[Callable], Callable]


def run(program: Program, inputs: dict[str, Any], language: Language) -> list[Any]:
    """The values that the program returns."""
    values = dict(inputs)
    _run_steps(program["steps"], values, language)
    return [values[name] for name in program["returns"]]


def _run_steps(steps: list, values: dict, language: Language) -> None:
    for kind, *rest in steps:
        if kind == "server":
            _run_body(rest[0], values, language)
        elif kind == "repeat":
            times, inner, carried = rest
            for _ in range(times):
                _run_steps(inner, values, language)
                values.update({name: values[new] for name, new in carried.items()})
        else:
            verb, target = language.verbs[kind], rest[-1]
            if kind == "weighted":
                tree, weights, mask, _ = rest
                found = verb(_look_up(tree, values), values[weights], mask)
            elif kind.startswith("map"):
                arguments, body, results = rest[:3]
                function = _client_function(arguments, body, results, language)
                placed = _look_up(arguments, values)
                found = verb(function, tuple(placed) if isinstance(placed, list) else placed, *rest[3:-1])
            else:
                found = verb(_look_up(rest[0], values))
            _name(target, found, values)


def _client_function(arguments: Any, body: list, results: Any, language: Language) -> Callable:
    def function(*given: Any) -> Any:
        values: dict[str, Any] = {}
        _name(arguments, list(given) if isinstance(arguments, list) else given[0], values)
        _run_body(body, values, language)
        return _look_up(results, values)

    return function


def _run_body(body: list, values: dict, language: Language) -> None:
    for operation in body:
        if isinstance(operation, str):
            result, kind, *operands = operation.split()
            given = [values[one] if one in values else float(one) for one in operands]
            values[result] = language.operations[kind](*given)
            continue
        result, kind, variable, inner, output = operation

        def function(x: Any, variable: str = variable, inner: list = inner, output: str = output) -> Any:
            within = {**values, variable: x}
            _run_body(inner, within, language)
            return within[output]

        transform = language.grad if kind == "grad" else language.vmap
        values[result] = transform(function)(values[variable])


def _look_up(tree: Any, values: dict) -> Any:
    if isinstance(tree, dict):
        return {key: _look_up(one, values) for key, one in tree.items()}
    if isinstance(tree, list):
        return [_look_up(one, values) for one in tree]
    return values[tree]


def _name(tree: Any, found: Any, values: dict) -> None:
    if isinstance(tree, dict):
        assert found.keys() == tree.keys()
        for key, one in tree.items():
            _name(one, found[key], values)
    elif isinstance(tree, list):
        assert len(found) == len(tree)
        for one, value in zip(tree, found, strict=True):
            _name(one, value, values)
    else:
        values[tree] = found


def names_of(tree: Any) -> list[str]:
    """A tree's leaves."""
    if isinstance(tree, str):
        return [tree]
    return [name for one in (tree.values() if isinstance(tree, dict) else tree) for name in names_of(one)]


def steps_of(program: Program) -> Iterator[list]:
    """Its steps, those that are repeated once."""
    todo = list(program["steps"])
    while todo:
        step = todo.pop(0)
        yield step
        if step[0] == "repeat":
            todo = [*step[2], *todo]


# ---- what it runs on


class Numbers(NamedTuple):
    """Arrays by the names of the inputs, or in the order of what a program returns."""

    inputs: dict[str, np.ndarray]
    tangents: dict[str, np.ndarray]
    cotangents: list[np.ndarray]


def draw(number: int, program: Program) -> Numbers:
    """The numbers of a program; what the clients have, with the clients' axis first."""
    random = np.random.RandomState([VERSION, number, 1])
    shapes = {name: tuple(shape) for name, shape in program["server"].items()}
    shapes |= {name: (program["clients"], *shape) for name, shape in program["placed"].items()}
    inputs = {}
    for name, shape in shapes.items():
        low, high = (0.5, 1.5) if name.startswith("w") else (-1.0, 1.0)
        inputs[name] = random.uniform(low, high, shape)
    tangents = {name: np.asarray(random.uniform(-1.0, 1.0, shape)) for name, shape in shapes.items()}
    cotangents = [np.asarray(random.uniform(-1.0, 1.0, shape)) for shape in program["shapes"]]
    return Numbers({name: np.asarray(array) for name, array in inputs.items()}, tangents, cotangents)


# ---- generating

SHAPES = [(), (), (1,), (2,), (3,), (3,), (2, 2), (1, 3), (3, 2)]
SMOOTH = ["sin", "cos", "tanh", "logistic", "softplus", "root", "bell", "relu"]  # of one tensor, elementwise
PAIRS = ["add", "sub", "mul", "ratio"]  # of two, elementwise
ALONG = ["sum_last", "mean_last", "logsumexp"]  # without the last axis
MOST_NUMEL = 9  # of a value in a body
MOST_SERVER_NUMEL = 8  # of all inputs
MOST_PLACED_NUMEL = 18
MOST_RETURNED_NUMEL = 4


def generate(number: int) -> Program:
    """The program of that number."""
    return _Generator(np.random.RandomState([VERSION, number, 0])).program()


def needed(body: list, results: list[str]) -> list:
    """The operations without which the results would not be."""
    wanted, kept = set(results), []
    for operation in reversed(body):
        if result_of(operation) in wanted:
            kept.append(operation)
            wanted |= _taken(operation)
    return kept[::-1]


def result_of(operation: str | list) -> str:
    return operation.split()[0] if isinstance(operation, str) else operation[0]


def _taken(operation: str | list) -> set[str]:
    """The names that it takes from around it, among others."""
    if isinstance(operation, str):
        return set(operation.split()[2:])
    _, _, variable, inner, _ = operation
    return {variable}.union(*map(_taken, inner))


class _Scope:
    """Values that may be used together, by name, and which of them nothing has used yet."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.shapes = dict(shapes)
        self.unused = list(shapes)

    def add(self, name: str, shape: Shape) -> None:
        self.shapes[name] = shape
        self.unused.append(name)

    def use(self, *names: str) -> None:
        self.unused = [name for name in self.unused if name not in names]


class _Generator:
    def __init__(self, random: np.random.RandomState) -> None:
        self.random = random
        self.count = 0

    # What is drawn.

    def below(self, number: int) -> int:
        return int(self.random.randint(number))

    def chance(self, probability: float) -> bool:
        return bool(self.random.uniform() < probability)

    def one_of(self, options: list) -> Any:
        return options[self.below(len(options))]

    def some_of(self, options: list, most: int) -> list:
        order = list(options)
        for index in range(len(order) - 1, 0, -1):
            other = self.below(index + 1)
            order[index], order[other] = order[other], order[index]
        return order[: 1 + self.below(min(most, len(order)))]

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def pick(self, scope: _Scope, names: list[str]) -> str:
        """Rather one that nothing has used."""
        unused = [name for name in scope.unused if name in names]
        name = self.one_of(unused if unused and self.chance(0.9) else names)
        scope.use(name)
        return name

    def tree(self, names: list[str]) -> Any:
        """With these leaves."""
        if len(names) == 1:
            return {"a": names[0]} if self.chance(0.2) else names[0]
        cut = 1 + self.below(len(names) - 1)
        parts = [self.tree(names[:cut]), self.tree(names[cut:])]
        return self.one_of([list(names), parts, {"b": parts[0], "a": parts[1]}])

    def renamed(self, tree: Any) -> Any:
        """The tree with new leaves."""
        if isinstance(tree, str):
            return self.new()
        if isinstance(tree, list):
            return [self.renamed(one) for one in tree]
        return {key: self.renamed(one) for key, one in tree.items()}

    # Bodies.

    def body(self, scope: _Scope, length: int, inner: bool = True) -> list:
        """That many operations on values of the scope, whose results go into it."""
        return [self.operation(scope, inner) for _ in range(length)]

    def operation(self, scope: _Scope, inner: bool) -> str | list:
        while True:
            kind = self.one_of(["smooth", "smooth", "pair", "pair", "pair", "product", "along", "shape", "inner"])
            found = getattr(self, f"_{kind}")(scope, inner)
            if found is not None:
                operation, shape = found
                name = self.new()
                scope.add(name, shape)
                return f"{name} {operation}" if isinstance(operation, str) else [name, *operation]

    def _smooth(self, scope: _Scope, inner: bool) -> tuple | None:
        x = self.pick(scope, list(scope.shapes))
        if self.chance(0.2):
            return f"scale {x} {self.random.uniform(0.25, 1.75):.3f}", scope.shapes[x]
        return f"{self.one_of(SMOOTH)} {x}", scope.shapes[x]

    def _pair(self, scope: _Scope, inner: bool) -> tuple | None:
        x = self.pick(scope, list(scope.shapes))
        shape = scope.shapes[x]
        y = self.pick(scope, [name for name, other in scope.shapes.items() if other in (shape, ()) or shape == ()])
        operands = f"{x} {y}" if self.chance(0.5) else f"{y} {x}"
        return f"{self.one_of(PAIRS)} {operands}", max(shape, scope.shapes[y], key=len)

    def _product(self, scope: _Scope, inner: bool) -> tuple | None:
        x = self.pick(scope, list(scope.shapes))
        left = scope.shapes[x]
        if not left:
            return None
        y = self.pick(scope, list(scope.shapes))
        right = scope.shapes[y]
        if len(right) in (1, 2) and left[-1] == right[0]:
            shape = (*left[:-1], *right[1:])
            return (f"matmul {x} {y}", shape) if prod(shape) <= MOST_NUMEL else None
        if len(left) == len(right) == 1 and prod((*left, *right)) <= MOST_NUMEL:
            return f"outer {x} {y}", (*left, *right)
        return None

    def _along(self, scope: _Scope, inner: bool) -> tuple | None:
        options = [name for name, shape in scope.shapes.items() if shape]
        if not options:
            return None
        x = self.pick(scope, options)
        return f"{self.one_of(ALONG)} {x}", scope.shapes[x][:-1]

    def _shape(self, scope: _Scope, inner: bool) -> tuple | None:
        options = [name for name, shape in scope.shapes.items() if shape]
        if not options:
            return None
        x = self.pick(scope, options)
        shape = scope.shapes[x]
        kind = self.one_of(["flat", "transpose", "first", "softmax", "cumulate", "join"])
        if kind == "join":
            y = self.pick(scope, [name for name in options if scope.shapes[name][1:] == shape[1:]])
            joined = (shape[0] + scope.shapes[y][0], *shape[1:])
            return (f"join {x} {y}", joined) if prod(joined) <= MOST_NUMEL else None
        shapes = {"flat": (prod(shape),), "transpose": shape[::-1], "first": shape[1:]}
        return f"{kind} {x}", shapes.get(kind, shape)

    def _inner(self, scope: _Scope, inner: bool) -> tuple | None:
        """A gradient, or a function of each row, within a body."""
        if not inner:
            return None
        if self.chance(0.6):
            return self.gradient(scope, self.pick(scope, list(scope.shapes)))
        options = [name for name, shape in scope.shapes.items() if len(shape) == 2]
        if not options:
            return None
        x = self.pick(scope, options)
        rows, *row = scope.shapes[x]
        within = _Scope({**scope.shapes, x: tuple(row)})
        body = self.body(within, 1 + self.below(2), inner=False)
        last, output = result_of(body[-1]), self.new()
        body.append(f"{output} mul {last} {self.scalar(within, x, body)}")  # another value for every row
        shape = (rows, *within.shapes[last])
        return (["each", x, needed(body, [output]), output], shape) if prod(shape) <= MOST_NUMEL else None

    def gradient(self, scope: _Scope, variable: str) -> tuple:
        """Of a random scalar that depends on the variable and, mostly, on another value."""
        within = _Scope(scope.shapes)
        within.unused = [variable, self.one_of(list(scope.shapes))]
        body = self.body(within, 1 + self.below(3), inner=False)
        last, output = result_of(body[-1]), self.new()
        parts = [self.scalar(within, name, body) for name in (variable, last)]
        body.append(f"{output} mul {parts[0]} {parts[1]}")
        return ["grad", variable, needed(body, [output]), output], scope.shapes[variable]

    def scalar(self, scope: _Scope, name: str, body: list) -> str:
        """A smooth sum of a value, added to the body."""
        bent = self.new()
        body.append(f"{bent} {self.one_of(['sin', 'tanh', 'softplus', 'root'])} {name}")
        if not scope.shapes[name]:
            return bent
        total = self.new()
        body.append(f"{total} total {bent}")
        return total

    # Programs.

    def program(self) -> Program:
        clients = self.one_of([1, 2, 3, 3, 4, 5])
        server = self.inputs("s", MOST_SERVER_NUMEL)
        placed = {**self.inputs("p", MOST_PLACED_NUMEL // clients - 1), "w0": ()}
        self.clients = clients
        self.server, self.placed = _Scope(server), _Scope(placed)
        steps: list = []
        for _ in range(self.one_of([1, 1, 2, 2, 3])):
            steps += self.one_of([self.round, self.round, self.descent])()
        returned, body = self.returned()
        if body:
            steps.append(["server", body])
        return {
            "clients": clients,
            "server": {name: list(shape) for name, shape in server.items()},
            "placed": {name: list(shape) for name, shape in placed.items()},
            "steps": steps,
            "returns": returned,
            "shapes": [list(self.server.shapes[name]) for name in returned],
        }

    def inputs(self, prefix: str, most_numel: int) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {}
        for _ in range(1 + self.below(3)):
            fitting = [s for s in SHAPES if prod(s) + sum(map(prod, shapes.values())) <= most_numel]
            if fitting:
                shapes[f"{prefix}{len(shapes)}"] = self.one_of(fitting)
        return shapes

    def round(self) -> list:
        """Broadcast, maps, reductions, and what the server makes of them."""
        steps = [self.broadcast(self.some_of_scope(self.server, 3))]
        steps += [self.map() for _ in range(1 + self.below(2))]
        for _ in range(1 + self.below(2)):
            steps += self.reduction()
        if self.chance(0.5):
            steps.append(["server", self.body(self.server, 1 + self.below(2))])
        return steps

    def descent(self) -> list:
        """Rounds in which clients descend from a value of the server, which steps by the mean of where they come to."""
        variable = self.pick(self.server, list(self.server.shapes))
        shape = self.server.shapes[variable]
        others = [name for name in self.some_of_scope(self.server, 2) if name != variable]
        broadcast = self.broadcast([variable, *others])
        copies = names_of(broadcast[2])
        scope, arguments = self.client_scope([copies[0]])
        body: list = []
        here = copies[0]
        for _ in range(1 + self.below(2)):
            operation, _ = self.gradient(scope, here)
            slope, step, there = self.new(), self.new(), self.new()
            body += [[slope, *operation], f"{step} scale {slope} 0.2", f"{there} sub {here} {step}"]
            scope.add(there, shape)
            here = there
        mapped = self.new()
        self.placed.add(mapped, shape)
        body.append(f"{mapped} sub {copies[0]} {here}")
        function = ["map", arguments, body, {"a": mapped}]
        reduction = self.reduction([mapped])
        (mean,) = names_of(reduction[-1][-1])
        moved, new = self.new(), self.new()
        update = ["server", [f"{moved} tanh {mean}", f"{new} sub {variable} {moved}"]]
        steps = [broadcast, function, *reduction, update]
        self.server.use(mean)
        times = self.below(3)
        if times:
            self.server.unused.append(variable)
            return [["repeat", times + 1, steps, {variable: new}]]
        self.server.add(new, shape)
        return steps

    def some_of_scope(self, scope: _Scope, most: int) -> list[str]:
        """Distinct names."""
        found = [self.pick(scope, list(scope.shapes)) for _ in range(1 + self.below(most))]
        return list(dict.fromkeys(found))

    def broadcast(self, names: list[str]) -> list:
        tree = self.tree(names)
        copies = self.renamed(tree)
        for name, copy in zip(names_of(tree), names_of(copies), strict=True):
            self.placed.add(copy, self.server.shapes[name])
        return ["broadcast", tree, copies]

    def client_scope(self, wanted: list[str]) -> tuple[_Scope, Any]:
        """What a client function is given, and how."""
        names = list(dict.fromkeys([*wanted, *self.some_of_scope(self.placed, 4)]))
        self.placed.use(*names)
        scope = _Scope({name: self.placed.shapes[name] for name in names})
        if len(names) == 1 or self.chance(0.3):
            return scope, names[0] if len(names) == 1 else {"a": self.tree(names)}
        cut = 1 + self.below(len(names))
        parts = [part for part in (names[:cut], names[cut:]) if part]
        return scope, [self.tree(part) for part in parts]

    def client_function(self) -> tuple[Any, list, Any, _Scope]:
        scope, arguments = self.client_scope([])
        body = self.body(scope, 2 + self.below(4))
        made = [result_of(operation) for operation in body]
        results = self.some_of([name for name in made if name in scope.unused] or made[-1:], 3)
        return arguments, needed(body, results), self.tree(results), scope

    def map(self) -> list:
        arguments, body, results, scope = self.client_function()
        for name in names_of(results):
            self.placed.add(name, scope.shapes[name])
        return ["map", arguments, body, results]

    def reduction(self, names: list[str] | None = None) -> list:
        """Its step, or that and the map that makes the weights."""
        kind = self.one_of(["sum", "mean", "weighted", "weighted", *(["map_sum", "map_mean"] if names is None else [])])
        if kind.startswith("map"):
            arguments, body, results, scope = self.client_function()
            return [[kind, arguments, body, results, self.one_of([None, 1, 2]), self.reduced(results, scope)]]
        tree = self.tree(names or self.some_of_scope(self.placed, 3))
        self.placed.use(*names_of(tree))
        reduced = self.reduced(tree, self.placed)
        if kind != "weighted":
            return [[kind, tree, reduced]]
        steps, weights, mask = [], "w0", None
        if self.chance(0.5):
            body: list = []
            source, weights = self.pick(self.placed, list(self.placed.shapes)), self.new()
            bent = self.scalar(_Scope(self.placed.shapes), source, body)
            steps = [["map", source, [*body, f"{weights} weight {bent}"], weights]]
        if self.chance(0.4):
            mask = [self.chance(0.6) for _ in range(self.clients)]
            mask[self.below(self.clients)] = True
        return [*steps, ["weighted", tree, weights, mask, reduced]]

    def reduced(self, tree: Any, scope: _Scope) -> Any:
        """Where a reduction of the tree goes."""
        targets = self.renamed(tree)
        for name, target in zip(names_of(tree), names_of(targets), strict=True):
            self.server.add(target, scope.shapes[name])
        return targets

    def returned(self) -> tuple[list[str], list]:
        """One to three values, the latest, and the operations that make them small enough."""
        names = self.server.unused[-(1 + self.below(3)) :] or list(self.server.shapes)[-1:]
        body: list = []
        for index, name in enumerate(names):
            while prod(self.server.shapes[name]) > MOST_RETURNED_NUMEL:
                smaller = self.new()
                body.append(f"{smaller} sum_last {name}")
                self.server.add(smaller, self.server.shapes[name][:-1])
                name = smaller
            names[index] = name
        return names, body
