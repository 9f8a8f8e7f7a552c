"""Names to algorithms. An algorithm is one file of this folder, found by its file stem; there is no list.

Code outside the package registers a class with the same decorator, under the class's own ``name``.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from typing import Any

from bagua.algorithms.base import Algorithm
from bagua.errors import InternalError, InvalidArgument

_PACKAGE = "bagua.algorithms"
_NOT_PLUGINS = ("base", "compressed", "registry")
_classes: dict[str, type[Algorithm]] = {}


def register(cls: type[Algorithm]) -> type[Algorithm]:
    """Class decorator: makes an algorithm available under its name.

    The name is the file stem for a file of ``bagua/algorithms``, ``cls.name`` elsewhere.

    Raises:
        InvalidArgument: no name, a name that is taken, or a class that is no keyword-only dataclass.
    """
    package, _, stem = cls.__module__.rpartition(".")
    if package == _PACKAGE:
        cls.name = stem
    if not cls.name or not isinstance(cls.name, str):
        raise InvalidArgument(f'{cls.__qualname__} has no name; write `name = "..."` in its body')
    if "__dataclass_params__" not in vars(cls) or any(not field.kw_only for field in dataclasses.fields(cls)):
        raise InvalidArgument(f"{cls.__qualname__} must be decorated with @dataclasses.dataclass(kw_only=True)")
    taken = _classes.get(cls.name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidArgument(
            f"algorithm name {cls.name!r} is already taken by {taken.__module__}.{taken.__qualname__}"
        )
    _classes[cls.name] = cls
    return cls


def available() -> tuple[str, ...]:
    """The names that ``with_bagua(..., algorithm=name)`` accepts, sorted.

    Example:
        >>> "gradient_allreduce" in available()
        True
    """
    return tuple(sorted(set(_classes) | set(_file_stems())))


def get(name: str) -> type[Algorithm]:
    """The class that is registered under ``name``.

    Raises:
        InvalidArgument: unknown name; the message lists the known ones.
    """
    if name not in _classes and name in _file_stems():
        importlib.import_module(f"{_PACKAGE}.{name}")
        if name not in _classes:
            raise InternalError(f"bagua/algorithms/{name}.py registers no algorithm {name!r}")
    if name not in _classes:
        raise InvalidArgument(f"unknown algorithm {name!r}; available: {', '.join(available())}")
    return _classes[name]


def create(name: str, options: dict[str, Any]) -> Algorithm:
    """The algorithm ``name`` with ``options``.

    Raises:
        InvalidArgument: unknown name or option, or an option's value that the algorithm rejects.
    """
    cls = get(name)
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    unknown = [option for option in options if option not in fields]
    if unknown:
        valid = ", ".join(f"{option} (default {default!r})" for option, default in fields.items()) or "none"
        raise InvalidArgument(
            f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))} "
            f"for algorithm {name!r}; its options: {valid}"
        )
    return cls(**options)


def _file_stems() -> list[str]:
    path = importlib.import_module(_PACKAGE).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.name not in _NOT_PLUGINS]
