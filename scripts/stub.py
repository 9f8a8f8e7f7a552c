"""Writes bagua/_C.pyi, the types of the compiled module, from the signatures that pybind11 puts into its docstrings.

    python scripts/stub.py            # after a change in csrc/bindings
    python scripts/stub.py --check    # exit status 1 if the file is not current

Numbers are an int or a float here; pybind11 would accept any object with __index__.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

STUB = Path(__file__).resolve().parents[1] / "bagua/_C.pyi"
WIDTH = 120

HEADER = '''\
"""The types of bagua._C, the compiled core. Written by scripts/stub.py from the module itself."""

import collections.abc
'''

# pybind11's words -> the stub's. A class that is registered after a signature that uses it has its C++ name there.
REWRITTEN = (
    (r"typing\.SupportsInt( \| typing\.SupportsIndex)?", "int"),
    (r"typing\.SupportsFloat( \| typing\.SupportsIndex)?", "float"),
    (r"\bcollections\.abc\.Callable\b(?!\[)", "collections.abc.Callable[..., object]"),
    (r"\bbagua(::|\._C\.)", ""),
)
# The buffer protocol of C, which pybind11 implements without a signature.
WITHOUT_SIGNATURE = {"SharedMemory": ["def __buffer__(self, flags: int, /) -> memoryview: ..."]}


def signature(text: str, name: str) -> ast.FunctionDef:
    """Parses the function with which a docstring begins."""
    line = text.partition("\n")[0]
    for words, ours in REWRITTEN:
        line = re.sub(words, ours, line)
    if "Overloaded function" in text:
        raise SystemExit(f"{name} is overloaded, which scripts/stub.py does not write; bind it under two names")
    line = re.sub(r"^[^(]*", name, line)
    try:
        (function,) = ast.parse(f"def {line}: ...").body
    except SyntaxError as error:
        raise SystemExit(f"{name} has the signature {line!r}, which names a C++ type: bind that type first") from error
    assert isinstance(function, ast.FunctionDef)
    return function


def written_parameters(function: ast.FunctionDef, is_method: bool) -> list[str]:
    """Returns the parameters as in a stub: those without a name in C++ are positional, defaults are `...`."""
    arguments, shown = function.args.args, []
    first_default = len(arguments) - len(function.args.defaults)
    unnamed = 0
    for index, argument in enumerate(arguments):
        annotation = ast.unparse(argument.annotation) if argument.annotation else "object"
        if is_method and index == 0:
            shown.append("self")
            continue
        shown.append(f"{argument.arg}: {annotation}" + (" = ..." if index >= first_default else ""))
        if re.fullmatch(r"arg\d+", argument.arg):
            unnamed = len(shown)
    if unnamed:
        shown.insert(unnamed, "/")
    return shown


def define(function: ast.FunctionDef, is_method: bool, indent: str) -> list[str]:
    """Returns the lines of a definition, broken as the formatter breaks them."""
    shown = written_parameters(function, is_method)
    returned = ast.unparse(function.returns) if function.returns else "object"
    head, tail = f"{indent}def {function.name}(", f") -> {returned}: ..."
    one_line = head + ", ".join(shown) + tail
    if len(one_line) <= WIDTH:
        return [one_line]
    inner = f"{indent}    " + ", ".join(shown)
    if len(inner) <= WIDTH:
        return [head, inner, indent + tail]
    return [head, *(f"{indent}    {one}," for one in shown), indent + tail]


def members(kind: type) -> Iterator[str]:
    """Returns the lines of a class's body."""
    indent = "    "
    for name, member in vars(kind).items():
        if name.startswith("_") and name not in ("__init__", "__repr__"):
            continue
        if isinstance(member, property):
            returned = signature(member.fget.__doc__ or "", name).returns
            yield f"{indent}@property"
            yield f"{indent}def {name}(self) -> {ast.unparse(returned) if returned else 'object'}: ..."
        elif isinstance(member, staticmethod):
            yield f"{indent}@staticmethod"
            yield from define(signature(member.__func__.__doc__ or "", name), False, indent)
        elif isinstance(member, int):
            yield f"{indent}{name}: int"
        elif "(self: " in (member.__doc__ or ""):  # excludes methods that Python gives every class
            yield from define(signature(member.__doc__, name), True, indent)
    for line in WITHOUT_SIGNATURE.get(kind.__name__, []):
        yield indent + line


def type_of(value: object) -> str:
    if isinstance(value, tuple):
        (item,) = {type(one).__name__ for one in value}
        return f"tuple[{item}, ...]"
    return type(value).__name__


def stub(module: ModuleType) -> str:
    """Returns the text of the stub."""
    names = sorted(name for name in vars(module) if not name.startswith("_"))
    classes = [name for name in names if isinstance(getattr(module, name), type)]
    functions = [name for name in names if callable(getattr(module, name)) and name not in classes]
    constants = ["__version__", *(name for name in names if not callable(getattr(module, name)))]
    lines = [*(f"{name}: {type_of(getattr(module, name))}" for name in constants), ""]
    for name in functions:
        lines += define(signature(getattr(module, name).__doc__ or "", name), False, "")
    for name in classes:
        lines += ["", f"class {name}:", *(list(members(getattr(module, name))) or ["    pass"])]
    return HEADER + "\n" + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if the file is another one")
    args = parser.parse_args()
    from bagua import _C

    text = stub(_C)
    if args.check:
        same = STUB.exists() and STUB.read_text() == text
        if not same:
            print(f"{STUB.name} is not what the module has; run python scripts/stub.py", file=sys.stderr)
        return 0 if same else 1
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
