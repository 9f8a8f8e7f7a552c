"""Trains a byte-level transformer with DiLoCo: many local steps of AdamW between two exchanges, then a server step.

    python examples/federated/diloco.py
    bagua run --nproc-per-node 2 examples/federated/diloco.py

The text of Python's standard library is split among the clients. A round is broadcast, map (local steps, whose
optimizer continues from the client's last round) and reduce_mean of the clients' changes; the server descends along
that mean with Nesterov momentum (Douillard et al., arXiv 2311.08105). It is compared with synchronous steps, which
exchange gradients: as many as DiLoCo has rounds, so with the same bytes, and as many as its clients have steps. Exit
status 1 unless DiLoCo's loss is lower at equal bytes. Losses are in nats per byte, on held-out files.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from clients import Model, finish, parser, ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from bagua import federated
from bagua.federated import optimizers, sampling

sys.path.append(str(Path(__file__).resolve().parents[1]))
from byte_lm import CONTEXT, ByteTransformer, load_text, loss_of, windows

CLIENTS = 4
WIDTH = 64
NET = ByteTransformer(WIDTH)  # only its forward is used; parameters are passed to it
INNER = optimizers.Adam(0.004, betas=(0.9, 0.99), epsilon=1e-8)
OUTER = optimizers.SGD(0.7, momentum=0.6, nesterov=True)
DECAY = 0.01  # AdamW's weight decay
Batch = tuple[torch.Tensor, torch.Tensor]


def loss_at(model: Model, batch: Batch) -> torch.Tensor:
    return loss_of(lambda codes: torch.func.functional_call(NET, model, (codes,)), batch)


def adamw(model: Model, gradient: Model, state: dict) -> tuple[Model, dict]:
    decayed = {name: (1 - DECAY * INNER.learning_rate) * leaf for name, leaf in model.items()}
    return INNER.apply(decayed, gradient, state)


@federated.program(clients=CLIENTS)
def at_clients(value: dict) -> dict:
    """Places the same value at every client."""
    return federated.broadcast(value)


@federated.program(clients=CLIENTS)
def diloco(model: Model, states: dict, batches: Batch) -> tuple[Model, dict]:
    """Returns the mean of model - client's model, and (placed) the states of the clients' optimizers."""

    def of_client(model: Model, state: dict, batches: Batch) -> tuple[Model, dict]:
        now = model
        for batch in zip(*batches, strict=True):
            now, state = adamw(now, torch.func.grad(loss_at)(now, batch), state)
        return {name: leaf - now[name] for name, leaf in model.items()}, state

    moved, states = federated.map_fn(of_client, (federated.broadcast(model), states, batches))
    return federated.reduce_mean(moved), states


@federated.program(clients=CLIENTS)
def mean_gradient(model: Model, batch: Batch) -> Model:
    """Returns the mean gradient, without holding one per client."""
    arguments = (federated.broadcast(model), batch)
    return federated.map_reduce(torch.func.grad(loss_at), arguments, chunk_size=1)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--steps", type=int, default=10, help="of each client in a round")
    options.add_argument("--batch-size", type=int, default=8, help="windows per client and step")
    options.add_argument("--max-bytes", type=int, default=2_000_000, help="of the text")
    args = options.parse_args()
    # vmap has no rule for the fused attention of CPUs; it would run client by client, with a warning.
    with ranks() as say, sdpa_kernel(SDPBackend.MATH):
        text, validation = load_text(args.max_bytes)
        held_out = windows(validation, torch.linspace(0, len(validation) - CONTEXT - 1, 128).long())
        torch.manual_seed(args.seed)
        start = {name: leaf.detach() for name, leaf in ByteTransformer(WIDTH).named_parameters()}
        part = len(text) // CLIENTS
        own = torch.arange(CLIENTS)[federated.local_slice(CLIENTS)]

        def batches_of(round: int) -> Batch:
            """Returns inputs and targets, [num_local, steps, batch_size, CONTEXT]."""

            def draw(generator: torch.Generator) -> torch.Tensor:
                return torch.randint(part - CONTEXT, (args.steps, args.batch_size), generator=generator)

            starts = sampling.per_client(draw, own, seed=args.seed, round=round) + part * own[:, None, None]
            flat = windows(text, starts.flatten())
            return tuple(codes.unflatten(0, starts.shape) for codes in flat)

        say(f"before: validation loss {float(loss_at(start, held_out)):.4f}")
        model, outer = start, OUTER.init(start)
        states = at_clients(INNER.init(start))
        found = {}
        for round in range(args.rounds):
            moved, states = diloco(model, states, batches_of(round))
            model, outer = OUTER.apply(model, moved, outer)
            found["diloco"] = float(loss_at(model, held_out))
            say(f"DiLoCo round {round + 1}, {(round + 1) * args.steps} local steps: {found['diloco']:.4f}")

        model, state = start, INNER.init(start)
        for step in range(args.rounds * args.steps):
            batch = tuple(codes[:, step % args.steps] for codes in batches_of(step // args.steps))
            model, state = adamw(model, mean_gradient(model, batch), state)
            if step + 1 == args.rounds:
                found["same_bytes"] = float(loss_at(model, held_out))
        found["same_steps"] = float(loss_at(model, held_out))
        say(f"synchronous steps, {args.rounds} (as many bytes): {found['same_bytes']:.4f}")
        say(f"synchronous steps, {args.rounds * args.steps} ({args.steps} x the bytes): {found['same_steps']:.4f}")

        sent = sum(leaf.numel() * leaf.element_size() for leaf in start.values()) * args.rounds / 1e6
        claim = f"with {sent:.1f} MB from each client DiLoCo gets to {found['diloco']:.3f}, synchronous steps to "
        claim += f"{found['same_bytes']:.3f}"
        finish(say, claim, holds=found["diloco"] < found["same_bytes"] - 0.2, **found, sent_per_client_mb=sent)


if __name__ == "__main__":
    main()
