"""The registry of codecs. Each file of this folder is one codec, found by its stem; there is no list."""

from __future__ import annotations

import importlib
import pkgutil

from bagua import _C
from bagua.codecs.base import Codec
from bagua.errors import InternalError, InvalidArgument

_PACKAGE = "bagua.codecs"
_NOT_PLUGINS = ("base", "registry")
_classes: dict[str, type[Codec]] = {}
_codecs: dict[str, Codec] = {}  # by spec, as the caller spelt it


def register(cls: type[Codec]) -> type[Codec]:
    """Registers a codec class under the stem of its file; a class decorator."""
    cls.name = cls.__module__.rpartition(".")[2]
    _classes[cls.name] = cls
    return cls


def available() -> tuple[str, ...]:
    """Returns the names that ``codec=`` accepts, sorted.

    Example:
        >>> "minmax_uint8" in available()
        True
    """
    return tuple(sorted(_file_stems()))


def get(name: str, **options: int) -> Codec:
    """Returns the codec of that name, with options: ``get("qsgd", bits=4)`` or ``get("qsgd:bits=4")``.

    Raises:
        InvalidArgument: an unknown name, option or value (the message lists the known ones), or options in both places.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"codec {name!r} is a {type(name).__name__}, expected one of {', '.join(available())}")
    if options and ":" in name:
        given = ", ".join(f"{option}={value}" for option, value in options.items())
        raise InvalidArgument(f"codec {name!r} has options in its name and {given} beside it; give them in one way")
    spec = ":".join([name, ",".join(f"{option}={value}" for option, value in options.items())]) if options else name
    if spec not in _codecs:
        stem = spec.partition(":")[0]
        if stem not in available():
            raise InvalidArgument(f"unknown codec {stem!r}; available: {', '.join(available())}")
        _C.codec_block_numel(spec)  # raises for unknown options
        cls = _class_of(stem)
        given = [one.split("=") for one in spec.partition(":")[2].split(",") if one]
        _codecs[spec] = cls(**{option: int(value) for option, value in given})
    return _codecs[spec]


def _class_of(name: str) -> type[Codec]:
    if name not in _classes:
        importlib.import_module(f"{_PACKAGE}.{name}")
        if name not in _classes:
            raise InternalError(f"bagua/codecs/{name}.py registers no codec")
    return _classes[name]


def _file_stems() -> list[str]:
    path = importlib.import_module(_PACKAGE).__path__
    return [module.name for module in pkgutil.iter_modules(path) if module.name not in _NOT_PLUGINS]
