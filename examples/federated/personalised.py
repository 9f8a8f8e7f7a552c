"""Evaluates the model at each client, before and after it has trained there for some steps.

    python examples/federated/personalised.py
    bagua run --nproc-per-node 2 examples/federated/personalised.py

Each client holds out a quarter of its digits. FedAvg trains on the rest; then every client fine-tunes its copy of the
model on its digits, and evaluates it on the held-out ones. The figures are over all held-out digits, so weighted by
examples. Exit status 1 unless the personalised models are better.
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
    logits_of,
    make_model,
    parser,
    ranks,
    train,
)

from bagua import federated
from bagua.federated import metrics

RATE = 0.1


@federated.program(clients=CLIENTS)
def evaluate(model: Model, own: Digits, held_back: Digits, draws: torch.Tensor) -> tuple[dict, torch.Tensor]:
    """Returns metrics over all clients, and (placed) each client's gain in accuracy; NaN without held-out digits."""

    def of_client(model: Model, own: Digits, held_back: Digits, draws: torch.Tensor) -> tuple[dict, torch.Tensor]:
        found = {}
        for when, which in (("before", model), ("after", train(model, own, draws, RATE))):
            logits = logits_of(which, held_back.images)
            found[f"accuracy {when}"] = metrics.accuracy(logits, held_back.labels, held_back.mask)
            found[f"loss {when}"] = metrics.cross_entropy(logits, held_back.labels, held_back.mask)
        found["digits"] = metrics.count(held_back.mask)
        values = metrics.result(found)
        return found, values["accuracy after"] - values["accuracy before"]

    found, gains = federated.map_fn(of_client, (federated.broadcast(model), own, held_back, draws))
    return metrics.reduce(found), gains


@federated.program(clients=CLIENTS)
def count_of(placed: torch.Tensor) -> torch.Tensor:
    """Returns the number of clients at which the value is true."""
    return federated.reduce_sum(placed.long())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--steps", type=int, default=10, help="of each client in a round, and of fine-tuning")
    args = options.parse_args()
    with ranks() as say:
        digits, *test = load_digits(args.seed, alpha=0.1)  # a client has one to three labels
        is_held_back = torch.arange(digits.mask.shape[1]) % 4 == 3  # a client's digits are in random order
        held_back = Digits(*(leaf[:, is_held_back] for leaf in digits))
        own = Digits(*(leaf[:, ~is_held_back] for leaf in digits))

        model = make_model(args.seed)
        for round in range(1, args.rounds + 1):
            model = fedavg(model, own, draw_batches(args.seed, round, args.steps), RATE)
        say(f"FedAvg, {args.rounds} rounds: test accuracy {accuracy_of(model, *test):.4f}")

        found, gains = evaluate(model, own, held_back, draw_batches(args.seed, 0, args.steps))
        values = {name: float(value) for name, value in metrics.result(found).items()}
        for figure in ("accuracy", "loss"):
            before, after = values[f"{figure} before"], values[f"{figure} after"]
            say(f"on digits held back: {figure} {before:.4f}, fine-tuned {after:.4f}")
        better, worse = int(count_of(gains > 0)), int(count_of(gains < 0))
        say(f"{better} of {CLIENTS} clients gain accuracy, {worse} lose some")
        before, after = values["accuracy before"], values["accuracy after"]
        claim = f"fine-tuning takes {values['digits']:.0f} digits held back from accuracy {before:.3f} to {after:.3f}"
        values = {name.replace(" ", "_"): value for name, value in values.items()}
        finish(say, claim, holds=after > before, **values)


if __name__ == "__main__":
    main()
