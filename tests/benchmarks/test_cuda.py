"""The benchmarks of GPUs run on the emulated device, and write nothing then."""

import contextlib
import io
import runpy
import subprocess
import sys

import pytest

import tests.emulated_device as emulated
from bagua.testing import spawn
from benchmarks.lib import report

SCRIPTS = {
    "kernels": ["--sizes", "64000", "--rotated", "200000", "--codecs", "minmax_uint8", "topk"],
    "gpu_step": ["--tiny", "--batch", "2"],
    "one_gpu": ["--sizes", "64000", "--ranks", "2"],
}
TITLES = {"kernels": "0.064 MB of float32", "gpu_step": "GPT, tiny", "one_gpu": "2 ranks on one GPU"}


def run(script, options, folder):
    command = [sys.executable, "-m", f"benchmarks.cuda.{script}", "--quick", "--out", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=report.ROOT, check=False)


def run_as_a_rank(rank, world_size, script, folder):
    """Returns the exit status and the output of a script, run in a process that has already imported torch."""
    sys.argv = [script, "--quick", "--out", str(folder)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.cuda.{script}", run_name="__main__")
    return ended.value.code, printed.getvalue()


@pytest.mark.slow("test_they_have_no_results_without_a_gpu")
@pytest.mark.parametrize("script", SCRIPTS)
def test_they_run(script, tmp_path):
    reason = emulated.unavailable()
    if reason is not None:
        pytest.skip(reason)
    emulated.build()
    done = run(script, ["--device", "emulated", *SCRIPTS[script]], tmp_path)
    # The target for the cost of wrapping is missed there, because a step of few layers takes no time.
    assert done.returncode == 0 or (script == "gpu_step" and "\nMissed, " in done.stdout), done.stdout + done.stderr
    assert f"### {TITLES[script]}" in done.stdout and "not written: the device is emulated" in done.stdout
    assert not list(tmp_path.iterdir())


def test_they_have_no_results_without_a_gpu(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ((status, printed),) = spawn(run_as_a_rank, 1, args=("kernels", tmp_path))
    assert status == report.SKIPPED and printed.endswith("kernels.py SKIPPED: torch sees no CUDA device.\n")
    assert not list(tmp_path.iterdir())
