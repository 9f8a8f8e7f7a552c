"""Graphs as bytes, to be kept or sent to clients: JSON and tensors, from which nothing is run.

Operators are kept by name, and only those of torch (aten, prims) and of this package (those of aggregators) that
compute new tensors are taken back: no operator of a graph from elsewhere reads or writes files or its arguments, or
runs other code. But it may ask for more memory or time than there is, and some operators of derivatives do not check
the indices and sizes that they get, so that one made to do harm reads or writes memory beyond its tensors. torch.load
does the rest with weights_only.
"""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.programs.graph import (
    BROADCAST,
    CHECK_TOTAL,
    CODE,
    MAP,
    REDUCTIONS,
    Graph,
    Node,
    NumClients,
    Value,
    operator_of,
    refusal_of_call,
)

_FORMAT = "bagua federated graph"
_VERSION = 1
_ENUMS = {
    "dtype": torch.dtype, "device": torch.device, "layout": torch.layout, "memory_format": torch.memory_format
}  # fmt: skip
_ENUMS_OF_SCHEMAS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}


def to_bytes(graph: Graph) -> bytes:
    """Returns bytes that ``from_bytes`` reads. Where its programs run, in which group, is not kept."""
    constants: list[torch.Tensor] = []
    text = json.dumps({"format": _FORMAT, "version": _VERSION, "graph": _encode_graph(graph, constants)})
    file = io.BytesIO()
    torch.save({"graph": text, "constants": constants}, file)
    return file.getvalue()


def from_bytes(data: bytes) -> Graph:
    """The graph.

    Raises:
        InvalidArgument: they are of something else, or it has operators that are not torch's own.
    """
    try:
        content = torch.load(io.BytesIO(data), weights_only=True)
        if not isinstance(content, dict):
            raise TypeError(type(content).__name__)
        description = json.loads(content["graph"])
        if description["format"] != _FORMAT:
            raise ValueError(description["format"])
        version = description["version"]
    except Exception as error:  # torch raises what its parsers do
        raise InvalidArgument(f"not a graph that Graph.save wrote: {error}") from None
    if version != _VERSION:
        raise InvalidArgument(f"a graph of version {version}, expected {_VERSION}: trace the program again")
    try:
        return _decode_graph(description["graph"], content["constants"]).signed()
    except InvalidArgument:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, AssertionError) as error:
        raise InvalidArgument(f"a graph that Graph.save did not write: {type(error).__name__} {error}") from None


# ---- to JSON


def _encode_graph(graph: Graph, constants: list[torch.Tensor]) -> dict[str, Any]:
    numbers = graph.numbers()
    first_constant = len(constants)
    constants.extend(graph.constants.values())

    def encode(argument: Any) -> Any:
        if isinstance(argument, Value):
            return {"value": numbers[argument]}
        if isinstance(argument, NumClients):
            return {"num_clients": argument.placement}
        if isinstance(argument, (list, tuple)):
            return {"list" if isinstance(argument, list) else "tuple": [encode(one) for one in argument]}
        for name, kind in _ENUMS.items():
            if isinstance(argument, kind):
                return {name: str(argument).removeprefix("torch.")}
        if argument is None or isinstance(argument, (bool, int, str)):
            return argument
        if isinstance(argument, float):
            return {"float": argument.hex()}  # with infinities, NaN and every bit
        if isinstance(argument, complex):
            return {"complex": [argument.real.hex(), argument.imag.hex()]}
        raise InvalidArgument(f"{graph.name} cannot be saved with {argument!r}, a {type(argument).__name__}")

    def describe(value: Value) -> list:
        return [value.name, list(value.shape), str(value.dtype).removeprefix("torch."), value.placement, value.axis]

    return {
        "name": graph.name,
        "inputs": [describe(value) for value in graph.inputs],
        "nodes": [
            {
                "verb": node.verb,
                "target": node.target,
                "args": [encode(one) for one in node.args],
                "kwargs": {key: encode(one) for key, one in node.kwargs.items()},
                "results": [value and describe(value) for value in node.results],
                "placement": node.placement,
                "randomness": node.randomness,
            }
            for node in graph.nodes
        ],
        "outputs": [encode(output) for output in graph.outputs],
        "structures": graph.structures and [_dumps(structure, graph.name) for structure in graph.structures],
        "constants": {name: first_constant + index for index, name in enumerate(graph.constants)},
        "placements": graph.placements,
        "functions": {name: _encode_graph(function, constants) for name, function in graph.functions.items()},
    }


def _dumps(structure: Any, name: str) -> str:
    try:
        text = pytree.treespec_dumps(structure)
        if _loads(text) != structure:  # such as keys that are tuples, which JSON makes lists of
            raise TypeError("it would not be read as it is")
        return text
    except (InvalidArgument, NotImplementedError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{name} cannot be saved with its structure {structure}: use dictionaries, lists and tuples ({error})"
        ) from None


# ---- and back

# The types that a defaultdict of a structure may make.
_FACTORIES = ("bool", "int", "float", "complex", "str", "list", "tuple", "dict", "set")


def _loads(text: str) -> Any:
    """The structure. torch would import any module that it names, for an enumeration or a factory of values."""
    _, schema = json.loads(text)
    _check_structure(schema)
    return pytree.treespec_loads(text)


def _check_structure(schema: dict[str, Any]) -> None:
    context = schema["context"]
    if schema["type"] == "collections.defaultdict":
        factory = context["default_factory_module"], context["default_factory_name"]
        if factory not in [("builtins", name) for name in _FACTORIES]:
            raise InvalidArgument(f"a structure with a defaultdict of {'.'.join(factory)}: use a dictionary")
    elif isinstance(context, str):
        with contextlib.suppress(json.JSONDecodeError):  # of a class that reads another language
            json.loads(context, object_hook=_refuse_enum)
    for child in schema["children_spec"]:
        _check_structure(child)


def _refuse_enum(found: dict[str, Any]) -> None:
    if "__enum__" in found:
        raise InvalidArgument(f"a structure with the enumeration {found.get('fqn')!r}: use strings or integers as keys")


def _natural(number: Any, least: int = 0) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        raise InvalidArgument(f"a graph with the number {number!r}, expected an integer of at least {least}")
    return number


def _enum(kind: str, name: str) -> Any:
    """torch.float32 and its kin."""
    found = getattr(torch, name, None)
    if not isinstance(found, _ENUMS[kind]):
        raise InvalidArgument(f"a graph with the {kind} {name!r}, which torch {torch.__version__} does not have")
    return found


def _check_enums(operator: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuses an integer as a dtype, which torch takes, and with which it reads memory that is not its own."""
    arguments = operator._schema.arguments
    given = [*zip(arguments, args, strict=False), *((one, kwargs[one.name]) for one in arguments if one.name in kwargs)]
    for argument, value in given:
        kind = str(argument.real_type).removeprefix("Optional[").removesuffix("]")
        if kind in _ENUMS_OF_SCHEMAS and not isinstance(value, (_ENUMS_OF_SCHEMAS[kind], type(None))):
            raise InvalidArgument(f"a graph with {value!r} for the {argument.name} of {operator}, expected a {kind}")


def _decode_graph(description: dict[str, Any], constants: list[torch.Tensor]) -> Graph:
    values: list[Value] = []

    def value(described: list) -> Value:
        name, shape, dtype, placement, axis = described
        values.append(Value(name, tuple(shape), _enum("dtype", dtype), placement, axis))
        return values[-1]

    def decode(argument: Any) -> Any:
        if not isinstance(argument, dict):
            return argument
        ((kind, content),) = argument.items()
        if kind in ("list", "tuple"):
            return (list if kind == "list" else tuple)(map(decode, content))
        if kind == "complex":
            return complex(*map(float.fromhex, content))
        decoders = {
            "value": lambda number: values[range(len(values))[_natural(number)]],
            "num_clients": NumClients,
            "float": float.fromhex,
            "device": lambda name: torch.device(str(name)),
        }
        return decoders[kind](content) if kind in decoders else _enum(kind, content)

    for name in description["constants"]:
        if "." in name:
            raise InvalidArgument(f"a graph with a constant that has the name of an operator, {name!r}")
    inputs = [value(described) for described in description["inputs"]]
    nodes: list[Node] = []
    for described in description["nodes"]:
        args = tuple(map(decode, described["args"]))
        kwargs = {key: decode(one) for key, one in described["kwargs"].items()}
        results = [one and value(one) for one in described["results"]]
        target = described["target"]
        if described["verb"] not in ("", BROADCAST, MAP, *REDUCTIONS):
            raise InvalidArgument(f"a graph with the verb {described['verb']!r}, which does not exist")
        is_code = target.startswith(CODE)  # which is not in the graph
        if is_code and (len(description["nodes"]) > 1 or description["structures"] is None):
            raise InvalidArgument(f"a graph that calls {target!r} beside other nodes, or without a structure")
        if not (described["verb"] or is_code) and target != CHECK_TOTAL and target not in description["constants"]:
            operator = operator_of(target)
            _check_enums(operator, args, kwargs)
            if why := refusal_of_call(operator, args, kwargs, nodes):
                raise InvalidArgument(f"a graph that calls the operator {target!r} {why}")
        if described["verb"] == MAP and target not in description["functions"]:
            raise InvalidArgument(f"a graph with a map of {target!r}, which is not in it")
        nodes.append(
            Node(described["verb"], target, args, kwargs, results, described["placement"], described["randomness"])
        )
    structures = description["structures"]
    if structures is not None and len(structures) != 2:
        raise InvalidArgument(f"a graph with {len(structures)} structures, expected two")
    placements = {name: _natural(size, 1) for name, size in description["placements"].items()}
    return Graph(
        description["name"],
        inputs,
        nodes,
        [decode(output) for output in description["outputs"]],
        structures and tuple(map(_loads, structures)),
        {name: constants[index] for name, index in description["constants"].items()},
        placements,
        {name: _decode_graph(function, constants) for name, function in description["functions"].items()},
    )
