"""bagua/_C.pyi matches the compiled module, from which scripts/stub.py writes it."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from bagua import _C

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("stub", ROOT / "scripts/stub.py")
stub = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stub)


def test_the_stub_is_current():
    assert stub.STUB.read_text() == stub.stub(_C), "run python scripts/stub.py"


def test_every_name_of_the_module_is_there():
    """Classes have all their members, as found by dir(), independently of the script."""
    tree = ast.parse(stub.STUB.read_text())
    there = {getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", None) for node in tree.body}
    assert {name for name in dir(_C) if not name.startswith("_")} <= there
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 5
    for node in classes:
        public = {name for name in dir(getattr(_C, node.name)) if not name.startswith("_")}
        shown = {getattr(one, "name", None) or one.target.id for one in node.body}
        assert public == {name for name in shown if not name.startswith("__")}, node.name


def test_parameters_are_those_that_the_module_takes():
    """A call with keyword arguments fails only at the types: no name is unknown or missing."""
    tree = ast.parse(stub.STUB.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.args.posonlyargs]
    for node in (node for node in functions if node.args.args):
        with pytest.raises(TypeError) as caught:
            getattr(_C, node.name)(**{argument.arg: _C for argument in node.args.args})
        names = re.search(r"^ +1\. \((.*)\) ->", str(caught.value), re.MULTILINE)[1]
        assert re.findall(r"(\w+): ", names) == [argument.arg for argument in node.args.args]


def module(**members):
    made = ModuleType("bagua._C")
    made.__version__ = "1"
    vars(made).update(members)
    return made


def documented(text):
    def function():
        pass

    function.__doc__ = text
    return function


def test_what_is_written():
    text = stub.stub(
        module(
            codes=(1, 2),
            plain=documented("plain(a: typing.SupportsInt | typing.SupportsIndex, b: bool = False) -> bagua._C.Work\n"),
            unnamed=documented("unnamed(arg0: typing.SupportsInt, arg1: collections.abc.Callable) -> None\n\nDoc."),
            early=documented("early() -> list[bagua::Group]\n"),
        )
    )
    assert text == stub.HEADER + inspect.cleandoc("""

        __version__: str
        codes: tuple[int, ...]

        def early() -> list[Group]: ...
        def plain(a: int, b: bool = ...) -> Work: ...
        def unnamed(arg0: int, arg1: collections.abc.Callable[..., object], /) -> None: ...
        """).join(("\n", "\n"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f(a: std::vector<int>) -> None", "f has the signature .* names a C\\+\\+ type: bind that type first"),
        ("f(*args, **kwargs)\nOverloaded function.\n\n1. f() -> None", "f is overloaded"),
    ],
)
def test_what_cannot_be_written(text, message):
    with pytest.raises(SystemExit, match=message):
        stub.stub(module(f=documented(text)))
