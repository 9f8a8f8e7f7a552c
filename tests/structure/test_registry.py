"""The registries match the files of their folders, under one stem everywhere; there are no lists."""

import ast
from pathlib import Path

import pytest

import bagua
from bagua import _C

ROOT = Path(__file__).resolve().parents[2]
NO_PLUGINS = {"base", "registry"}


def stems(folder, suffix=".py"):
    return {path.stem for path in (ROOT / folder).glob(f"[!_]*{suffix}")} - NO_PLUGINS


def class_names(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}


def test_algorithms_are_the_files():
    assert set(bagua.algorithms.available()) == stems("bagua/algorithms")


def test_codecs_are_the_files():
    assert set(bagua.codecs.available()) == stems("bagua/codecs")


def test_codecs_are_the_files_of_the_core():
    assert set(_C.registered_codecs()) == stems("csrc/codecs", ".cc") == stems("bagua/codecs")


@pytest.mark.parametrize("folder", ["algorithms", "codecs"])
def test_every_plugin_defines_the_class_of_its_name(folder):
    for stem in stems(f"bagua/{folder}"):
        classes = {name.lower() for name in class_names(ROOT / f"bagua/{folder}/{stem}.py")}
        assert stem.replace("_", "") in classes, f"bagua/{folder}/{stem}.py defines {classes or 'no class'}"


@pytest.mark.parametrize("name", bagua.algorithms.available())
def test_every_algorithm_has_its_test_and_its_row_in_the_docs(name):
    assert (ROOT / f"tests/algorithms/test_{name}.py").exists()
    assert f"| `{name}`" in (ROOT / "docs/algorithms.md").read_text()


@pytest.mark.parametrize("name", bagua.codecs.available())
def test_every_codec_has_its_row_in_the_docs(name):
    assert f"| `{name}`" in (ROOT / "docs/algorithms.md").read_text()


def test_every_cpp_collective_and_kernel_test_is_compiled():
    """The build globs; a test file with another name would never run."""
    for path in (ROOT / "csrc/tests").glob("*.cc"):
        is_shared = path.stem == "emulated_cuda"  # by tests
        is_run = path.stem.startswith(("test_", "bench_"))
        assert is_shared or is_run, f"{path.name} is neither test_*.cc nor bench_*.cc"


def test_every_python_test_file_is_collected():
    """pytest collects test_*.py; a file with test functions by another name would never run."""
    for path in (ROOT / "tests").rglob("*.py"):
        if path.stem.startswith("test_"):
            continue
        tests = [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        assert not tests, f"{path} holds {tests} but is not named test_*.py"
