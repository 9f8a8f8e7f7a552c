"""The federated examples show what they claim, and compute the same on two ranks as in one process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest
import torch

from tests.examples.test_examples import ROOT, run, run_as_a_rank

FOLDER = ROOT / "examples" / "federated"
ALL = {
    "fedsgd": ("digits.py", "--algorithm", "fedsgd"),
    "fedavg": ("digits.py", "--algorithm", "fedavg"),
    "fedprox": ("digits.py", "--algorithm", "fedprox"),
    "scaffold": ("digits.py", "--algorithm", "scaffold"),
    "local_adam": ("digits.py", "--algorithm", "local_adam"),
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


# ---- what clients keep


ROUNDS, STEPS, SEED = 5, 3, 7


def random_digits(example):
    generator = torch.Generator().manual_seed(SEED)
    shape = (example["CLIENTS"], 8)
    return example["Digits"](
        torch.rand(*shape, 64, generator=generator),
        torch.randint(10, shape, generator=generator),
        torch.arange(8) < torch.randint(3, 9, shape[:1], generator=generator)[:, None],
    )


def gradient_in_a_loop(example, model, digits, client, draw):
    rows = (draw * int(digits.mask[client].sum())).long()
    leaves = [leaf.detach().requires_grad_() for leaf in model.values()]
    loss = example["loss_of"](
        dict(zip(model, leaves, strict=True)), digits.images[client][rows], digits.labels[client][rows]
    )
    return dict(zip(model, torch.autograd.grad(loss, leaves), strict=True))


def scaffold_in_a_loop(example, x, digits, rounds):
    """Algorithm 1 of Karimireddy et al. with option II and a global step of 1."""
    rate = example["RATE"]
    c = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
    own = dict.fromkeys(range(example["CLIENTS"]), c)
    for cohort, draws in rounds:
        steps, changes = [], []
        for client, of_client in zip(cohort, draws, strict=True):
            y = x
            for draw in of_client:
                g = gradient_in_a_loop(example, y, digits, client, draw)
                y = {name: y[name] - rate * (g[name] - own[client][name] + c[name]) for name in y}
            after = {name: own[client][name] - c[name] + (x[name] - y[name]) / (STEPS * rate) for name in x}
            steps.append({name: y[name] - x[name] for name in x})
            changes.append({name: after[name] - own[client][name] for name in x})
            own[client] = after
        x = {name: x[name] + sum(step[name] for step in steps) / len(cohort) for name in x}
        c = {name: c[name] + sum(change[name] for change in changes) / example["CLIENTS"] for name in x}
    return x, c


def local_adam_in_a_loop(example, x, digits, rounds):
    """Each client has one torch.optim.Adam for all of its rounds."""
    local, kept = example["LOCAL"], {}
    for cohort, draws in rounds:
        total = {name: torch.zeros_like(leaf) for name, leaf in x.items()}
        for client, of_client in zip(cohort, draws, strict=True):
            if client not in kept:
                leaves = {name: torch.empty_like(leaf) for name, leaf in x.items()}
                kept[client] = (
                    leaves,
                    torch.optim.Adam(leaves.values(), local.learning_rate, local.betas, local.epsilon),
                )
            leaves, optimizer = kept[client]
            for name, leaf in leaves.items():
                leaf.copy_(x[name])
            for draw in of_client:
                for name, g in gradient_in_a_loop(example, leaves, digits, client, draw).items():
                    leaves[name].grad = g
                optimizer.step()
            for name, leaf in leaves.items():
                total[name] += leaf * digits.mask[client].sum()
        number = sum(digits.mask[client].sum() for client in cohort)
        x = {name: leaf / number for name, leaf in total.items()}
    return (x,)


def run_and_compare(rank, world_size, algorithm, in_a_loop):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        example = runpy.run_path(str(FOLDER / "digits.py"))
        from clients import loss_of
    with example["ranks"]():
        digits, model = random_digits(example), example["make_model"](SEED)
        simulation = example["simulation_of"](algorithm, model, digits, STEPS, SEED)
        simulation.run(ROUNDS)
        rounds = []
        for number in range(ROUNDS):
            round = simulation.sample(number)
            of_all = round._replace(clients=round.cohort)
            draws = of_all.per_client(lambda g: torch.rand(STEPS, example["BATCH_SIZE"], generator=g))
            rounds.append((round.cohort.tolist(), draws))
    expected = in_a_loop({**example, "loss_of": loss_of}, model, digits, rounds)
    torch.testing.assert_close(simulation.state, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("algorithm", "in_a_loop"), [("scaffold", scaffold_in_a_loop), ("local_adam", local_adam_in_a_loop)]
)
def test_what_clients_keep_is_there_in_their_next_round(pool2, algorithm, in_a_loop):
    """In a loop over clients, in which each round's cohort is another one."""
    pool2.run(run_and_compare, args=(algorithm, in_a_loop))


# ---- the examples


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
    on_ranks = [option for option in options if option != "--isolated"]
    assert_equal_but_for_rounding(json.loads(lines[-1]), run("bagua", f"federated/{script}", *on_ranks))


@pytest.mark.needs("sklearn")
def test_a_claim_that_does_not_hold_is_an_exit_status(pool2):
    options = ["--algorithm", "fedsgd", "--rounds", "1", "--at-least", "0.99"]
    (status, _), _ = pool2.run(run_without_ranks, args=(FOLDER / "digits.py", options))
    assert status == 1
