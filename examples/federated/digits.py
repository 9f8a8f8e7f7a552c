"""Runs five federated algorithms on digits whose labels are unevenly spread over 20 clients.

    python examples/federated/digits.py --algorithm scaffold
    bagua run --nproc-per-node 2 examples/federated/digits.py --algorithm scaffold     # the same numbers

fedsgd is torch.func.grad of the loss over all clients, one step per round. fedavg is the mean of models that clients
trained for some steps (McMahan et al., arXiv 1602.05629); fedprox keeps them close to the server's (Li et al., arXiv
1812.06127). In the other two, ten clients take part in a round, and each keeps something until its next one, in a
ClientStore: scaffold corrects its steps by the difference between its gradients and those of all clients (Karimireddy
et al., arXiv 1910.06378), and local_adam steps by an Adam of its own. Exit status 1 if the test accuracy ends below
--at-least.
"""

from __future__ import annotations

from typing import Any

import torch
from clients import (
    BATCH_SIZE,
    CLIENTS,
    Digits,
    Model,
    accuracy_of,
    draw_batches,
    fedavg,
    finish,
    gradient_of,
    load_digits,
    make_model,
    mean_loss,
    parser,
    ranks,
    train,
)

from bagua import federated
from bagua.federated import ClientStore, Simulation, optimizers

SERVER = optimizers.SGD(0.5, momentum=0.9)  # for fedsgd
RATE = 0.1  # learning rate of the clients' steps
COHORT = 10  # how many clients take part in a round of scaffold and local_adam
KEEPING = ("scaffold", "local_adam")
LOCAL = optimizers.Adam(0.003)  # of the clients of local_adam


@federated.program(clients=CLIENTS)
def fedprox(model: Model, digits: Digits, draws: torch.Tensor, proximity: float) -> Model:
    """Runs fedavg with clients that descend on their loss + proximity / 2 * |their model - the server's|^2."""

    def of_client(model: Model, digits: Digits, draws: torch.Tensor) -> Model:
        def direction(gradient: Model, now: Model) -> Model:
            return {name: g + proximity * (now[name] - model[name]) for name, g in gradient.items()}

        return train(model, digits, draws, RATE, direction)

    local = federated.map_fn(of_client, (federated.broadcast(model), digits, draws))
    return federated.reduce_weighted_mean(local, digits.mask.sum(1))


@federated.program(clients=COHORT)
def scaffold(
    model: Model, drift: Model, own_drift: Model, digits: Digits, draws: torch.Tensor
) -> tuple[Model, Model, Model]:
    """Returns the model and the control variates of the server and (placed) the clients: option II of the paper."""

    def of_client(
        model: Model, drift: Model, own: Model, digits: Digits, draws: torch.Tensor
    ) -> tuple[Model, Model, Model]:
        def direction(gradient: Model, now: Model) -> Model:
            return {name: g - own[name] + drift[name] for name, g in gradient.items()}

        trained = train(model, digits, draws, RATE, direction)
        path = len(draws) * RATE
        change = {name: (model[name] - trained[name]) / path - drift[name] for name in model}
        return trained, change, {name: own[name] + change[name] for name in model}

    sent = federated.broadcast((model, drift))
    local, change, own_drift = federated.map_fn(of_client, (*sent, own_drift, digits, draws))
    model, change = federated.reduce_mean((local, change))
    return model, {name: drift[name] + COHORT / CLIENTS * change[name] for name in model}, own_drift


@federated.program(clients=COHORT)
def local_adam(model: Model, moments: Any, digits: Digits, draws: torch.Tensor) -> tuple[Model, Any]:
    """Runs fedavg with clients that step by Adam; returns the model and (placed) the clients' moments."""

    def of_client(model: Model, moments: Any, digits: Digits, draws: torch.Tensor) -> tuple[Model, Any]:
        for draw in draws:
            model, moments = LOCAL.apply(model, gradient_of(model, digits, draw), moments)
        return model, moments

    local, moments = federated.map_fn(of_client, (federated.broadcast(model), moments, digits, draws))
    return federated.reduce_weighted_mean(local, digits.mask.sum(1)), moments


def simulation_of(algorithm: str, model: Model, digits: Digits, steps: int, seed: int) -> Simulation:
    """Returns the rounds of scaffold or local_adam, given all digits; the first part of their state is the model."""
    zeros = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
    program, first, row = {
        "scaffold": (scaffold, (model, zeros), zeros),
        "local_adam": (local_adam, (model,), LOCAL.init(model)),
    }[algorithm]

    def step(state: tuple, round: Any) -> tuple:
        draws = round.per_client(lambda g: torch.rand(steps, BATCH_SIZE, generator=g))
        *state, rows = program(*state, round.client_state, digits.of(round.clients), draws)
        return tuple(state), {}, rows

    job = {"population": CLIENTS, "cohort": COHORT, "seed": seed, "progress": False}
    return Simulation(step, first, clients=ClientStore(row), **job)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--algorithm", default="fedavg", choices=["fedsgd", "fedavg", "fedprox", *KEEPING])
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--steps", type=int, default=10, help="of each client in a round; fedsgd has none")
    options.add_argument("--proximity", type=float, default=0.1, help="of fedprox")
    options.add_argument("--at-least", type=float, default=0.93, help="test accuracy")
    args = options.parse_args()
    with ranks() as say:
        everything, *test = load_digits(args.seed, own=range(CLIENTS))
        digits = everything.of(range(CLIENTS)[federated.local_slice(CLIENTS)])
        model = make_model(args.seed)
        state = SERVER.init(model)
        if args.algorithm in KEEPING:
            simulation = simulation_of(args.algorithm, model, everything, args.steps, args.seed)
        for round in range(1, args.rounds + 1):
            draws = draw_batches(args.seed, round, args.steps)
            if args.algorithm == "fedsgd":
                model, state = SERVER.apply(model, torch.func.grad(mean_loss)(model, digits), state)
            elif args.algorithm == "fedavg":
                model = fedavg(model, digits, draws, RATE)
            elif args.algorithm == "fedprox":
                model = fedprox(model, digits, draws, args.proximity)
            else:
                simulation.run(round)
                model = simulation.state[0]
            if round % max(1, args.rounds // 6) == 0:
                loss, accuracy = float(mean_loss(model, digits)), accuracy_of(model, *test)
                say(f"round {round:3d}  train loss {loss:.4f}  test accuracy {accuracy:.4f}")
        claim = f"{args.algorithm}: test accuracy {accuracy:.4f} after {args.rounds} rounds, at least {args.at_least}"
        values = {"algorithm": args.algorithm, "rounds": args.rounds, "train_loss": loss, "test_accuracy": accuracy}
        finish(say, claim, holds=accuracy >= args.at_least, **values)


if __name__ == "__main__":
    main()
