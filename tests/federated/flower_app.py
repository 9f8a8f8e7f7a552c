"""A Flower app of the tests: a round of FedAvg, whose server notes what it got and what travelled."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch.func import grad

from bagua import federated
from bagua.federated import aggregators, flower

NUM_CLIENTS, THRESHOLD, LOCAL_STEPS = 4, 3, 3
CODING = federated.FixedPoint(bits=48, fraction_bits=24)
MODEL = {"weight": torch.tensor([0.5, -1.0, 0.25]), "bias": torch.tensor(0.125)}
INPUTS = torch.arange(float(NUM_CLIENTS * 5 * 3)).view(NUM_CLIENTS, 5, 3).sin()
ANSWERS = torch.arange(float(NUM_CLIENTS * 5)).view(NUM_CLIENTS, 5).cos()
TIMEOUT_SECONDS = 300
KILLED, KILLED_BEFORE = 2, 2  # the client, and the exchange in which it would send its masked values


def loss(model, inputs, answers):
    return ((inputs * model["weight"]).sum(-1) + model["bias"] - answers).square().mean()


def train(model, inputs, answers):
    """Some steps of gradient descent at a client."""
    for _ in range(LOCAL_STEPS):
        slopes = grad(loss)(model, inputs, answers)
        model = {name: value - 0.1 * slopes[name] for name, value in model.items()}
    return model


@federated.program(clients=NUM_CLIENTS)
def fedavg(model, inputs, answers):
    """The sum of the clients' models, of which FedAvg takes the mean: in fixed point, as run_on has it."""
    total = aggregators.Aggregator(aggregators.SecureSum(CODING.bits, CODING.fraction_bits))
    trained = federated.map_fn(train, (federated.broadcast(model), inputs, answers))
    return total(trained, total.init(model))[0]


def graph():
    return federated.trace(fedavg, MODEL, INPUTS, ANSWERS)


class Counting(federated.Platform):
    """Counts bytes and seconds of another platform's exchanges. ``before`` is called with the number of each."""

    def __init__(self, platform, before=lambda number: None):
        self.platform, self.before = platform, before
        self.down, self.up, self.seconds = [], [], []

    @property
    def num_clients(self):
        return self.platform.num_clients

    def begin(self, enough):
        self.platform.begin(enough)

    def exchange(self, request):
        self.before(len(self.down))
        began = time.monotonic()
        replies = self.platform.exchange(request)
        self.seconds.append(time.monotonic() - began)
        self.down.append(len(request))
        self.up.append(sorted(map(len, replies)))
        return replies


def server(folder):
    """Runs a round, then one in which a SuperNode is killed, whose process group is in the folder."""

    def kill(number):
        if number == KILLED_BEFORE:
            os.killpg(int(Path(folder, "killed").read_text()), signal.SIGKILL)

    def serve(platform):
        def found(counting, **options):
            total = federated.run_on(counting, graph(), coding=CODING, model=MODEL, **options)
            return {"total": total, "down": counting.down, "up": counting.up, "seconds": counting.seconds}

        of_all = found(Counting(platform))
        without_one = found(Counting(platform, kill), threshold=THRESHOLD)
        torch.save((of_all, without_one), Path(folder, "unfinished"))
        Path(folder, "unfinished").rename(Path(folder, "found"))

    return flower.server_app(serve, NUM_CLIENTS, timeout=TIMEOUT_SECONDS)


def client():
    def data_of(context):
        mine = context.node_config["partition-id"]
        return {"inputs": INPUTS[mine], "answers": ANSWERS[mine]}

    return flower.client_app(data_of)
