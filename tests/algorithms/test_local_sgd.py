"""local_sgd beside its oracle in plain float64 loops: momentum SGD on every rank, means every k steps."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of, weights_of
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

LR, MOMENTUM, STEPS = 0.1, 0.9, 9


def oracle(n, numel, sync_every, post_local_after, momentum):
    weights = [[0.0] * numel for _ in range(n)]
    velocity = [[0.0] * numel for _ in range(n)]
    history = []
    num_local = 0
    for step in range(STEPS):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        gradients = [[x - c for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step < post_local_after:
            gradients = [[sum(g[e] for g in gradients) / n for e in range(numel)]] * n
        velocity = [[MOMENTUM * v + g for v, g in zip(velocity[i], gradients[i], strict=True)] for i in range(n)]
        weights = [[x - LR * v for x, v in zip(weights[i], velocity[i], strict=True)] for i in range(n)]
        if step >= post_local_after:
            num_local += 1
            if num_local % sync_every == 0:
                weights = [[sum(x[e] for x in weights) / n for e in range(numel)]] * n
                if momentum == "average":
                    velocity = [[sum(v[e] for v in velocity) / n for e in range(numel)]] * n
                elif momentum == "reset":
                    velocity = [[0.0] * numel for _ in range(n)]
        history.append(weights)
    return history


def _train(rank, world_size, options):
    with process_group():
        model = Quadratic()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd", **options)
        return [step_once(model, optimizer, rank, step) for step in range(STEPS)]


@fast_in(
    "sync_every, post_local_after, momentum",
    [(1, 0, "reset"), (3, 0, "average"), (3, 4, "keep")],
    [(*of, momentum) for of in ((1, 0), (3, 0), (3, 4)) for momentum in ("average", "reset", "keep")],
)
def test_follows_the_oracle(pool4, sync_every, post_local_after, momentum):
    options = {"sync_every": sync_every, "post_local_after": post_local_after, "momentum": momentum}
    per_rank = pool4.run(_train, args=(options,))
    history = oracle(4, Quadratic().numel, sync_every, post_local_after, momentum)
    for step, weights in enumerate(history):
        for rank, expected in enumerate(weights):
            assert per_rank[rank][step] == pytest.approx(expected, abs=2e-5), (step, rank)


def _adam(rank, world_size, momentum):
    """Adam's moments lie in buckets of their own dtype; a moment that only one rank has is left alone."""
    with process_group():
        model = Quadratic([(3, 5), (4,)], dtype=torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        bagua.with_bagua(
            model, optimizer, algorithm="local_sgd", sync_every=2, momentum=momentum, find_unused_parameters=True
        )
        for step in range(2):
            optimizer.zero_grad()
            target = target_of(rank, step, 19).bfloat16()
            used = list(model.parts)[: 2 - rank]  # rank 1 never uses the second one
            pieces = target.split([15, 4])[: len(used)]
            loss = sum(((p.reshape(-1) - c) ** 2).sum() for p, c in zip(used, pieces, strict=True))
            (loss + 0 * model(target).detach()).backward()
            optimizer.step()
        assert_equal_on_all_ranks(dict(model.named_parameters()))
        first = optimizer.state.get(model.parts[0], {})
        if momentum == "average":
            assert_equal_on_all_ranks({key: value for key, value in first.items() if key != "step"})
            assert len(optimizer.state.get(model.parts[1], {})) == (3 if rank == 0 else 0)
        elif momentum == "reset":
            assert not first
        step_once(model, optimizer, rank, 2)


@pytest.mark.parametrize("momentum", ["average", "reset", "keep"])
def test_moments_of_adam(pool2, momentum):
    pool2.run(_adam, args=(momentum,))


def _nothing_travels_between(rank, world_size):
    with process_group():
        model = Quadratic([(1000,)])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="local_sgd", sync_every=4, momentum="keep")
        for step in range(12):
            step_once(model, optimizer, rank, step)
        return model.bagua.timeline().summary()["bytes_sent"] / model.bagua.buckets[0].num_bytes


def test_what_travels(pool2):
    for num_exchanges in pool2.run(_nothing_travels_between):
        assert num_exchanges in (2, 3)  # the last one counts from the next step on


def _optimizers_count_by_themselves(rank, world_size):
    with process_group():
        model = Quadratic()
        often, rarely = (torch.optim.SGD([part], lr=LR) for part in model.parts)
        bagua.with_bagua(model, [often, rarely], algorithm="local_sgd", sync_every=2)
        equal = []
        for step in range(4):
            model(target_of(rank, step, model.numel).float()).backward()
            often.step()
            if step % 2:
                rarely.step()
            everyone = bagua.get_default_group().all_gather_object(weights_of(model))
            split = model.parts[0].numel()
            equal.append([everyone[0][:split] == everyone[1][:split], everyone[0][split:] == everyone[1][split:]])
            model.zero_grad()
        return equal


def test_each_optimizer_counts_its_own_steps(pool2):
    for equal in pool2.run(_optimizers_count_by_themselves):
        assert equal == [[False, True], [True, False], [False, False], [True, True]]


def test_options():
    for options, message in [
        ({"sync_every": 0}, "sync_every is 0, expected 1 or more"),
        ({"post_local_after": -1}, "post_local_after is -1, expected 0 or more"),
        ({"momentum": "halve"}, "momentum is 'halve', expected one of 'average', 'reset', 'keep'"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            bagua.algorithms.create("local_sgd", options)
