"""Learns the weight of each client: clients with wrong labels end with almost none.

    python examples/federated/client_weights.py
    bagua run --nproc-per-node 2 examples/federated/client_weights.py

Two in five clients have random labels, unknown to the server. The server has a few clean digits; in each round their
loss is differentiated with respect to the weights, through the weighted mean of the clients' models. Exit status 1
unless clients with wrong labels end with less than a tenth of the others' weight, and the test loss is below that of
equal weights.
"""

from __future__ import annotations

import torch
from clients import (
    CLIENTS,
    Digits,
    Model,
    accuracy_of,
    draw_batches,
    finish,
    load_digits,
    loss_of,
    make_model,
    parser,
    ranks,
    train,
)

from bagua import federated
from bagua.federated import optimizers, sampling

WRONG = 2 * CLIENTS // 5
RATE = 0.1


@federated.program(clients=CLIENTS)
def weighted_round(log_weights: torch.Tensor, model: Model, digits: Digits, draws: torch.Tensor) -> Model:
    """Runs a round of FedAvg in which a client counts by its weight times its number of examples."""
    local = federated.map_fn(lambda *own: train(*own, RATE), (federated.broadcast(model), digits, draws))
    return federated.reduce_weighted_mean(local, log_weights.exp() * digits.mask.sum(1))


@federated.program(clients=CLIENTS)
def mean_weights(log_weights: torch.Tensor, is_wrong: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean weight of clients with wrong labels, and that of the others."""
    weights = log_weights.exp()
    return tuple(federated.reduce_weighted_mean(weights, mask.float()) for mask in (is_wrong, ~is_wrong))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--steps", type=int, default=5, help="of each client in a round")
    args = options.parse_args()
    with ranks() as say:
        digits, images, labels = load_digits(args.seed, alpha=3.0)
        clean, test = (images[:90], labels[:90]), (images[90:], labels[90:])
        wrong = sampling.cohort(CLIENTS, WRONG, seed=args.seed, round=0)
        own = torch.arange(CLIENTS)[federated.local_slice(CLIENTS)]
        is_wrong = torch.isin(own, wrong)
        longest = digits.labels.shape[1]
        drawn = sampling.per_client(lambda g: torch.randint(10, (longest,), generator=g), own, seed=args.seed)
        digits = digits._replace(labels=torch.where(is_wrong[:, None], drawn, digits.labels))

        def loss_after(log_weights: torch.Tensor, model: Model, draws: torch.Tensor) -> tuple[torch.Tensor, Model]:
            model = weighted_round(log_weights, model, digits, draws)
            return loss_of(model, *clean), model

        optimizer = optimizers.Adam(0.3, epsilon=1e-8)
        equal = log_weights = torch.zeros(len(own))
        state = optimizer.init(log_weights)
        model = model_of_equal = make_model(args.seed)
        for round in range(1, args.rounds + 1):
            draws = draw_batches(args.seed, round, args.steps)
            derivative, (_, model) = torch.func.grad_and_value(loss_after, has_aux=True)(log_weights, model, draws)
            log_weights, state = optimizer.apply(log_weights, derivative, state)
            model_of_equal = weighted_round(equal, model_of_equal, digits, draws)
            if round % max(1, args.rounds // 5) == 0:
                of_wrong, of_others = (float(weight) for weight in mean_weights(log_weights, is_wrong))
                accuracies = [accuracy_of(found, *test) for found in (model, model_of_equal)]
                say(
                    f"round {round:3d}  weight of wrong labels / of the others {of_wrong / of_others:.4f}  "
                    f"test accuracy {accuracies[0]:.4f}, with equal weights {accuracies[1]:.4f}"
                )
        ratio = of_wrong / of_others
        losses = [float(loss_of(found, *test)) for found in (model, model_of_equal)]
        claim = f"wrong labels have {ratio:.4f} of the others' weight; test loss {losses[0]:.4f}, with equal weights "
        claim += f"{losses[1]:.4f}"
        holds = ratio < 0.1 and losses[0] < losses[1]
        finish(say, claim, holds=holds, weight_ratio=ratio, test_losses=losses, test_accuracies=accuracies)


if __name__ == "__main__":
    main()
