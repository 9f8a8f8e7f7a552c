"""The launch files start ranks that find each other, and examples/preemption.py goes on where it was stopped."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bagua.testing import Pool, spawn
from tests.examples.test_examples import run_as_a_rank

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "examples/quick_start.py"
# The programs of Slurm that the script needs, for one node.
FAKES = {"scontrol": "echo localhost", "srun": 'shift\nexec "$@"'}
OF_SLURM = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
# By launch file: the module of its launcher, and the variables that it reads.
FILES = {"torchrun.sh": ("torch.distributed.run", {"PORT": "0"}), "slurm.sh": ("bagua.cli", OF_SLURM)}


@pytest.fixture
def environ(tmp_path):
    """An environment in which `bagua`, `python` and Slurm's programs are found first."""
    programs = {
        **FAKES,
        "python": f'exec {sys.executable} "$@"',
        "bagua": f'exec {sys.executable} -m bagua "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    write_programs(tmp_path, programs)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_programs(folder, programs):
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def launch(file, script, environ, cwd):
    command = ["bash", str(ROOT / "examples/launch" / file), str(script)]
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RECORDS = "import json, os, sys; json.dump((sys.argv[1:], dict(os.environ)), open('launched', 'w'))"
SCRIPT = """
import os
token = os.environ.get("BAGUA_AUTH_TOKEN_FILE", "")
seen = [os.environ[name] for name in ("RANK", "WORLD_SIZE")] + [str(len(token and open(token).read()))]
os.write(1, (" ".join(seen) + "\\n").encode())  # as a whole: the ranks share the file
"""


def run_launcher(rank, world_size, module, arguments):
    """Runs the launcher in a rank, which has imported torch already."""
    return importlib.import_module(module).main(arguments)


@pytest.mark.parametrize("file", FILES)
def test_a_launch_file_starts_two_ranks(file, environ, tmp_path, capfd):
    module, variables = FILES[file]
    records = f'exec {sys.executable} -c "{RECORDS}" "$@"'
    makes_a_token = f'[ "$1" = token ] && exec {sys.executable} -m bagua "$@"\n'
    write_programs(tmp_path, {"torchrun": records, "bagua": makes_a_token + records})
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch(file, script, {**environ, **variables}, tmp_path)
    arguments, seen = json.loads((tmp_path / "launched").read_text())
    assert spawn(run_launcher, 1, args=(module, arguments), env=seen)[0] in (None, 0)
    num_characters = 44 if file == "slurm.sh" else 0
    printed = capfd.readouterr().out.splitlines()
    assert sorted(printed) == [f"{rank} 2 {num_characters}" for rank in range(2)]


def assert_trains(printed):
    assert re.search(r"sum of the weights: rank 0 (\S+)   rank 1 \1", printed), printed


@pytest.mark.slow("test_a_launch_file_starts_two_ranks")
@pytest.mark.parametrize("file", FILES)
def test_the_quick_start_trains_under_a_launch_file(file, environ, tmp_path):
    _, variables = FILES[file]
    assert_trains(launch(file, QUICK_START, {**environ, **variables}, tmp_path))


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun(environ, tmp_path):
    variables = {"MPIRUN_OPTIONS": "--allow-run-as-root --oversubscribe", "PORT": "29631"}
    assert_trains(launch("mpirun.sh", QUICK_START, {**environ, **variables}, tmp_path))


class StopsAtStep0(io.StringIO):
    """The output of a rank, of which rank 1 gets a signal when it prints that its first step is done."""

    def write(self, text):
        if "rank 1: step 0" in text:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().write(text)


def weights(printed):
    return {float(value) for value in re.findall(r"sum of the weights (\S+)", printed)}


def test_preemption(tmp_path):
    script = ROOT / "examples" / "preemption.py"

    def train(folder, output=io.StringIO):
        options = ["--checkpoint", str(tmp_path / folder), "--num-steps", "20"]
        return "".join(pool.run(run_as_a_rank, args=(script, options, output)))

    with Pool(2) as pool:
        whole, stopped, resumed = train("whole"), train("stopped", StopsAtStep0), train("stopped")
    assert len(re.findall("saved behind step 2", stopped)) == 2, stopped
    assert len(re.findall("goes on at step 3", resumed)) == 2, resumed
    assert weights(resumed) == weights(whole) and len(weights(whole)) == 1
