"""zero_one_adam beside its oracle in plain float64 loops, and beside torch's Adam."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import bagua
from bagua.errors import BaguaError, InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of
from tests.conformance.training import assert_equal_on_all_ranks, process_group

SIZES = (91, 5)  # of the parts of Quadratic, which have optimizer groups of their own
BETA1, BETA2, EPS, DECAY = 0.9, 0.99, 1e-8, 0.1
WARMUP, NUM_STEPS = 7, 24
REFRESHES = {1, 2, 3, 5, 7}  # two at a distance of 1, two at 2
DUE = {
    4,
    6,
    8,
    9,
    10,
    11,
    13,
    15,
    19,
    23,
}  # three steps after the warm-up each is due, three each second, then each fourth
RATES = [0.05 * 0.9**step for step in range(NUM_STEPS)]


def oracle(n):
    """The weights of all ranks after each step; the second part has twice the learning rate."""
    numel, factor = sum(SIZES), [1.0] * SIZES[0] + [2.0] * SIZES[1]
    weights, m = ([[0.0] * numel for _ in range(n)] for _ in range(2))
    v, reference, sums, num_refreshes, history = [0.0] * numel, [0.0] * numel, [0.0] * numel, 0, []
    u = [[0.0] * numel for _ in range(n)]
    for step in range(1, NUM_STEPS + 1):
        targets = [target_of(rank, step - 1, numel).tolist() for rank in range(n)]
        grads = [[x - c for x, c in zip(weights[i], targets[i], strict=True)] for i in range(n)]
        if step in REFRESHES:
            grads = [[sum(g[e] for g in grads) / n for e in range(numel)]] * n
        grads = [[g + DECAY * x for g, x in zip(grads[i], weights[i], strict=True)] for i in range(n)]
        num_refreshes += step in REFRESHES
        for e in range(numel):
            if step in REFRESHES:
                v[e] = BETA2 * v[e] + (1 - BETA2) * grads[0][e] ** 2
            denominator = math.sqrt(v[e]) / math.sqrt(1 - BETA2**num_refreshes) + EPS
            rate = RATES[step - 1] * factor[e] / (1 - BETA1**step)
            sums[e] += rate
            for i in range(n):
                m[i][e] = BETA1 * m[i][e] + (1 - BETA1) * grads[i][e]
                weights[i][e] -= rate * m[i][e] / denominator
                u[i][e] += rate * m[i][e]
            if step in DUE:
                mean = sum(u[i][e] for i in range(n)) / n
                reference[e] -= mean / denominator
                for i in range(n):
                    weights[i][e], m[i][e] = reference[e], mean / sums[e]
            if step in DUE | REFRESHES:
                reference[e], sums[e] = weights[0][e], 0.0
                for i in range(n):
                    u[i][e] = 0.0
        history.append([list(x) for x in weights])
    return history


def _train(rank, world_size, saves_at):
    options = {"codec": "", "interval_doubling": 3, "max_interval": 4, "refresh_doubling": 2}
    with process_group():

        def wrapped():
            model = Quadratic(dtype=torch.float64)
            groups = [{"params": [part]} for part in model.parts]
            optimizer = bagua.optim.QAdam(
                groups, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, variance_floor=0.0, warmup_steps=WARMUP
            )
            return bagua.with_bagua(model, optimizer, algorithm="zero_one_adam", **options), optimizer

        model, optimizer = wrapped()
        results = []
        for step, base in enumerate(RATES):
            for group, factor in zip(optimizer.param_groups, (1.0, 2.0), strict=True):
                group["lr"] = base * factor
            results.append(step_once(model, optimizer, rank, step))
            if step in saves_at:
                saved = model.state_dict(), optimizer.state_dict(), model.bagua.state_dict()
                model.bagua.remove()
                model, optimizer = wrapped()
                for part, state in zip((model, optimizer, model.bagua), saved, strict=True):
                    part.load_state_dict(state)
        return results


@pytest.mark.parametrize("saves_at", [(), (4, 11, 16)])
def test_follows_the_oracle(pool4, saves_at):
    per_rank = pool4.run(_train, args=(saves_at,))
    for step, weights in enumerate(oracle(4)):
        for rank, expected in enumerate(weights):
            assert per_rank[rank][step] == pytest.approx(expected, rel=1e-9, abs=1e-12), (step + 1, rank)


def _equals_adam(rank, world_size):
    with process_group():
        results = []
        for name in ("gradient_allreduce", "zero_one_adam"):
            model = Quadratic(dtype=torch.float64)
            if name == "zero_one_adam":
                optimizer = bagua.optim.QAdam(model.parameters(), lr=0.05, warmup_steps=100, refresh_doubling=0)
            else:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
            bagua.with_bagua(model, optimizer, algorithm=name)
            results.append([step_once(model, optimizer, rank, step) for step in range(10)])
        assert results[0] == results[1]


def test_in_the_warm_up_with_v_refreshed_always_it_is_adam(pool2):
    pool2.run(_equals_adam)


def _one_bit(rank, world_size):
    """Returns how far the model is from the mean of the ranks' targets after each step; the last has rate 0."""
    with process_group():
        model = Quadratic(shapes=((64, 64),))
        optimizer = bagua.optim.QAdam(model.parameters(), lr=0.1, warmup_steps=20)
        bagua.with_bagua(model, optimizer, algorithm="zero_one_adam", interval_doubling=60, max_interval=4)
        targets = [target_of(other, 0, model.numel) + 1 for other in range(world_size)]
        mean, distances = torch.stack(targets).mean(0).float(), []
        for step in range(300):
            optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 299)
            optimizer.zero_grad()
            model(targets[rank].float()).backward()
            optimizer.step()
            distances.append(float((model.parts[0].detach().reshape(-1) - mean).norm() / mean.norm()))
        model.bagua.synchronize()
        assert_equal_on_all_ranks(model.state_dict())
        return distances


def test_trains_in_one_bit(pool4):
    """The rank's own target is at 0.77."""
    distances = pool4.run(_one_bit)[0]
    assert distances[0] > 0.9 and distances[-1] < 0.25 and math.isfinite(distances[-1]), distances[::30]


def _resumed(rank, world_size):
    """With residuals, and two optimizers of which one is behind the warm-up when the model is wrapped."""
    with process_group():
        results = []
        for saves_at in (None, 13):

            def wrapped():
                model = Quadratic(shapes=((64, 64), (32, 32)))
                optimizers = [bagua.optim.QAdam([part], lr=0.05, warmup_steps=5) for part in model.parts]
                return model, optimizers

            def wrap(model, optimizers):
                bagua.with_bagua(model, optimizers, algorithm="zero_one_adam", interval_doubling=3, max_interval=4)

            def step_all(model, optimizers, step):
                model.zero_grad()
                model(target_of(rank, step, model.numel).float()).backward()
                for optimizer in optimizers:
                    optimizer.step()

            model, optimizers = wrapped()
            for step in range(6):
                model.zero_grad()
                model(target_of(0, step, model.numel).float()).backward()
                optimizers[0].step()
            before = [part.detach().clone() for part in model.parts]
            wrap(model, optimizers)
            for step in range(20):
                step_all(model, optimizers, step)
                if step == 0:
                    moved = [float((part - was).abs().max()) for part, was in zip(model.parts, before, strict=True)]
                    assert max(moved) < 0.2, moved  # a few learning rates
                if step == saves_at:
                    states = [copy.deepcopy(one.state_dict()) for one in (model, *optimizers, model.bagua)]
                    model, optimizers = wrapped()
                    wrap(model, optimizers)
                    for one, state in zip((model, *optimizers, model.bagua), states, strict=True):
                        one.load_state_dict(state)
            results.append(torch.cat([part.detach().reshape(-1) for part in model.parts]))
        assert torch.equal(*results)


def test_resumes_bit_for_bit_and_optimizers_warm_up_by_themselves(pool2):
    pool2.run(_resumed)


def _comes_late(rank, world_size):
    with process_group():
        model = Quadratic()
        optimizer = bagua.optim.QAdam(model.parameters(), warmup_steps=2)
        bagua.with_bagua(model, optimizer, algorithm="zero_one_adam", find_unused_parameters=True)
        for step in range(4):
            optimizer.zero_grad()
            last = model.parts[1].square().sum() if step == 3 else 0.0
            (model.parts[0].square().sum() + last).backward()
            optimizer.step()


def _refused(rank, world_size):
    with process_group():
        model = Quadratic(dtype=torch.bfloat16)
        optimizer = bagua.optim.QAdam(model.parameters())
        with pytest.raises(InvalidArgument, match=r"torch.bfloat16 rounds away; keep weights in float32"):
            bagua.with_bagua(model, optimizer, algorithm="zero_one_adam")
        model, other = Quadratic(), Quadratic()
        optimizer, ahead = (bagua.optim.QAdam(one.parameters(), warmup_steps=2) for one in (model, other))
        bagua.with_bagua(model, optimizer, algorithm="zero_one_adam")
        for step in range(3):
            step_once(other, ahead, 0, step)
        optimizer.load_state_dict(ahead.state_dict())
        with pytest.raises(BaguaError, match=r"optimizers\[0\] has made 4 steps, expected 1: .* with_bagua after"):
            step_once(model, optimizer, rank, 0)


def test_refuses_what_it_cannot_train(pool2):
    pool2.run(_refused)


def test_refuses_a_parameter_that_comes_late(pool2):
    with pytest.raises(
        InvalidArgument, match=r"parts.1 has made 1 steps of 4, .* freeze it, or take algorithm 'qadam'"
    ):
        pool2.run(_comes_late)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_interval": 0}, "max_interval is 0, expected 1 or more"),
        ({"interval_doubling": 0}, "interval_doubling is 0, expected 1 or more"),
        ({"refresh_doubling": -1}, "refresh_doubling is -1, expected an integer of 0 or more"),
        ({"refresh_doubling": 16, "warmup_steps": "auto"}, "refresh_doubling is 16 with warmup_steps='auto'"),
        ({"state_dtype": "float16"}, "state_dtype is 'float16', expected 'float32' or 'bfloat16'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("zero_one_adam", options)
