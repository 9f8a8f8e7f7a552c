"""Tunes the clients' learning rate by the derivative of the loss after several rounds of FedAvg.

    python examples/federated/hypergradient.py
    bagua run --nproc-per-node 2 examples/federated/hypergradient.py --mode reverse

Forward mode suits a derivative by one number: it carries one tangent through all rounds and stores no activations.
Reverse mode gives the same derivative, and would give those of many numbers at once. Exit status 1 unless the tuned
rate lowers the loss by a third and both modes agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from clients import Model, accuracy_of, draw_batches, fedavg, finish, load_digits, make_model, mean_loss, parser, ranks

from bagua.federated import optimizers


def forward_mode(function: Callable, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value and the derivative."""
    return torch.func.jvp(function, (at,), (torch.ones_like(at),))


def reverse_mode(function: Callable, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the value and the derivative."""
    derivative, value = torch.func.grad_and_value(function)(at)
    return value, derivative


MODES = {"forward": forward_mode, "reverse": reverse_mode}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--mode", default="forward", choices=MODES)
    options.add_argument("--rate", type=float, default=0.02, help="to begin with")
    options.add_argument("--rounds", type=int, default=4, help="of FedAvg, through which it differentiates")
    options.add_argument("--steps", type=int, default=5, help="of each client in a round")
    options.add_argument("--updates", type=int, default=18, help="of the rate")
    args = options.parse_args()
    with ranks() as say:
        digits, *test = load_digits(args.seed)
        batches = [draw_batches(args.seed, round, args.steps) for round in range(args.rounds)]

        def trained(log_rate: torch.Tensor) -> Model:
            model = make_model(args.seed)
            for draws in batches:
                model = fedavg(model, digits, draws, log_rate.exp())
            return model

        def loss_after(log_rate: torch.Tensor) -> torch.Tensor:
            return mean_loss(trained(log_rate), digits)

        optimizer = optimizers.Adam(0.3, betas=(0.5, 0.9))
        log_rate = start = torch.tensor(math.log(args.rate))
        state = optimizer.init(log_rate)
        for update in range(args.updates):
            loss, derivative = MODES[args.mode](loss_after, log_rate)
            if update % max(1, args.updates // 6) == 0:
                say(f"rate {float(log_rate.exp()):.4f}  loss {float(loss):.4f}  d loss / d log rate {derivative:+.5f}")
            log_rate, state = optimizer.apply(log_rate, derivative, state)

        derivatives = {name: float(mode(loss_after, start)[1]) for name, mode in MODES.items()}
        say("at the start " + ", ".join(f"{name} mode {value:+.7f}" for name, value in derivatives.items()))
        accuracies = [accuracy_of(trained(rate), *test) for rate in (start, log_rate)]
        losses = [float(loss_after(rate)) for rate in (start, log_rate)]
        agree = math.isclose(derivatives["forward"], derivatives["reverse"], rel_tol=1e-3)
        claim = (
            f"rate {args.rate} to {float(log_rate.exp()):.3f}: loss after {args.rounds} rounds {losses[0]:.3f} to "
            f"{losses[1]:.3f}, test accuracy {accuracies[0]:.3f} to {accuracies[1]:.3f}"
        )
        values = {"rate": float(log_rate.exp()), "losses": losses, "test_accuracies": accuracies, **derivatives}
        finish(say, claim, holds=agree and losses[1] < 2 / 3 * losses[0], **values)


if __name__ == "__main__":
    main()
