"""Shared code of the federated examples: set-up, digits at clients, a small model, and training at one client.

The digits are scikit-learn's, 8 x 8 pixels, 1437 to train and 360 to test. A Dirichlet draw spreads each label unevenly
over the clients, whose tensors are padded to the longest client's. Random draws depend on seed and client alone, so a
run on several ranks computes the same as a run in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import bagua
from bagua import federated
from bagua.federated import metrics, partition, sampling

CLIENTS = 20
ALPHA = 0.3  # of the Dirichlet draw: a client has most of its digits of two to four labels
BATCH_SIZE = 16

Model = dict[str, torch.Tensor]


# ---- set-up


def parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all examples have."""
    made = argparse.ArgumentParser(description=description.splitlines()[0])
    made.add_argument("--seed", type=int, default=0, help="of the data, the model and every draw")
    return made


@contextlib.contextmanager
def ranks() -> Iterator[Callable[[str], None]]:
    """Initialises the ranks of a launcher, or this process alone; yields a function that prints on rank 0."""
    torch.set_num_threads(1)  # one core per rank, and a fixed order of sums
    is_launched = "RANK" in os.environ
    if is_launched:
        bagua.init_process_group()
    is_shown = not is_launched or bagua.get_rank() == 0
    try:
        yield lambda line: print(line, flush=True) if is_shown else None
    finally:
        if is_launched:
            bagua.destroy_process_group()


def finish(say: Callable[[str], None], claim: str, *, holds: bool, **values: Any) -> None:
    """Prints the claim of the example, with its values as JSON; exits with status 1 if it does not hold."""
    say(f"{'shown' if holds else 'NOT shown'}: {claim}")
    say(json.dumps(values))
    if not holds:
        sys.exit(1)


# ---- digits at clients


class Digits(NamedTuple):
    """The digits of one client, or of all (placed), with one more leading axis.

    Attributes:
        images: [longest, 64], 0 to 1.
        labels: [longest].
        mask: [longest], True for rows that are digits; the others are padding.
    """

    images: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor

    def of(self, clients: torch.Tensor | range) -> Digits:
        """Returns the digits of some clients."""
        return Digits(*(leaf[clients] for leaf in self))


def load_digits(seed: int, alpha: float = ALPHA, own: range | None = None) -> tuple[Digits, torch.Tensor, torch.Tensor]:
    """Loads the digits of this rank's clients, and the images and labels of the test, which are the server's.

    Args:
        seed: of the draw.
        alpha: of the Dirichlet draw.
        own: the clients whose digits are loaded, by default those that a program over all of them has here.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
    parts = partition.dirichlet(labels[train], CLIENTS, alpha=alpha, seed=seed)
    train = torch.tensor(train)
    longest = max(len(part) for part in parts)
    own = range(CLIENTS)[federated.local_slice(CLIENTS)] if own is None else own
    placed, mask = partition.padded((images[train], labels[train]), [parts[client] for client in own], length=longest)
    return Digits(*placed, mask), images[test], labels[test]


def draw_batches(seed: int, round: int, steps: int) -> torch.Tensor:
    """Draws the batches of this rank's clients, ``[num_local, steps, BATCH_SIZE]`` numbers from 0 to below 1.

    Each client scales the draws by its number of examples.
    """
    own = range(CLIENTS)[federated.local_slice(CLIENTS)]
    return sampling.per_client(lambda g: torch.rand(steps, BATCH_SIZE, generator=g), own, seed=seed, round=round)


# ---- the model


def make_model(seed: int) -> Model:
    """Returns a model of 64 pixels, 64 hidden units and 10 labels."""
    generator = sampling.generator_of(seed, "model")
    return {
        "in": torch.randn(64, 64, generator=generator) / 8,
        "in_bias": torch.zeros(64),
        "out": torch.randn(64, 10, generator=generator) / 8,
        "out_bias": torch.zeros(10),
    }


def logits_of(model: Model, images: torch.Tensor) -> torch.Tensor:
    hidden = torch.relu(images @ model["in"] + model["in_bias"])
    return hidden @ model["out"] + model["out_bias"]


def loss_of(model: Model, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy."""
    return torch.nn.functional.cross_entropy(logits_of(model, images), labels)


def accuracy_of(model: Model, images: torch.Tensor, labels: torch.Tensor) -> float:
    return float(metrics.result(metrics.accuracy(logits_of(model, images), labels)))


# ---- training at one client


def gradient_of(model: Model, digits: Digits, draw: torch.Tensor) -> Model:
    """Returns the gradient over the batch of a draw."""
    rows = (draw * digits.mask.sum()).long()
    return torch.func.grad(loss_of)(model, digits.images[rows], digits.labels[rows])


def train(
    model: Model,
    digits: Digits,
    draws: torch.Tensor,
    rate: float | torch.Tensor,
    direction: Callable[[Model, Model], Model] = lambda gradient, now: gradient,
) -> Model:
    """Trains a client's model with a step of SGD for each of its batches.

    Args:
        model: the initial model.
        digits: the client's digits.
        draws: the client's draws, from draw_batches.
        rate: the learning rate.
        direction: returns the direction of descent, given the gradient and the model of the step.
    """
    for draw in draws:
        along = direction(gradient_of(model, digits, draw), model)
        model = {name: leaf - rate * along[name] for name, leaf in model.items()}
    return model


@federated.program(clients=CLIENTS)
def fedavg(model: Model, digits: Digits, draws: torch.Tensor, rate: float | torch.Tensor) -> Model:
    """Trains at each client; returns the mean of their models, weighted by their numbers of examples."""
    local = federated.map_fn(train, (federated.broadcast(model), digits, draws, federated.broadcast(rate)))
    return federated.reduce_weighted_mean(local, digits.mask.sum(1))


@federated.program(clients=CLIENTS)
def mean_loss(model: Model, digits: Digits) -> torch.Tensor:
    """Returns the mean loss over all examples of all clients."""

    def of_client(model: Model, digits: Digits) -> metrics.Ratio:
        return metrics.cross_entropy(logits_of(model, digits.images), digits.labels, digits.mask)

    total = federated.map_reduce(of_client, (federated.broadcast(model), digits), reduce="sum", chunk_size=5)
    return metrics.result(total)
