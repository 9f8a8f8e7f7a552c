"""Names to algorithms. An algorithm is one file of this folder, found by its file stem; there is no list.

What several algorithms share lies in files whose names begin with an underscore, which are none themselves.

Code outside the package registers a class with the same decorator, under the class's own ``name``. An installed package
declares its algorithms as entry points of the group ``bagua.algorithms``, ``name = "module:Class"`` or
``name = "module"``; they are listed at once and imported when they are asked for. Two claims to one name are an error
of whoever asks for that name; neither wins. Once a name has been given out, what is installed is not read again for it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bagua.algorithms.base import Algorithm
from bagua.errors import InternalError, InvalidArgument

_PACKAGE = "bagua.algorithms"
_NOT_PLUGINS = ("base", "registry")
_ENTRY_POINTS = "bagua.algorithms"  # the group
_ALIASES = {"async": "async_averaging"}  # names that stay, though Python cannot import a file of that name
_classes: dict[str, type[Algorithm]] = {}
_loaded: dict[str, str] = {}  # the entry points that have been imported: name to value
_given_out: set[str] = set()  # reading what is installed takes milliseconds, with many packages tens of them


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
    stem = _ALIASES.get(cls.name, cls.name)
    if package != _PACKAGE and stem in _file_stems():
        raise InvalidArgument(
            f"algorithm name {cls.name!r} is already taken by bagua itself (bagua/algorithms/{stem}.py); give "
            f"{cls.__module__}.{cls.__qualname__} another one"
        )
    taken = _classes.get(cls.name)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise InvalidArgument(
            f"algorithm name {cls.name!r} is already taken by {taken.__module__}.{taken.__qualname__}"
        )
    _classes[cls.name] = cls
    return cls


def available() -> tuple[str, ...]:
    """The names that ``with_bagua(..., algorithm=name)`` accepts, sorted; imports none of them.

    Example:
        >>> "gradient_allreduce" in available()
        True
    """
    declared = (entry.name for entry in entry_points(group=_ENTRY_POINTS))
    return tuple(sorted({*_classes, *_file_stems(), *declared}))


def get(name: str) -> type[Algorithm]:
    """The class that is registered under ``name``; imports its file, or its installed package, if nobody has yet.

    Raises:
        InvalidArgument: unknown name, the message lists the known ones; or an installed package declares the name, and
            another one or bagua has it too, or what it declares is no algorithm.
    """
    name = _ALIASES.get(name, name)
    if name not in _given_out or name not in _classes:
        _find(name)
        _given_out.add(name)
    return _classes[name]


def _find(name: str) -> None:
    """Sees to it that ``name`` is in `_classes` and claimed by one alone, or raises InvalidArgument."""
    declared = {_spell(entry): entry for entry in entry_points(group=_ENTRY_POINTS, name=name)}
    if declared:
        _find_declared(name, list(declared.values()))
        return
    if name not in _classes and name in _file_stems():
        importlib.import_module(f"{_PACKAGE}.{name}")
        if name not in _classes:
            raise InternalError(f"bagua/algorithms/{name}.py registers no algorithm {name!r}")
    if name not in _classes:
        raise InvalidArgument(f"unknown algorithm {name!r}; available: {', '.join(available())}")


def class_named(class_name: str) -> type[Algorithm] | None:
    """The algorithm of this package whose class is called so; None: there is none."""
    if class_name.startswith("_"):  # as modules are asked for
        return None
    return next((cls for cls in map(get, _file_stems()) if cls.__name__ == class_name), None)


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
    names = [module.name for module in pkgutil.iter_modules(path)]
    return [name for name in names if name not in _NOT_PLUGINS and not name.startswith("_")]


# ---- entry points of installed packages


def _find_declared(name: str, declared: list[EntryPoint]) -> None:
    first = declared[0]
    if name in _file_stems():
        raise InvalidArgument(f"{_spell(first)} has the name of an algorithm of bagua itself; rename or uninstall it")
    if len(declared) > 1:
        raise InvalidArgument(
            f"algorithm name {name!r} is declared more than once: {'; '.join(map(_spell, declared))}; uninstall all "
            "packages but one, or rename"
        )
    if _loaded.get(name) != first.value:
        _load(first)
        _loaded[name] = first.value


def _load(entry: EntryPoint) -> None:
    """Imports what the entry point names, and sees to it that it is registered under the entry point's name."""
    module_name, _, class_name = (part.strip() for part in entry.value.partition(":"))
    earlier = _classes.get(entry.name)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything
        raise InvalidArgument(
            f"{_spell(entry)}: module {module_name!r} does not import ({type(error).__name__}: {error}); fix the "
            "package or uninstall it"
        ) from error
    if class_name:
        _register_declared(_class_of(entry, module, class_name), entry)
        return
    cls = _classes.get(entry.name)
    if cls is None:
        registered = sorted(name for name, c in _classes.items() if _top(c.__module__) == _top(module_name))
        raise InvalidArgument(
            f"{_spell(entry)}: module {module_name!r} registers {', '.join(map(repr, registered)) or 'no algorithm'}; "
            f"decorate a class with @bagua.algorithms.register and write `name = {entry.name!r}` in its body, or name "
            f'the class in the entry point, "{module_name}:Class"'
        )
    if cls is earlier and _top(cls.__module__) != _top(module_name):
        raise InvalidArgument(
            f"{_spell(entry)} has the name of {cls.__module__}.{cls.__qualname__}, which this program has registered; "
            "rename one of them"
        )


def _class_of(entry: EntryPoint, module: Any, class_name: str) -> type[Algorithm]:
    try:
        cls = functools.reduce(getattr, class_name.split("."), module)
    except AttributeError as error:
        raise InvalidArgument(
            f"{_spell(entry)}: module {module.__name__!r} has no {class_name!r}; name a class of it in the entry point"
        ) from error
    if not isinstance(cls, type):
        raise InvalidArgument(f"{_spell(entry)}: {class_name} is a {type(cls).__name__}; name a class")
    if not issubclass(cls, Algorithm):
        raise InvalidArgument(f"{_spell(entry)}: {class_name} must derive from bagua.algorithms.Algorithm")
    return cls


def _register_declared(cls: type[Algorithm], entry: EntryPoint) -> None:
    name = vars(cls).get("name") or entry.name
    if name != entry.name:
        raise InvalidArgument(
            f"{_spell(entry)}: {cls.__qualname__} calls itself {name!r}; write `name = {entry.name!r}` in its body, or "
            "name the entry point after it"
        )
    try:
        cls.name = name
        register(cls)
    except InvalidArgument as error:
        raise InvalidArgument(f"{_spell(entry)}: {error}") from error


def _spell(entry: EntryPoint) -> str:
    package = entry.dist.name if entry.dist is not None else "?"
    return f"algorithm {entry.name!r} of package {package!r} (entry point {entry.name} = {entry.value})"


def _top(module_name: str) -> str:
    return module_name.partition(".")[0]
