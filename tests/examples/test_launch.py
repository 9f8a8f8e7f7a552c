"""The launch files start ranks that find each other, and examples/preemption.py goes on where it was stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK_START = ROOT / "examples/quick_start.py"
# The programs of Slurm that the script needs, for one node.
FAKES = {"scontrol": "echo localhost", "srun": 'shift\nexec "$@"'}


@pytest.fixture
def environ(tmp_path):
    """An environment in which `bagua`, `python` and Slurm's programs are found first."""
    programs = {
        **FAKES,
        "python": f'exec {sys.executable} "$@"',
        "bagua": f'exec {sys.executable} -m bagua "$@"',
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def launch(script, environ, cwd):
    command = ["bash", str(ROOT / "examples/launch" / script), str(QUICK_START)]
    done = subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"sum of the weights: rank 0 (\S+)   rank 1 \1", done.stdout), done.stdout


def test_torchrun(environ, tmp_path):
    launch("torchrun.sh", {**environ, "PORT": "0"}, tmp_path)


def test_slurm(environ, tmp_path):
    of_slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
    launch("slurm.sh", {**environ, **of_slurm}, tmp_path)
    assert len(Path(tmp_path / "bagua-7.token").read_text().strip()) > 20


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_mpirun(environ, tmp_path):
    launch("mpirun.sh", {**environ, "MPIRUN_OPTIONS": "--allow-run-as-root --oversubscribe", "PORT": "29631"}, tmp_path)


def train(environ, folder, *options, num_ranks=2):
    command = ["bagua", "run", "--nproc-per-node", str(num_ranks), str(ROOT / "examples/preemption.py")]
    return subprocess.Popen(
        [*command, "--checkpoint", folder, *options],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(output):
    return {float(value) for value in re.findall(r"sum of the weights (\S+)", output)}


def test_preemption(environ, tmp_path):
    whole = train(environ, str(tmp_path / "whole")).communicate(timeout=60)[0]
    folder = tmp_path / "stopped"
    first = train(environ, str(folder), "--seconds-per-step", "0.05")
    begun = set()
    while len(begun) < 2:  # ranks that can be asked by now
        begun |= set(re.findall(r"rank (\d): step", first.stdout.readline()))
    first.send_signal(signal.SIGUSR1)
    stopped = first.communicate(timeout=60)[0]
    assert len(re.findall("saved behind step", stopped)) == 2, stopped
    resumed = train(environ, str(folder)).communicate(timeout=60)[0]
    assert len(re.findall("goes on at step", resumed)) == 2, resumed
    assert weights(resumed) == weights(whole) and len(weights(whole)) == 1
