"""Runs one round function in three places: in this process, on ranks that are clients, and on clients elsewhere.

    python examples/federated/three_places.py                           # four clients in this process
    bagua run --nproc-per-node 4 examples/federated/three_places.py     # each rank is a client
    python examples/federated/three_places.py --isolated                # messages, with masked sums

A client trains a convolutional network with batch norm, 1.1 million parameters, by torch.optim.AdamW, as any PyTorch
program does. Clients elsewhere get no code: they have installed ``train``, which the traced program names. The last
line, with a digest of the model, is the same in all places. Exit status 1 unless the model learns.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from clients import finish, parser, ranks
from torch import nn
from torch.nn import functional

import bagua
from bagua import federated
from bagua.federated import sampling
from bagua.federated.aggregators import Aggregator, Mean, SecureSum

CLIENTS, ROUNDS, BATCH_SIZE, SEED = 4, 3, 32, 0
# It takes as many bytes as float32, and its sums do not depend on their order.
CODING = federated.FixedPoint(bits=32, fraction_bits=20)
AVERAGE = Aggregator(SecureSum(CODING.bits, CODING.fraction_bits), Mean())

Model = dict[str, torch.Tensor]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 128, 3, padding=1, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def train(model: Model, round: torch.Tensor, client: torch.Tensor, images: torch.Tensor, labels: torch.Tensor) -> Any:
    """Trains for an epoch at one client; returns the model, as floats, and its mean loss."""
    net = network()
    net.load_state_dict(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    order = torch.randperm(len(labels), generator=sampling.generator_of(SEED, int(round), int(client)))
    losses = []
    for batch in order.split(BATCH_SIZE):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {name: leaf.float() for name, leaf in net.state_dict().items()}, torch.stack(losses).mean()


@federated.program(clients=CLIENTS)
def one_round(model: Model, round: torch.Tensor, client: torch.Tensor, images: torch.Tensor, labels: torch.Tensor):
    """Returns the mean of the clients' models and of their losses."""
    sent = federated.broadcast((model, round))
    trained = federated.map_fn(train, (*sent, client, images, labels), vectorize=False)
    return AVERAGE(trained, AVERAGE.init(trained))[0]


def load_data() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Loads what all clients have, ``[clients, ...]``, and the images and labels of the test."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    each = 360
    placed = {
        "client": torch.arange(CLIENTS),
        "images": images[: CLIENTS * each].view(CLIENTS, each, 64),
        "labels": labels[: CLIENTS * each].view(CLIENTS, each),
    }
    return placed, images[CLIENTS * each :], labels[CLIENTS * each :]


def initial() -> Model:
    torch.manual_seed(SEED)
    return {name: leaf.float() for name, leaf in network().state_dict().items()}


def traced() -> federated.Graph:
    """The round as a graph, for clients elsewhere; it needs shapes of data only."""
    placed, *_ = load_data()
    mine = [leaf[federated.local_slice(CLIENTS)] for leaf in placed.values()]
    return federated.trace(one_round, initial(), torch.tensor(0), *mine)


def train_on(platform: federated.Platform) -> tuple[Model, torch.Tensor]:
    """Trains on clients elsewhere."""
    graph, model, loss = traced(), initial(), torch.zeros(())
    for number in range(ROUNDS):
        model, loss = federated.run_on(platform, graph, coding=CODING, model=model, round=torch.tensor(number))
    return model, loss


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--isolated", action="store_true", help="clients that get bytes only")
    args = options.parse_args()
    with ranks() as say:
        placed, images, labels = load_data()
        model, loss = initial(), torch.zeros(())
        if args.isolated:
            rows = [{name: leaf[client] for name, leaf in placed.items()} for client in range(CLIENTS)]
            clients = [federated.Client({"train": train}, **row) for row in rows]
            model, loss = train_on(federated.IsolatedClients(clients))
        else:
            own = federated.local_slice(CLIENTS)
            for number in range(ROUNDS):
                mine = [leaf[own] for leaf in placed.values()]
                model, loss = one_round(model, torch.tensor(number), *mine)
        net = network().eval()
        net.load_state_dict(model)
        accuracy = (net(images).argmax(1) == labels).float().mean().item()
        num_ranks = bagua.get_world_size() if bagua.is_initialized() else 1
        say(f"{CLIENTS} clients{', isolated,' if args.isolated else ''} on {num_ranks} ranks, {ROUNDS} rounds")
        digest = hashlib.sha256(b"".join(leaf.numpy().tobytes() for leaf in model.values())).hexdigest()[:16]
        values = {"loss": float(loss), "accuracy": accuracy, "model": digest}
        finish(say, f"test accuracy {accuracy:.3f}", holds=accuracy > 0.85, **values)


if __name__ == "__main__":
    main()
