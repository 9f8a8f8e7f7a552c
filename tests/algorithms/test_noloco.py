"""noloco beside its oracle in plain float64 loops."""

from __future__ import annotations

import copy

import pytest
import torch

import bagua
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

LR, STEPS, NUMEL = 0.1, 14, 96


def oracle(n, partner_of, sync_every, outer_lr, outer_momentum, consensus, overlap_steps=0):
    """The weights of all ranks after each step; ``partner_of(rank, exchange)`` may be the rank itself, or None: all."""
    weights = [[0.0] * NUMEL for _ in range(n)]
    reference, moved = [[0.0] * NUMEL for _ in range(n)], [[0.0] * NUMEL for _ in range(n)]
    under_way, history = {}, []
    for step in range(1, STEPS + 1):
        targets = [target_of(rank, step - 1, NUMEL).tolist() for rank in range(n)]
        weights = [[x - LR * (x - c) for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step % sync_every == 0:
            increments = []
            for i in range(n):
                partner = partner_of(i, step // sync_every)
                members = range(n) if partner is None else sorted({i, partner})
                increments.append([])
                for e in range(NUMEL):
                    delta = sum(reference[j][e] - weights[j][e] for j in members) / len(members)
                    mean = sum(reference[j][e] for j in members) / len(members)
                    increments[i].append(-outer_lr * delta + consensus * (mean - reference[i][e]))
            under_way[step + overlap_steps] = increments
        for i, increment in enumerate(under_way.pop(step, [])):
            moved[i] = [outer_momentum * m + d for m, d in zip(moved[i], increment, strict=True)]
            reference[i] = [r + m for r, m in zip(reference[i], moved[i], strict=True)]
            weights[i] = list(reference[i])
        history.append([list(x) for x in weights])
    return history


def _train(rank, world_size, options):
    """The weights after each step, and each exchange's partner by the collective itself."""
    with process_group():
        model = Quadratic(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="noloco", **options)
        weights = [step_once(model, optimizer, rank, step) for step in range(STEPS)]
        partners = []
        for exchange in range(STEPS + 1):
            values = torch.zeros(world_size, dtype=torch.float64)
            values[rank] = 1.0
            bagua.neighbor_average(values, "matching", exchange)
            partners.append(next((j for j in range(world_size) if j != rank and values[j]), rank))
        model.bagua.synchronize()
        return weights, partners, [p.detach().clone() for p in model.parameters()]


OPTIONS = {"sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.5, "consensus": 0.6}


@fast_in("num_ranks, overlap_steps", [(3, 1)], [(2, 0), (3, 1), (4, 0)])
def test_follows_the_oracle(num_ranks, overlap_steps):
    options = {**OPTIONS, "overlap_steps": overlap_steps}
    results = bagua.testing.spawn(_train, num_ranks, args=(options,))
    partners = [partners for _, partners, _ in results]
    history = oracle(num_ranks, lambda rank, exchange: partners[rank][exchange], **options)
    for step, weights in enumerate(history):
        for rank, expected in enumerate(weights):
            assert results[rank][0][step] == pytest.approx(expected, abs=1e-12), (step, rank)
    for _, _, parameters in results:
        for mine, first in zip(parameters, results[0][2], strict=True):
            assert torch.equal(mine, first)


def test_one_group_of_all_is_heavy_ball(pool4):
    options = {**OPTIONS, "topology": "all"}
    per_rank = pool4.run(_train, args=(options,))
    for step, weights in enumerate(oracle(4, lambda rank, exchange: None, **OPTIONS)):
        for rank, expected in enumerate(weights):
            assert per_rank[rank][0][step] == pytest.approx(expected, abs=1e-12), (step, rank)


def _global_model(rank, world_size):
    """synchronize() finishes what is under way, averages references and momenta, and takes an outer step of all."""
    with process_group():
        model = Quadratic(dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="noloco", **{**OPTIONS, "sync_every": 4}, warmup_steps=2)
        step_once(model, optimizer, rank, 0)
        before = weights_of(model)
        model.bagua.synchronize()  # in the warm-up, when all ranks are equal
        assert weights_of(model) == before
        for step in range(1, 8):
            step_once(model, optimizer, rank, step)
        (bucket,) = model.bagua.buckets
        kept = torch.stack([bucket.state(name).clone() for name in ("reference", "momentum")])
        bucket.load()
        mean = torch.cat([kept.view(-1), bucket.flat])
        bagua.all_reduce(mean, bagua.ReduceOp.AVG)
        reference, momentum, weights = mean.view(3, -1)
        momentum = OPTIONS["outer_momentum"] * momentum + OPTIONS["outer_lr"] * (reference - weights)
        model.bagua.synchronize()
        bucket.load()
        torch.testing.assert_close(bucket.flat, reference - momentum, rtol=0, atol=1e-12)


def test_the_global_model(pool2):
    pool2.run(_global_model)


def _resumes(rank, world_size):
    with process_group():
        histories = []
        for stop in (STEPS, 5):  # an exchange is under way after five steps
            model = Quadratic()
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            bagua.with_bagua(model, optimizer, algorithm="noloco", sync_every=4, overlap_steps=2)
            history = [step_once(model, optimizer, rank, step) for step in range(stop)]
            if stop < STEPS:
                saved = copy.deepcopy((model.state_dict(), model.bagua.state_dict()))
                model = Quadratic()
                optimizer = torch.optim.SGD(model.parameters(), lr=LR)
                bagua.with_bagua(model, optimizer, algorithm="noloco", sync_every=4, overlap_steps=2)
                model.load_state_dict(saved[0])
                model.bagua.load_state_dict(saved[1])
                history += [step_once(model, optimizer, rank, step) for step in range(stop, STEPS)]
            histories.append(history)
        assert histories[0] == histories[1]


def test_resumes_with_an_exchange_under_way(pool2):
    pool2.run(_resumes)
