"""Recording the timeline stays cheap enough to be always on."""

import subprocess
import sys

import pytest


@pytest.mark.timed
@pytest.mark.slow("nothing: it measures for half a minute")
def test_recording_takes_less_than_a_hundredth_of_a_step(tmp_path):
    command = [sys.executable, "-m", "benchmarks.training.timeline_cost", "--quick", "--out", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("below the limit of 1%") == 2 and "NOT below" not in run.stdout
