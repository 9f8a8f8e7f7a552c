"""Runs four federated algorithms on digits whose labels are unevenly spread over 20 clients.

    python examples/federated/digits.py --algorithm scaffold
    bagua run --nproc-per-node 2 examples/federated/digits.py --algorithm scaffold     # the same numbers

fedsgd is torch.func.grad of the loss over all clients, one step per round. fedavg is the mean of models that clients
trained for some steps (McMahan et al., arXiv 1602.05629); fedprox keeps them close to the server's (Li et al., arXiv
1812.06127); scaffold corrects their steps by the difference between a client's gradients and those of all clients
(Karimireddy et al., arXiv 1910.06378). Exit status 1 if the test accuracy ends below --at-least.
"""

from __future__ import annotations

import torch
from clients import (
    CLIENTS,
    Digits,
    Model,
    accuracy_of,
    draw_batches,
    fedavg,
    finish,
    load_digits,
    make_model,
    mean_loss,
    parser,
    ranks,
    train,
)

from bagua import federated
from bagua.federated import optimizers

SERVER = optimizers.SGD(0.5, momentum=0.9)  # for fedsgd
RATE = 0.1  # learning rate of the clients' steps


@federated.program(clients=CLIENTS)
def fedprox(model: Model, digits: Digits, draws: torch.Tensor, proximity: float) -> Model:
    """Runs fedavg with clients that descend on their loss + proximity / 2 * |their model - the server's|^2."""

    def of_client(model: Model, digits: Digits, draws: torch.Tensor) -> Model:
        def direction(gradient: Model, now: Model) -> Model:
            return {name: g + proximity * (now[name] - model[name]) for name, g in gradient.items()}

        return train(model, digits, draws, RATE, direction)

    local = federated.map_fn(of_client, (federated.broadcast(model), digits, draws))
    return federated.reduce_weighted_mean(local, digits.mask.sum(1))


@federated.program(clients=CLIENTS)
def scaffold(
    model: Model, drift: Model, own_drift: Model, digits: Digits, draws: torch.Tensor
) -> tuple[Model, Model, Model]:
    """Returns the model and the control variates of the server and (placed) the clients: option II of the paper."""

    def of_client(model: Model, drift: Model, own: Model, digits: Digits, draws: torch.Tensor) -> tuple[Model, Model]:
        def direction(gradient: Model, now: Model) -> Model:
            return {name: g - own[name] + drift[name] for name, g in gradient.items()}

        trained = train(model, digits, draws, RATE, direction)
        path = len(draws) * RATE
        return trained, {name: own[name] - drift[name] + (model[name] - trained[name]) / path for name in model}

    sent = federated.broadcast((model, drift))
    local, own_drift = federated.map_fn(of_client, (*sent, own_drift, digits, draws))
    return *federated.reduce_mean((local, own_drift)), own_drift  # the server's is the mean of the clients'


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--algorithm", default="fedavg", choices=["fedsgd", "fedavg", "fedprox", "scaffold"])
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--steps", type=int, default=10, help="of each client in a round; fedsgd has none")
    options.add_argument("--proximity", type=float, default=0.1, help="of fedprox")
    options.add_argument("--at-least", type=float, default=0.93, help="test accuracy")
    args = options.parse_args()
    with ranks() as say:
        digits, *test = load_digits(args.seed)
        model = make_model(args.seed)
        state = SERVER.init(model)
        drift = {name: torch.zeros_like(leaf) for name, leaf in model.items()}
        own_drift = {name: leaf.new_zeros(len(digits.mask), *leaf.shape) for name, leaf in model.items()}
        for round in range(1, args.rounds + 1):
            draws = draw_batches(args.seed, round, args.steps)
            if args.algorithm == "fedsgd":
                model, state = SERVER.apply(model, torch.func.grad(mean_loss)(model, digits), state)
            elif args.algorithm == "fedavg":
                model = fedavg(model, digits, draws, RATE)
            elif args.algorithm == "fedprox":
                model = fedprox(model, digits, draws, args.proximity)
            else:
                model, drift, own_drift = scaffold(model, drift, own_drift, digits, draws)
            if round % max(1, args.rounds // 6) == 0:
                loss, accuracy = float(mean_loss(model, digits)), accuracy_of(model, *test)
                say(f"round {round:3d}  train loss {loss:.4f}  test accuracy {accuracy:.4f}")
        claim = f"{args.algorithm}: test accuracy {accuracy:.4f} after {args.rounds} rounds, at least {args.at_least}"
        values = {"algorithm": args.algorithm, "rounds": args.rounds, "train_loss": loss, "test_accuracy": accuracy}
        finish(say, claim, holds=accuracy >= args.at_least, **values)


if __name__ == "__main__":
    main()
