"""low_precision_decentralized: replicas that stay equal bit for bit, and its formula in plain float64 loops."""

from __future__ import annotations

import itertools

import pytest
import torch

import bagua
from bagua.errors import InvalidArgument
from tests.algorithms.quadratic import Quadratic, step_once, target_of
from tests.conformance.training import process_group
from tests.distributed.worlds import fast_in

LR = 0.2


@pytest.fixture(scope="module")
def pool3():
    from bagua.testing import Pool

    with Pool(3) as pool:
        yield pool


def oracle(n, numel, num_steps, interval):
    """Without the rounding of C, element by element: w, and the neighbours' w in the place of L and R."""
    w = [[0.0] * numel for _ in range(n)]
    x = [[0.0] * numel for _ in range(n)]
    history = []
    for step in range(num_steps):
        targets = [target_of(rank, step, numel).tolist() for rank in range(n)]
        x = [[value - LR * (value - c) for value, c in zip(x[i], targets[i], strict=True)] for i in range(n)]
        if step % interval == 0:
            z = [
                [x[i][e] + w[(i - 1) % n][e] / 3 + w[(i + 1) % n][e] / 3 - 5 / 3 * w[i][e] for e in range(numel)]
                for i in range(n)
            ]
            w = [[w[i][e] + z[i][e] for e in range(numel)] for i in range(n)]
            x = [list(row) for row in w]
        history.append(x)
    return history


def _train(rank, world_size, codec, interval, dtype):
    with process_group():
        model = Quadratic([(130, 20), (5,)], dtype=dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(
            model,
            optimizer,
            algorithm="low_precision_decentralized",
            codec=codec,
            interval=interval,
            bucket_bytes=3000,
        )
        history = []
        for step in range(8):
            history.append(step_once(model, optimizer, rank, step))
            everyone = bagua.get_default_group().all_gather_object(model.bagua.state_dict()["state"]["replicas"])
            for bucket, (own, left, right) in everyone[rank].items():
                assert torch.equal(left, everyone[(rank - 1) % world_size][bucket][0]), step
                assert torch.equal(right, everyone[(rank + 1) % world_size][bucket][0]), step
                if step % interval == 0:
                    flat = torch.cat([m.parameter.detach().reshape(-1) for m in model.bagua.buckets[bucket].members])
                    places = [model.bagua.buckets[bucket].place_of(m) for m in model.bagua.buckets[bucket].members]
                    assert torch.equal(flat, torch.cat([own[begin:end] for begin, end in places]).to(dtype)), step
        return history


TOLERANCES = {"fp16": 3e-3, "minmax_uint8": 0.1, "qsgd": 0.25, "qsgd:bits=4": 3.0}


@fast_in(
    "size, codec",
    [(2, "fp16"), (4, "minmax_uint8")],
    list(itertools.product([2, 3, 4], TOLERANCES)),
)
def test_replicas_are_equal_and_follow_the_oracle(pool2, pool3, pool4, size, codec):
    tolerance = TOLERANCES[codec]
    pool = {2: pool2, 3: pool3, 4: pool4}[size]
    per_rank = pool.run(_train, args=(codec, 1, torch.float32))
    expected = oracle(size, Quadratic([(130, 20), (5,)]).numel, 8, 1)
    for step, weights in enumerate(expected):
        for rank in range(size):
            assert per_rank[rank][step] == pytest.approx(weights[rank], abs=tolerance), (step, rank)


@fast_in("dtype", [torch.bfloat16, torch.float64], [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(pool3, dtype):
    """Replicas are float32 whatever the weights are; what no codec encodes is averaged at full precision."""
    tolerance = {torch.float16: 0.02, torch.bfloat16: 0.1, torch.float64: 1.2}[dtype]
    per_rank = pool3.run(_train, args=("fp16", 1, dtype))
    if dtype == torch.float64:
        spread = max(abs(a - b) for a, b in zip(per_rank[0][-1], per_rank[1][-1], strict=True))
        assert spread < 1e-12  # on a ring of three all ranks are neighbours, and x <- mean x comes last
        return
    expected = oracle(3, Quadratic([(130, 20), (5,)]).numel, 8, 1)
    assert per_rank[0][-1] == pytest.approx(expected[-1][0], abs=tolerance)


def _one_step(rank, world_size, codec):
    """From replicas and weights as they are, one step: w + D(C(z)), with z in float64."""
    with process_group():
        model = Quadratic([(64, 64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized", codec=codec)
        for step in range(3):
            step_once(model, optimizer, rank, step)
        own, left, right = model.bagua.state_dict()["state"]["replicas"][0]
        weight = model.parts[0].detach().double().reshape(-1)
        step_once(model, optimizer, rank, 3)
        x = weight - LR * (weight - target_of(rank, 3, 4096).float())
        z = x + left.double() / 3 + right.double() / 3 - own.double() * 5 / 3
        encoder = bagua.codecs.get(codec)
        bound = encoder.error_bound(z.float())
        moved = model.bagua.state_dict()["state"]["replicas"][0][0].double() - own.double()
        assert bool(((moved - z).abs() <= 1.02 * bound + 1e-5).all())
        assert float((moved - z).abs().max()) > 0  # it was rounded


@fast_in("codec", ["minmax_uint8"], ["minmax_uint8", "qsgd:bits=4", "bf16"])
def test_one_step_is_the_formula(pool4, codec):
    pool4.run(_one_step, args=(codec,))


def _long(rank, world_size):
    """Odd sizes leave padding, in which nothing may grow: on four ranks (-4/3)^step would."""
    with process_group():
        model = Quadratic([(7, 3), (5,), (11, 2)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized")
        for step in range(60):
            step_once(model, optimizer, rank, step % 4)
        for own, left, right in model.bagua.state_dict()["state"]["replicas"].values():
            assert float(torch.stack([own, left, right]).abs().max()) < 5


def test_padding_stays_zero(pool4):
    pool4.run(_long)


def _diverged(rank, world_size):
    with process_group(timeout_s=5.0):
        model = Quadratic([(64, 64)])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized")
        with torch.no_grad():
            model.parts[0][3, 3] = float("nan")
        with pytest.raises(InvalidArgument, match="weights of bucket 0 .*became NaN or Inf"):
            for step in range(3):
                step_once(model, optimizer, rank, step)


def test_weights_that_became_nan_are_reported(pool2):
    pool2.run(_diverged)


def _bytes(rank, world_size):
    with process_group():
        model = Quadratic([(256, 256)])
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.with_bagua(model, optimizer, algorithm="low_precision_decentralized")
        for step in range(4):
            step_once(model, optimizer, rank, step)
        return model.bagua.timeline().summary()["bytes_sent"] / 4


def test_sends_a_quarter_to_each_neighbour(pool4):
    for sent in pool4.run(_bytes):
        assert sent == pytest.approx(2 * 256 * 256 * 0.75, rel=0.05)  # the last of four steps is not counted yet
