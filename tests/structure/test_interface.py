"""The names of `import bagua`: available at once in a program, and on first use in the command's process."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import bagua
from bagua import _public

ROOT = Path(__file__).resolve().parents[2]


def loaded(monkeypatch, argv, orig_argv):
    """Runs bagua/__init__.py once more, as in a process that was started with these arguments."""
    spec = importlib.util.spec_from_file_location("bagua", ROOT / "bagua/__init__.py", submodule_search_locations=[])
    module = importlib.util.module_from_spec(spec)
    module.__path__ = bagua.__path__
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    spec.loader.exec_module(module)
    return module


PYTHON = "/usr/bin/python3"
COMMAND = [
    (["-m"], [PYTHON, "-m", "bagua"]),
    (["-m", "-h"], [PYTHON, "-X", "importtime", "-m", "bagua.run", "-h"]),
    (["-m", "-h"], [PYTHON, "-m", "bagua.cli.doctor", "-h"]),
    (["-m", "run", "train.py"], [PYTHON, "-m", "bagua", "run", "train.py"]),
    (["/venv/bin/bagua", "run", "-h"], [PYTHON, "/venv/bin/bagua", "run", "-h"]),
]
PROGRAM = [
    (["train.py", "--lr", "0.1"], [PYTHON, "train.py", "--lr", "0.1"]),
    ([""], [PYTHON]),
    (["-c", "x"], [PYTHON, "-c", "import bagua", "x"]),
    (["-m", "x"], [PYTHON, "-m", "package.train", "x"]),  # whose package imports bagua
    (["-m"], [PYTHON, "-m", "baguario"]),
    (["-m"], [PYTHON, "-m", "bagua.federated.digits"]),
    (["/venv/bin/bagua"], [PYTHON, "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"]),
    (["/code/bagua/run.py", "bagua"], [PYTHON, "-m", "bagua.run", "bagua"]),  # a child of the command
    ([], [PYTHON]),
]


@pytest.mark.parametrize(("argv", "orig_argv"), COMMAND, ids=str)
def test_the_command_has_the_names_when_they_are_used(monkeypatch, argv, orig_argv):
    module = loaded(monkeypatch, argv, orig_argv)
    assert not set(_public.__all__) & set(vars(module))
    assert {name: getattr(module, name) for name in bagua.__all__} == {
        name: getattr(bagua, name) for name in bagua.__all__
    }
    assert set(bagua.__all__) <= set(dir(module)) and module.errors is bagua.errors
    for name in ("with_bagu", "_private"):
        with pytest.raises(AttributeError, match=f"module 'bagua' has no attribute '{name}'"):
            getattr(module, name)


@pytest.mark.parametrize(("argv", "orig_argv"), PROGRAM, ids=str)
def test_a_program_has_all_names_at_once(monkeypatch, argv, orig_argv):
    """The backend of torch.distributed is registered too."""
    names = vars(loaded(monkeypatch, argv, orig_argv))
    assert set(_public.__all__) <= set(names) and "__getattr__" not in names
    assert names["__all__"] is _public.__all__


def test_the_list_is_what_is_imported():
    """All names imported in bagua/_public.py are public, and none is missing."""
    imports = [node for node in ast.parse(Path(_public.__file__).read_text()).body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.asname or alias.name for node in imports for alias in node.names) == sorted(bagua.__all__)


@pytest.mark.slow("test_a_program_has_all_names_at_once")
@pytest.mark.parametrize(
    "imports", ["import bagua, torch.distributed as dist", "import torch.distributed as dist, bagua"]
)
def test_a_program_can_name_the_backend(imports, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{imports}\n"
        "dist.init_process_group('bagua', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.barrier()\ndist.destroy_process_group()\nprint('done')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "done\n", done.stderr
