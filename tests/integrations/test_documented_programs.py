"""The programs of docs/trainers.md, as ranks that a launcher has started, and the examples of docstrings.

Ray's program starts its workers itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import bagua
from bagua.testing import free_port
from tests.structure.test_documented_examples import ALONE, run_doctests

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/trainers.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def programs(section):
    return re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.MULTILINE | re.DOTALL)


def _run(rank, world_size, folder, section):
    os.chdir(folder)
    try:
        for program in programs(section):
            exec(compile(program, f"docs/trainers.md, {section}", "exec"), {"__name__": "__main__"})
        assert bagua.is_initialized()
    finally:
        bagua.destroy_process_group()
        if dist.is_initialized():
            dist.destroy_process_group()
        if section != "Lightning":
            _forget_accelerate()


def _forget_accelerate():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


def _run_doctests(rank, world_size, folder, name):
    """Runs the doctests of a module of bagua.integrations, on each rank as if there were no other."""
    os.environ.update(LOCAL_RANK="0", MASTER_PORT=str(free_port()))
    try:
        return run_doctests(rank, world_size, folder, [f"bagua.integrations.{name}"])
    finally:
        if name == "accelerate":
            _forget_accelerate()


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(section, marks=pytest.mark.needs(section.lower()))
        for section in ("Lightning", "Accelerate", "Transformers")
    ],
)
def test_a_program(pool2, tmp_path, section):
    pool2.run(_run, args=(str(tmp_path), section))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("lightning", "accelerate", "transformers", "ray")],
)
def test_doctests(pool2, tmp_path, name):
    for failures, num_run in pool2.run(_run_doctests, args=(str(tmp_path), name), env=ALONE):
        assert not failures, failures
        assert num_run > 0


@pytest.mark.slow("nothing: Ray starts a cluster")
@pytest.mark.needs("ray", "pyarrow")
@pytest.mark.timeout(400)
def test_the_program_of_ray(tmp_path):
    (program,) = programs("Ray Train")
    (tmp_path / "train.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "train.py"]
    printed = subprocess.run(
        run, cwd=tmp_path, env=environ, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout
    assert "rank 0 loss " in printed and "rank 1 loss " in printed


def test_the_sections_are_those_of_the_table():
    assert re.findall(r"^\| \[([^\]]+)\]\(#", PAGE, re.MULTILINE) == list(SECTIONS)
