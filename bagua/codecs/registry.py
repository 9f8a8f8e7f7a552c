"""Names to codecs. A codec is one file of this folder, found by its file stem; there is no list."""

from __future__ import annotations

import importlib
import pkgutil

from bagua.codecs.base import Codec
from bagua.errors import InternalError, InvalidArgument

_PACKAGE = "bagua.codecs"
_NOT_PLUGINS = ("base", "registry")
_codecs: dict[str, Codec] = {}


def register(cls: type[Codec]) -> type[Codec]:
    """Class decorator: makes a codec available under the stem of its file."""
    cls.name = cls.__module__.rpartition(".")[2]
    _codecs[cls.name] = cls()
    return cls


def available() -> tuple[str, ...]:
    """The names that ``codec=`` accepts, sorted.

    Example:
        >>> "minmax_uint8" in available()
        True
    """
    return tuple(sorted(_file_stems()))


def get(name: str) -> Codec:
    """The codec that is registered under ``name``.

    Raises:
        InvalidArgument: unknown name; the message lists the known ones.
    """
    if name not in _codecs:
        if name not in _file_stems():
            raise InvalidArgument(f"unknown codec {name!r}; available: {', '.join(available())}")
        importlib.import_module(f"{_PACKAGE}.{name}")
        if name not in _codecs:
            raise InternalError(f"bagua/codecs/{name}.py registers no codec")
    return _codecs[name]


def _file_stems() -> list[str]:
    path = importlib.import_module(_PACKAGE).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.name not in _NOT_PLUGINS]
