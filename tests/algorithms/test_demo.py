"""demo beside its oracle in float64: the largest coefficients of a momentum, and what is left of it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from bagua.testing import Pool
from tests.conformance.training import assert_equal_on_all_ranks, process_group

SIDE, NUMEL, BETA = 64, 5000, 0.9  # a whole chunk and a short one
COSINES = torch.tensor(
    [
        [math.sqrt((1 if k == 0 else 2) / SIDE) * math.cos(math.pi * k * (2 * i + 1) / (2 * SIDE)) for i in range(SIDE)]
        for k in range(SIDE)
    ],
    dtype=torch.float64,
)


@pytest.fixture(scope="module")
def pool1():
    with Pool(1) as pool:
        yield pool


def gradient_of(rank, step, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * step + rank))


def sent_of(momentum, count):
    """The ``count`` largest coefficients of each 64 x 64 elements of a momentum, as elements."""
    sent = []
    for chunk in torch.nn.functional.pad(momentum, (0, -len(momentum) % SIDE**2)).view(-1, SIDE, SIDE):
        coefficients = COSINES @ chunk @ COSINES.T
        least = sorted(coefficients.abs().flatten().tolist())[-count]
        sent.append(COSINES.T @ torch.where(coefficients.abs() >= least, coefficients, 0) @ COSINES)
    return torch.cat([values.flatten() for values in sent])[: len(momentum)]


def wrapped(dtype=torch.float32, **options):
    model = torch.nn.ParameterDict({"weight": torch.zeros(NUMEL, dtype=dtype)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bagua.with_bagua(model, optimizer, algorithm="demo", momentum_decay=BETA, **options)
    return model, optimizer


def train_step(model, optimizer, rank, step):
    optimizer.zero_grad()
    (model["weight"] * gradient_of(rank, step).to(model["weight"].dtype)).sum().backward()
    optimizer.step()
    return model["weight"].grad.clone()


def _follows(rank, world_size):
    with process_group():
        model, optimizer = wrapped()
        momenta = [torch.zeros(NUMEL, dtype=torch.float64)] * world_size
        for step in range(4):
            momenta = [BETA * m + (1 - BETA) * gradient_of(r, step).double() for r, m in enumerate(momenta)]
            sent = [sent_of(momentum, 32) for momentum in momenta]
            momenta = [momentum - values for momentum, values in zip(momenta, sent, strict=True)]
            expected = sum(sent) / world_size
            result = train_step(model, optimizer, rank, step)
            assert_equal_on_all_ranks(dict(model.named_parameters()))
            torch.testing.assert_close(result, expected.float(), rtol=0, atol=2e-6)


def test_follows_the_oracle(pool4):
    pool4.run(_follows)


def _whole(rank, world_size):
    """What no codec is for is sent whole, so nothing is left of the momentum, and the mean counts as it would."""
    with process_group():
        model, optimizer = wrapped(dtype=torch.float64)
        for step in range(2):
            expected = sum((1 - BETA) * gradient_of(r, step).double() for r in range(world_size)) / world_size
            torch.testing.assert_close(train_step(model, optimizer, rank, step), expected)
        assert "does not encode torch.float64" in str(model.bagua.buckets[0].declaration)


def test_float64_is_sent_whole(pool2):
    pool2.run(_whole)


def _resumes(rank, world_size):
    """Loaded, training continues bit for bit; a backward with NaN leaves the momentum as it was."""
    with process_group():
        straight = [train_step(*pair, rank, step) for pair in [wrapped()] for step in range(6)]
        model, optimizer = wrapped()
        for step in range(3):
            train_step(model, optimizer, rank, step)
        saved = copy.deepcopy((model.state_dict(), model.bagua.state_dict()))
        model, optimizer = wrapped()
        model.load_state_dict(saved[0])
        model.bagua.load_state_dict(saved[1])
        (model["weight"] * float("nan")).sum().backward()
        assert bool(model["weight"].grad.isnan().all())
        assert all(torch.equal(train_step(model, optimizer, rank, step), straight[step]) for step in range(3, 6))


def test_resumes(pool2):
    pool2.run(_resumes)


def _written(rank, world_size, folder):
    with process_group():
        model, optimizer = wrapped()
        for step in range(3):
            train_step(model, optimizer, rank, step)
        bagua.save(folder, model, optimizer)
        return model.bagua.state_dict()["parameters"]["states"]["momentum"]["parameters"]["weight"].tolist()


def _read_alone(rank, world_size, folder):
    with process_group():
        model, optimizer = wrapped()
        bagua.load(folder, model, optimizer)
        return [train_step(model, optimizer, 0, step).tolist() for step in (3, 4)]


def test_a_single_rank_sends_what_two_have_kept(pool2, pool1, tmp_path):
    """The mean of their momenta at once, and from then on (1 - beta) g, since nothing is left."""
    momenta = torch.tensor(pool2.run(_written, args=(str(tmp_path),)))
    first, second = (torch.tensor(one) for one in pool1.run(_read_alone, args=(str(tmp_path),))[0])
    expected = BETA * momenta.mean(0) + (1 - BETA) * gradient_of(0, 3)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(second, (1 - BETA) * gradient_of(0, 4), rtol=1e-5, atol=1e-6)


def _bytes(rank, world_size):
    with process_group():
        model = torch.nn.Linear(1024, 1024, bias=False)
        bagua.with_bagua(model, algorithm="demo", check_replicas=False)
        group = bagua.get_default_group()
        model(torch.ones(1, 1024)).sum().backward()
        before = group.bytes_sent
        model.zero_grad()
        model(torch.ones(1, 1024)).sum().backward()
        assert str(model.bagua.buckets[0].declaration) == "all_gather, topk:chunk=4096,dct=1"
        return (group.bytes_sent - before) / (4 * 1024 * 1024)


def test_bytes_of_a_step(pool2):
    """To one other rank: 32 of 4096 elements in 44 bits each."""
    for share in pool2.run(_bytes):
        assert share == pytest.approx(32 * 44 / (4096 * 32), rel=0.01)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentum_decay": 1.0}, "momentum_decay is 1.0, expected 0 or more, and below 1"),
        ({"codec": "qsgd"}, "codec 'qsgd' is no contraction"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        bagua.algorithms.create("demo", options)
