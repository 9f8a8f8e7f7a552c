"""dgc beside its oracle in plain loops: what is sent, what waits, and how many are sent when."""

from __future__ import annotations

import copy

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import Pool
from tests.conformance.training import assert_equal_on_all_ranks, process_group
from tests.distributed.worlds import fast_in

CHUNK, SHAPE, NUMEL, MU, STEPS = 4096, (50, 100), 5000, 0.5, 7  # a whole chunk and a short one


@pytest.fixture(scope="module")
def pool1():
    with Pool(1) as pool:
        yield pool


def gradient_of(rank, step, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank)) * (1 + rank)


def oracle(num_ranks, counts):
    """The gradient that the optimizer gets, step by step; ``counts`` elements of a chunk are sent."""
    momenta = [[0.0] * NUMEL for _ in range(num_ranks)]
    unsent = [[0.0] * NUMEL for _ in range(num_ranks)]
    for step, count in enumerate(counts):
        result = [0.0] * NUMEL
        for rank in range(num_ranks):
            gradient = gradient_of(rank, step).double().flatten().tolist()
            momenta[rank] = [MU * m + g for m, g in zip(momenta[rank], gradient, strict=True)]
            unsent[rank] = [v + m for v, m in zip(unsent[rank], momenta[rank], strict=True)]
            for begin in range(0, NUMEL, CHUNK):
                places = range(begin, min(begin + CHUNK, NUMEL))
                for place in sorted(places, key=lambda i: -abs(unsent[rank][i]))[:count]:
                    result[place] += unsent[rank][place] / num_ranks
                    unsent[rank][place] = momenta[rank][place] = 0.0
        yield torch.tensor(result).view(SHAPE)


def wrapped(dtype=torch.float32, **options):
    model = torch.nn.ParameterDict({"weight": torch.zeros(SHAPE, dtype=dtype), "bias": torch.zeros(3)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.with_bagua(model, optimizer, algorithm="dgc", momentum=MU, **options)
    return model, optimizer


def train_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss = (model["weight"] * gradient_of(rank, step)).sum() + (model["bias"] * gradient_of(rank, step, (3,))).sum()
    loss.backward()
    optimizer.step()
    return model["weight"].grad.clone()


def _follows(rank, world_size, options, counts):
    with process_group():
        model, optimizer = wrapped(**options)
        bias = torch.zeros(3)
        for step, expected in enumerate(oracle(world_size, counts)):
            result = train_step(model, optimizer, rank, step)
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)
            bias = MU * bias + sum(gradient_of(r, step, (3,)) for r in range(world_size)) / world_size
            torch.testing.assert_close(model["bias"].grad, bias)
            assert_equal_on_all_ranks(dict(model.named_parameters()))


@fast_in(
    "options, counts",
    [({"k": 16, "warmup_steps": 4}, [256, 256, 64, 64, 16, 16, 16])],
    [({}, [8] * STEPS), ({"k": 256, "warmup_steps": 3}, [256] * STEPS)],
)
def test_follows_the_oracle(pool2, options, counts):
    pool2.run(_follows, args=(options, counts))


def _whole(rank, world_size):
    with process_group():
        model, optimizer = wrapped(dtype=torch.float64)
        expected = torch.zeros(SHAPE, dtype=torch.float64)
        for step in range(3):
            expected = MU * expected + sum(gradient_of(r, step) for r in range(world_size)) / world_size
            torch.testing.assert_close(train_step(model, optimizer, rank, step), expected, rtol=1e-6, atol=1e-6)


def test_float64_is_sent_whole(pool2):
    pool2.run(_whole)


def _resumes(rank, world_size):
    """Loaded within the warm-up, training continues bit for bit; a backward with NaN changes nothing that is kept."""
    options = {"k": 16, "warmup_steps": 4}
    with process_group():
        straight = [train_step(*pair, rank, step) for pair in [wrapped(**options)] for step in range(STEPS)]
        model, optimizer = wrapped(**options)
        for step in range(3):
            train_step(model, optimizer, rank, step)
        saved = copy.deepcopy((model.state_dict(), model.bagua.state_dict()))
        model, optimizer = wrapped(**options)
        model.load_state_dict(saved[0])
        model.bagua.load_state_dict(saved[1])
        assert all(torch.equal(train_step(model, optimizer, rank, step), straight[step]) for step in range(3, STEPS))


def test_resumes(pool2):
    pool2.run(_resumes)


def _written(rank, world_size, folder):
    with process_group():
        model, optimizer = wrapped()
        for step in range(3):
            train_step(model, optimizer, rank, step)
        bagua.save(folder, model, optimizer)
        states = model.bagua.state_dict()["parameters"]["states"]
        return [states[name]["parameters"]["weight"].tolist() for name in ("momentum", "unsent")]


def _read_alone(rank, world_size, folder):
    with process_group():
        model, optimizer = wrapped()
        bagua.load(folder, model, optimizer)
        return [train_step(model, optimizer, 0, step).tolist() for step in (3, 4)]


def test_a_single_rank_sends_what_two_have_kept(pool2, pool1, tmp_path):
    """The means of what has waited and of the momenta; from then on it is plain momentum."""
    momentum, unsent = torch.tensor(pool2.run(_written, args=(str(tmp_path),))).mean(0).view(2, *SHAPE)
    for result, step in zip(pool1.run(_read_alone, args=(str(tmp_path),))[0], (3, 4), strict=True):
        momentum = MU * momentum + gradient_of(0, step)
        torch.testing.assert_close(torch.tensor(result), momentum + unsent, rtol=1e-5, atol=1e-5)
        unsent = 0 * unsent


def _bytes(rank, world_size):
    with process_group():
        model = torch.nn.Linear(1024, 1024, bias=False)
        bagua.with_bagua(model, algorithm="dgc", check_replicas=False)
        group = bagua.get_default_group()
        model(torch.ones(1, 1024)).sum().backward()
        before = group.bytes_sent
        model.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        return (group.bytes_sent - before) / (4 * 1024 * 1024)


def test_bytes_of_a_step(pool2):
    """To one other rank: 8 of 4096 elements in 44 bits each."""
    for share in pool2.run(_bytes):
        assert share == pytest.approx(8 * 44 / (4096 * 32), rel=0.02)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentum": 1.0}, "momentum is 1.0, expected 0 or more, and below 1"),
        ({"k": 7}, "k"),
        ({"warmup_steps": -1}, "warmup_steps is -1, expected 0 or more"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("dgc", options)
