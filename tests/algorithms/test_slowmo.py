"""slowmo beside its oracle in plain float64 loops."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of
from tests.conformance.training import process_group

RATES = [0.1, 0.2, 0.05, 0.0, 0.05, 0.0, 0.1, 0.2, 0.1]  # of the steps; a warm restart begins at 0
SIZES = (91, 5)  # of the parts of Quadratic, which have optimizer groups of their own


def oracle(n, sync_every, slow_momentum, slow_lr):
    """The weights of all ranks after each step; the second part has twice the learning rate."""
    numel = sum(SIZES)
    factor = [1.0] * SIZES[0] + [2.0] * SIZES[1]
    weights, reference, slow, history = [[0.0] * numel for _ in range(n)], [0.0] * numel, [0.0] * numel, []
    for step, base in enumerate(RATES):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        for i in range(n):
            weights[i] = [x - base * f * (x - c) for x, c, f in zip(weights[i], targets[i], factor, strict=True)]
        if (step + 1) % sync_every == 0:
            for e in range(numel):
                rate = base * factor[e]
                delta = reference[e] - sum(x[e] for x in weights) / n
                slow[e] = slow_momentum * slow[e] + delta / rate if rate else slow[e]
                reference[e] -= slow_lr * (rate * slow[e] if rate else delta)
            weights = [list(reference) for _ in range(n)]
        history.append([list(x) for x in weights])
    return history


def _train(rank, world_size, options):
    with process_group():
        model = Quadratic(dtype=torch.float64)
        groups = [{"params": [part]} for part in model.parts]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        bagua.with_bagua(model, optimizer, algorithm="slowmo", **options)
        results = []
        for step, base in enumerate(RATES):
            for group, factor in zip(optimizer.param_groups, (1.0, 2.0), strict=True):
                group["lr"] = base * factor
            results.append(step_once(model, optimizer, rank, step))
        return results


@pytest.mark.parametrize("options", [(2, 0.5, 1.0), (3, 0.8, 0.7), (2, 0.0, 1.0)])
def test_follows_the_oracle(pool4, options):
    """With beta 0 and a slow learning rate of 1 the formula is that of local_sgd."""
    names = dict(zip(("sync_every", "slow_momentum", "slow_lr"), options, strict=True))
    per_rank = pool4.run(_train, args=(names,))
    for step, weights in enumerate(oracle(4, *options)):
        for rank, expected in enumerate(weights):
            assert per_rank[rank][step] == pytest.approx(expected, abs=1e-12), (step, rank)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"slow_momentum": 1.0}, "slow_momentum is 1.0, expected 0 or more, and below 1"),
        ({"slow_lr": 0.0}, "slow_lr is 0.0, expected a number above 0"),
        ({"sync_every": 0}, "sync_every is 0, expected 1 or more"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("slowmo", options)
