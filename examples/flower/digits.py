"""Runs FedSGD's gradient and FedAvg on Flower, on digits at four clients, and compares them with one process.

    python examples/flower/digits.py     # needs pip install 'bagua[examples,flower]' 'flwr[simulation]'

It runs in Flower's simulation, where each client is a node. This folder is a Flower app, too, which `flwr run` runs
where a SuperLink and SuperNodes are: docs/federated.md has the commands. Each line compares Flower's result with that
of the program in one process; the last one is JSON.
"""

from __future__ import annotations

import json
import time

import torch
from sklearn.datasets import load_digits
from torch.func import functional_call, grad

from bagua import federated
from bagua.federated import flower

CLIENTS, LOCAL_STEPS, ROUNDS = 4, 5, 5


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Loads images (clients, N, 64) and labels (clients, N); each client has every fourth image."""
    images, labels = load_digits(return_X_y=True)
    each = len(labels) // CLIENTS * CLIENTS
    images = torch.tensor(images[:each], dtype=torch.float32) / 16
    labels = torch.tensor(labels[:each])
    return images.reshape(-1, CLIENTS, 64).transpose(0, 1).contiguous(), labels.reshape(-1, CLIENTS).T.contiguous()


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def loss_of(parameters, images, labels):
    return torch.nn.functional.cross_entropy(functional_call(model, parameters, images), labels)


@federated.program(clients=CLIENTS)
def loss(parameters, images, labels):
    """Returns the mean loss over clients, whose gradient is that of FedSGD."""
    sent = federated.broadcast(parameters)
    return federated.reduce_mean(federated.map_fn(loss_of, (sent, images, labels)))


def train(parameters, images, labels):
    """Runs some steps of gradient descent at a client."""
    for _ in range(LOCAL_STEPS):
        slopes = grad(loss_of)(parameters, images, labels)
        parameters = {name: value - 0.5 * slopes[name] for name, value in parameters.items()}
    return parameters


@federated.program(clients=CLIENTS)
def fedavg(parameters, images, labels):
    """Runs a round of FedAvg."""
    sent = federated.broadcast(parameters)
    return federated.reduce_mean(federated.map_fn(train, (sent, images, labels)))


def data_of(context) -> dict[str, torch.Tensor]:
    """Returns the images of a node."""
    images, labels = load_data()
    mine = context.node_config["partition-id"]
    return {"images": images[mine], "labels": labels[mine]}


def difference(found, expected) -> float:
    if isinstance(found, torch.Tensor):
        return float((found - expected).abs().max())
    return max(difference(found[name], expected[name]) for name in expected)


def serve(platform: federated.Platform) -> None:
    """Computes all of it at the clients, and compares."""
    images, labels = load_data()
    graphs = {
        "value": federated.trace(loss, start, images, labels),
        "gradient": federated.trace(grad(loss), start, images, labels),
        "round": federated.trace(fedavg, start, images, labels),
    }
    began = time.perf_counter()
    found: dict = {"model": start}
    found["value"] = federated.run_on(platform, graphs["value"], parameters=start)
    found["gradient"] = federated.run_on(platform, graphs["gradient"], parameters=start)
    for _ in range(ROUNDS):
        found["model"] = federated.run_on(platform, graphs["round"], parameters=found["model"])
    seconds = time.perf_counter() - began

    expected = {"value": loss(start, images, labels), "gradient": grad(loss)(start, images, labels), "model": start}
    for _ in range(ROUNDS):
        expected["model"] = fedavg(expected["model"], images, labels)
    # The tolerance is half a step for each client's part of a mean, and the rounding of float32 sums.
    tolerance = ROUNDS * (federated.FixedPoint().tolerance(CLIENTS) + 1e-6)
    differences = {name: difference(found[name], expected[name]) for name in expected}
    for name, one in differences.items():
        print(f"{name:9} differs by {one:.1e} at most")
        assert one <= tolerance, f"{name} on Flower differs by {one}, expected at most {tolerance}"
    for name in ("value", "gradient", "round"):
        print(f"{name:9} {federated.cost_of(graphs[name])}".splitlines()[0])
    trained = float(loss(found["model"], images, labels))
    print(json.dumps({"loss": [round(float(found["value"]), 4), round(trained, 4)], "seconds": round(seconds, 1)}))


server = flower.server_app(serve, CLIENTS)
client = flower.client_app(data_of)

if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, CLIENTS)
