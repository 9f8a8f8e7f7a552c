"""The federated examples show what they claim, and compute the same on two ranks as in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.examples.test_examples import ROOT, run, run_as_a_rank

FOLDER = ROOT / "examples" / "federated"
ALL = {
    "fedsgd": ("digits.py", "--algorithm", "fedsgd"),
    "fedavg": ("digits.py", "--algorithm", "fedavg"),
    "fedprox": ("digits.py", "--algorithm", "fedprox"),
    "scaffold": ("digits.py", "--algorithm", "scaffold"),
    "hypergradient": ("hypergradient.py",),
    "client_weights": ("client_weights.py",),
    "personalised": ("personalised.py",),
    "personal_layers": ("personal_layers.py",),
    "diloco": ("diloco.py",),
    "three_places": ("three_places.py",),
    "isolated": ("three_places.py", "--isolated"),
}


def run_without_ranks(rank, world_size, script, options):
    """Runs a script on rank 0 as `python script` does, without the variables of a launcher; returns its exit status."""
    if rank > 0:
        return None
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    try:
        return 0, run_as_a_rank(rank, world_size, script, options)
    except SystemExit as ended:
        return ended.code, ""


def assert_equal_but_for_rounding(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        tolerance = (
            0.02 if "accurac" in name else 5e-5
        )  # accuracies are steps: a digit or two may fall on the other side
        assert other[name] == (value if isinstance(value, str) else pytest.approx(value, rel=tolerance)), name


@pytest.mark.slow("test_a_run_goes_on_bit_for_bit_on_any_number_of_ranks")
@pytest.mark.needs("sklearn")
def test_digits_computes_on_two_ranks_what_it_does_on_one_process(pool2):
    options = ["--algorithm", "scaffold", "--rounds", "4", "--at-least", "0.4"]
    (_, alone), _ = pool2.run(run_without_ranks, args=(FOLDER / "digits.py", options))
    by_first, by_others = pool2.run(run_as_a_rank, args=(FOLDER / "digits.py", options))
    assert not by_others
    results = [json.loads(printed.splitlines()[-1]) for printed in (alone, by_first)]
    assert_equal_but_for_rounding(*results)
    assert results[0]["test_accuracy"] > 0.4


@pytest.mark.needs("sklearn")
def test_personalised_models_are_better_at_their_clients(pool2):
    options = ["--rounds", "5", "--steps", "5"]
    (_, printed), _ = pool2.run(run_without_ranks, args=(FOLDER / "personalised.py", options))
    result = json.loads(printed.splitlines()[-1])
    assert result["accuracy_after"] > result["accuracy_before"] > 0.3
    assert result["digits"] > 300


@pytest.mark.slow("test_digits_computes_on_two_ranks_what_it_does_on_one_process")
@pytest.mark.needs("sklearn", "tqdm")
@pytest.mark.parametrize("name", ALL)
def test_shows_what_it_claims(name):
    """Each says so by its exit status."""
    script, *options = ALL[name]
    command = [sys.executable, str(FOLDER / script), *options]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) <= 12
    assert lines[-2].startswith("shown: ")
    assert_equal_but_for_rounding(json.loads(lines[-1]), run("bagua", f"federated/{script}", *options))


@pytest.mark.needs("sklearn")
def test_a_claim_that_does_not_hold_is_an_exit_status(pool2):
    options = ["--algorithm", "fedsgd", "--rounds", "1", "--at-least", "0.99"]
    (status, _), _ = pool2.run(run_without_ranks, args=(FOLDER / "digits.py", options))
    assert status == 1
