"""A program written for the original project runs under `bagua run`, and learns by each algorithm."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async")


@pytest.mark.slow("test_each_algorithm")
@pytest.mark.needs("sklearn")
def test_digits():
    script = Path(__file__).with_name("digits_original.py")
    command = [sys.executable, "-m", "bagua.run", "--nproc-per-node", "2", str(script), "--epochs", "6"]
    command += ["--algorithms", *ALGORITHMS]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracies = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert tuple(accuracies) == ALGORITHMS
    assert min(accuracies.values()) > 0.8, accuracies
