"""Python values as text and back, for messages between ranks: reading one runs no code, as unpickling would.

Beside the data path. JSON, in which everything that JSON has not is {its kind: its parts}. Values come back with their
types and bit for bit; of subclasses of numbers, texts and dicts the base comes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from bagua.errors import InvalidArgument

__all__ = ["dumps", "loads"]


def dumps(value: Any, tuples: Sequence[type] = ()) -> bytes:
    """The text of a value.

    Args:
        value: None, numbers, texts, bytes, dtypes, devices, NumPy arrays, and lists, tuples, sets and dicts of them.
        tuples: subclasses of tuple that come back as such.

    Raises:
        InvalidArgument: something in it is none of these; the message says what and where.

    Example:
        >>> loads(dumps({"betas": (0.9, 0.999), 3: [None, b"x", float("inf")]}))
        {'betas': (0.9, 0.999), 3: [None, b'x', inf]}
    """
    return json.dumps(_encoded(value, {kind: kind.__name__ for kind in tuples}, "")).encode()


def _encoded(value: Any, tuples: dict[type, str], where: str) -> Any:
    def each(values: Any) -> list[Any]:
        return [_encoded(entry, tuples, f"{where}[{index}]") for index, entry in enumerate(values)]

    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return {"numpy": [value.dtype.str, list(value.shape), isinstance(value, np.generic), _text(value.tobytes())]}
    if value is None or isinstance(value, bool):
        return value
    for kind, base in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, kind):
            return base(value)
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes):
        return {"bytes": _text(value)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, dict):
        pairs = [[_encoded(key, tuples, where), _encoded(it, tuples, f"{where}[{key!r}]")] for key, it in value.items()]
        return {"dict": pairs}
    if isinstance(value, list):
        return each(value)
    if isinstance(value, tuple):
        return {tuples.get(type(value), "tuple"): each(value)}
    if isinstance(value, (set, frozenset)):
        return {"set" if isinstance(value, set) else "frozenset": each(value)}
    raise InvalidArgument(
        f"{value!r} at {where or 'the top'} is a {type(value).__name__}, which is not sent between ranks, expected "
        "numbers, texts, bytes, and lists, tuples, sets and dicts of them"
    )


def loads(text: bytes, tuples: Sequence[type] = ()) -> Any:
    """The value of a text that dumps has made with the same `tuples`.

    Raises:
        ValueError, TypeError, KeyError: the text is not one.
    """
    return _decoded(json.loads(text), {kind.__name__: kind for kind in tuples})


def _decoded(value: Any, tuples: dict[str, type]) -> Any:
    if isinstance(value, list):
        return [_decoded(entry, tuples) for entry in value]
    if not isinstance(value, dict):
        return value
    ((kind, parts),) = value.items()
    if kind in tuples:
        return tuples[kind](_decoded(parts, tuples))
    return _KINDS[kind](parts, lambda entry: _decoded(entry, tuples))


def _numpy(parts: Any) -> Any:
    dtype, shape, is_scalar, text = parts
    array = np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype)).reshape(shape).copy()
    return array[()] if is_scalar else array


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return dtype


_KINDS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "dict": lambda parts, decoded: {decoded(key): decoded(value) for key, value in parts},
    "tuple": lambda parts, decoded: tuple(decoded(parts)),
    "set": lambda parts, decoded: set(decoded(parts)),
    "frozenset": lambda parts, decoded: frozenset(decoded(parts)),
    "bytes": lambda parts, _: base64.b64decode(parts, validate=True),
    "complex": lambda parts, _: complex(*parts),
    "dtype": lambda parts, _: _dtype(parts),
    "device": lambda parts, _: torch.device(parts),
    "numpy": lambda parts, _: _numpy(parts),
}


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
