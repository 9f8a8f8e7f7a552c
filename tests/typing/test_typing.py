"""The public interface is typed: every function says what it takes and returns, and a type checker sees it so."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import bagua

ROOT = Path(__file__).resolve().parents[2]
SPECIAL = {"__init__", "__call__", "__enter__", "__exit__", "__len__", "__iter__", "__getitem__"}


def unannotated(body, prefix=""):
    """(name, what has no annotation) of the public functions and methods."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from unannotated(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.startswith("_") and node.name not in SPECIAL:
                continue
            arguments = node.args
            taken = [*arguments.posonlyargs, *arguments.args]
            is_static = any(ast.unparse(one) == "staticmethod" for one in node.decorator_list)
            if prefix and not is_static:
                del taken[0]
            taken += [*arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
            missing = [one.arg for one in taken if one.annotation is None]
            if node.returns is None and node.name != "__init__":
                missing.append("return")
            if missing:
                yield f"{prefix}{node.name}", missing


def test_public_functions_are_annotated():
    files = [
        path for path in (ROOT / "bagua").rglob("*.py") if not path.stem.startswith("_") or path.stem == "__init__"
    ]
    assert len(files) > 50
    found = {f"{path.relative_to(ROOT)}: {name}": what for path in files for name, what in unannotated(tree(path))}
    assert not found


def tree(path):
    return ast.parse(path.read_text()).body


def test_what_has_no_annotation_is_found():
    text = """
        def f(x, *, y: int, **z) -> int: ...
        def g(x: int): ...
        def _private(x): ...
        class A:
            def method(self, x): ...
            @staticmethod
            def static(x) -> None: ...
            def good(self, x: int) -> None: ...
        """
    lines = [line[8:] for line in text.splitlines()]
    assert dict(unannotated(ast.parse("\n".join(lines)).body)) == {
        "f": ["x", "z"],
        "g": ["return"],
        "A.method": ["x", "return"],
        "A.static": ["x"],
    }


@pytest.mark.slow("test_public_functions_are_annotated")
@pytest.mark.needs("mypy")
@pytest.mark.timeout(400)
def test_a_type_checker_sees_the_public_names(tmp_path):
    """A program as a user writes it, and one that uses every name of bagua.__all__ and one that is none."""
    names = tmp_path / "names.py"
    uses = [f"name_{number} = bagua.{name}" for number, name in enumerate(bagua.__all__)]
    names.write_text("\n".join(["import bagua", *uses, "none = bagua.with_bagu  # type: ignore[attr-defined]", ""]))
    options = ["--strict", "--follow-imports=silent", "--cache-dir", str(ROOT / "build/mypy")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "tests/typing/program.py", str(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
