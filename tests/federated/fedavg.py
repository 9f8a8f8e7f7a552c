"""A round of FedAvg that tests run on platforms of other frameworks, and what it gives elsewhere.

Its numbers are the same to the bit in one process, on isolated clients and on ranks with a client each.
"""

from __future__ import annotations

import time

import torch

from bagua import federated
from bagua.federated import aggregators

NUM_CLIENTS, THRESHOLD, LOCAL_STEPS = 4, 3, 3
CODING = federated.FixedPoint(bits=48, fraction_bits=24)
MODEL = {"weight": torch.tensor([0.5, -1.0, 0.25]), "bias": torch.tensor(0.125)}
INPUTS = torch.arange(float(NUM_CLIENTS * 5 * 3)).view(NUM_CLIENTS, 5, 3).sin()
ANSWERS = torch.arange(float(NUM_CLIENTS * 5)).view(NUM_CLIENTS, 5).cos()


def loss(model, inputs, answers):
    return ((inputs * model["weight"]).sum(-1) + model["bias"] - answers).square().mean()


def train(model, inputs, answers):
    """Some steps of an optimizer of torch at a client, which has this function installed."""
    model = {name: value.clone().requires_grad_() for name, value in model.items()}
    optimizer = torch.optim.SGD(model.values(), lr=0.1, momentum=0.9)
    for _ in range(LOCAL_STEPS):
        optimizer.zero_grad()
        loss(model, inputs, answers).backward()
        optimizer.step()
    return model


FUNCTIONS = {"train": train}


@federated.program(clients=NUM_CLIENTS)
def program(model, inputs, answers):
    """The sum of the clients' models, of which FedAvg takes the mean: in fixed point, as run_on has it."""
    total = aggregators.Aggregator(aggregators.SecureSum(CODING.bits, CODING.fraction_bits))
    trained = federated.map_fn(train, (federated.broadcast(model), inputs, answers), vectorize=False)
    return total(trained, total.init(model))[0]


GRAPH = federated.trace(program, MODEL, INPUTS, ANSWERS)


def data_of(client):
    return {"inputs": INPUTS[client], "answers": ANSWERS[client]}


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


def run_on(platform, before=lambda number: None, **options):
    """Returns the total, and what travelled for it."""
    counting = Counting(platform, before)
    total = federated.run_on(counting, GRAPH, coding=CODING, model=MODEL, **options)
    return {"total": total, "down": counting.down, "up": counting.up, "seconds": counting.seconds}


def on_isolated_clients():
    clients = [federated.Client(FUNCTIONS, **data_of(client)) for client in range(NUM_CLIENTS)]
    return run_on(federated.IsolatedClients(clients))["total"]


def on_a_rank(rank, world_size):
    """Runs the program on ranks, each with one client's rows."""
    import bagua

    bagua.init_process_group()
    mine = slice(rank, rank + 1)
    total = program(MODEL, INPUTS[mine], ANSWERS[mine])
    bagua.destroy_process_group()
    return total


def check_same_bits(total, expected):
    assert total.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(total[name], value), (name, total[name], value)


def check_cost(found):
    """What travelled is what cost_of says, to the byte."""
    cost = federated.cost_of(GRAPH, coding=CODING)
    assert (sum(found["down"]), sum(one[-1] for one in found["up"])) == (sum(cost.bytes_down), sum(cost.bytes_up))
    assert [len(one) for one in found["up"]] == [NUM_CLIENTS] * 2


def check_against_a_loop(total, clients):
    """The sum of the models of some clients, from which that of the codes differs by their steps."""
    trained = [train(MODEL, INPUTS[client], ANSWERS[client]) for client in clients]
    for name, value in total.items():
        expected = sum(one[name].detach().double() for one in trained)
        assert float((value - expected).abs().max()) < CODING.tolerance(len(trained)) + 1e-6
