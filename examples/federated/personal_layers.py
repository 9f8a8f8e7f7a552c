"""Trains a model whose last layer is each client's own, kept in a ClientStore between its rounds.

    python examples/federated/personal_layers.py
    bagua run --nproc-per-node 2 examples/federated/personal_layers.py

Eight of 20 clients train in a round, with one to three labels each. The first layer is shared, as in FedAvg; the last
one stays at the client (Arivazhagan et al., arXiv 1912.00818). Each client holds out a quarter of its digits, and is
evaluated on them before it trains. The same is done with a last layer that is shared, too. In the middle the run is
saved, and goes on from its checkpoint. Exit status 1 unless personal layers are better in the last rounds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from clients import BATCH_SIZE, CLIENTS, Digits, Model, finish, load_digits, logits_of, make_model, parser, ranks, train

import bagua
from bagua import federated
from bagua.federated import ClientStore, Simulation, metrics

COHORT = 8
RATE = 0.1
OWN = ("out", "out_bias")  # the layers of a client


@federated.program(clients=COHORT)
def one_round(
    shared: Model, own: Model, digits: Digits, held_back: Digits, draws: torch.Tensor, mask: torch.Tensor
) -> tuple[Model, Model, metrics.Ratio]:
    """Returns the mean of the shared layers, (placed) the clients' own, and the accuracy before they trained."""

    def of_client(
        shared: Model, own: Model, digits: Digits, held_back: Digits, draws: torch.Tensor
    ) -> tuple[Model, Model, metrics.Ratio]:
        model = {**shared, **own}
        accuracy = metrics.accuracy(logits_of(model, held_back.images), held_back.labels, held_back.mask)
        model = train(model, digits, draws, RATE)
        return {name: model[name] for name in shared}, {name: model[name] for name in own}, accuracy

    shared, own, accuracy = federated.map_fn(of_client, (federated.broadcast(shared), own, digits, held_back, draws))
    weights = digits.mask.sum(1)
    return federated.reduce_weighted_mean(shared, weights, mask=mask), own, metrics.reduce(accuracy)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--steps", type=int, default=10, help="of each client in a round")
    args = options.parse_args()
    with ranks() as say, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary if not bagua.is_initialized() else bagua.broadcast_object(temporary, 0))
        everything, *_ = load_digits(args.seed, alpha=0.1, own=range(CLIENTS))
        is_held_back = torch.arange(everything.mask.shape[1]) % 4 == 3  # a client's digits are in random order
        held_back = Digits(*(leaf[:, is_held_back] for leaf in everything))
        digits = Digits(*(leaf[:, ~is_held_back] for leaf in everything))
        model = make_model(args.seed)
        heads = {name: model[name] for name in OWN}

        def step(state: Model, round: Any) -> tuple:
            clients, own = round.clients, round.client_state
            draws = round.per_client(lambda g: torch.rand(args.steps, BATCH_SIZE, generator=g))
            mine = digits.of(clients)
            if own is None:
                own = {name: state[name].expand(len(clients), *state[name].shape) for name in OWN}
            body = {name: leaf for name, leaf in state.items() if name not in OWN}
            body, own, accuracy = one_round(body, own, mine, held_back.of(clients), draws, round.mask)
            figures = {"accuracy": metrics.result(accuracy)}
            if round.client_state is not None:
                return body, figures, own
            mean = federated.program(federated.reduce_weighted_mean, clients=COHORT)
            return {**body, **mean(own, mine.mask.sum(1), mask=round.mask)}, figures

        job = {"population": CLIENTS, "cohort": COHORT, "seed": args.seed, "progress": False}
        body = {name: leaf for name, leaf in model.items() if name not in OWN}
        shared = Simulation(step, model, **job)
        personal = Simulation(step, body, clients=ClientStore(heads, folder / "rows"), **job)
        found = {
            "shared": shared.run(args.rounds),
            "personal": personal.run(args.rounds // 2, checkpoint=folder / "run"),
        }
        resumed = Simulation(step, body, clients=ClientStore(heads, folder / "rows"), **job)
        resumed.load(folder / "run")
        found["personal"] += resumed.run(args.rounds)
        if bagua.is_initialized():
            bagua.barrier()  # rank 0 deletes the folder, in which the other ranks still commit their rows
        last = max(1, args.rounds // 4)
        values = {name: sum(one["accuracy"] for one in figures[-last:]) / last for name, figures in found.items()}
        for name, value in values.items():
            say(f"the last layer {name}: accuracy {value:.4f} on digits held back, mean of {last} rounds")
        claim = (
            f"personal layers take digits held back from accuracy {values['shared']:.3f} to {values['personal']:.3f}"
        )
        values = {f"{name}_accuracy": value for name, value in values.items()}
        finish(say, claim, holds=values["personal_accuracy"] > values["shared_accuracy"], **values)


if __name__ == "__main__":
    main()
