"""Error feedback of clients' codecs in simulations, against a loop over clients, and against clients of run_on."""

from __future__ import annotations

import pytest
import torch

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated import Availability, ClientStore, Coded, Simulation, sampling
from bagua.federated.library.aggregators import quantize
from bagua.federated.library.sampling import seed_of
from tests.conformance.training import process_group
from tests.distributed.worlds import SAME_TEST, fast_in

POPULATION, COHORT, SEED, SIZE, ROUNDS = 9, 5, 3, 2500, 4
ROWS = torch.randn(POPULATION, SIZE, generator=torch.Generator().manual_seed(1))
AVAILABILITY = Availability(dropout=0.3)


def simulation(codec, cohort=COHORT, availability=AVAILABILITY, split=None):
    @federated.program(clients=cohort, num_local=split)
    def change(x, y, residual, mask, seed):
        values = federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y))
        parts = {"a": values[:, :2000], "b": values[:, 2000:], "loss": values.square().mean(1)}
        sent, residual = quantize(parts, residual, codec, seed=seed)
        return federated.reduce_weighted_mean(sent, torch.ones_like(y[:, 0]), mask=mask), residual

    def step(x, round):
        seed = round.seed if bagua.codecs.get(codec).is_random else None
        mean, rows = change(x, ROWS[round.clients], round.client_state, round.mask, seed)
        return x + 0.5 * torch.cat([mean["a"], mean["b"]]), {"loss": mean["loss"]}, rows

    store = ClientStore({"a": torch.zeros(2000), "b": torch.zeros(SIZE - 2000), "loss": torch.zeros(())})
    run = Simulation(
        step,
        torch.zeros(SIZE),
        population=POPULATION,
        cohort=cohort,
        seed=SEED,
        availability=availability,
        clients=store,
        num_local=split,
    )
    return run, store


def in_a_loop(codec):
    """Clients that do not get through keep what they had."""
    coding, kept, x = bagua.codecs.get(codec), torch.zeros(POPULATION, SIZE), torch.zeros(SIZE)
    for number in range(ROUNDS):
        cohort = sampling.cohort(POPULATION, COHORT, seed=SEED, round=number)
        there = AVAILABILITY.mask(cohort, seed=SEED, round=number).tolist()
        total = torch.zeros(SIZE)
        for place, client in enumerate(cohort.tolist()):
            if there[place]:
                key = seed_of(seed_of(seed_of(SEED, "round", number), "quantize"), 0, place)
                value = ROWS[client] - x + kept[client]
                decoded = coding.decode(coding.encode(value, key=key), SIZE, torch.float32)
                kept[client] = value - decoded
                total += decoded
        x = x + 0.5 * total / sum(there)
    return x, kept


@fast_in("codec", ["qsgd:bits=4"], ["topk:k=8", "onebit", "qsgd:bits=4"])
def test_rounds_are_those_of_a_loop(codec):
    run, store = simulation(codec)
    run.run(ROUNDS)
    x, kept = in_a_loop(codec)
    torch.testing.assert_close(run.state, x, rtol=0, atol=1e-5)
    rows = store.rows(range(POPULATION))
    torch.testing.assert_close(torch.cat([rows["a"], rows["b"]], 1), kept, rtol=0, atol=1e-5)
    assert kept.any(1).sum() > COHORT and not rows["loss"].any()


def on_ranks(rank, world_size, split):
    with process_group():
        run, store = simulation("topk:k=8", split=split)
        run.run(ROUNDS)
        rows = store.rows(range(rank, POPULATION, world_size))
    return run.state, torch.cat([rows["a"], rows["b"]], 1)


@pytest.mark.parametrize("split", [(4, 0, 1), pytest.param((3, 2), marks=SAME_TEST)], ids=str)
def test_on_ranks(pools, split):
    x, kept = in_a_loop("topk:k=8")
    for rank, (state, rows) in enumerate(pools[len(split)].run(on_ranks, args=(split,))):
        torch.testing.assert_close(state, x, rtol=0, atol=1e-5)
        torch.testing.assert_close(rows, kept[rank :: len(split)], rtol=0, atol=1e-5)


@fast_in("codec", ["topk:k=8"], ["topk:k=8", "minmax_uint8"])
def test_a_simulation_is_what_clients_somewhere_else_do(codec):
    """They differ by the rounding of float32 in the sums; a loss, which is a number, travels as it is."""
    run, _ = simulation(codec, cohort=POPULATION, availability=Availability())

    @federated.program(clients=POPULATION)
    def change(x, y):
        values = federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y))
        parts = {"a": values[:, :2000], "b": values[:, 2000:], "loss": values.square().mean(1)}
        return federated.reduce_mean(parts)

    x = torch.zeros(SIZE)
    graph = federated.trace(change, x, ROWS)
    platform = federated.IsolatedClients([federated.Client.in_the_clear(y=row) for row in ROWS])
    for number in range(ROUNDS):
        mean = federated.run_on(platform, graph, coding=Coded(codec), x=x)
        x = x + 0.5 * torch.cat([mean["a"], mean["b"]])
        (figures,) = run.run(number + 1)
        torch.testing.assert_close(run.state, x, rtol=0, atol=1e-5)
        assert figures["loss"] == pytest.approx(float(mean["loss"]), abs=1e-4)
    wire = bagua.codecs.get(codec).wire_bytes(SIZE, torch.float32)
    assert figures["bytes_up"] == wire + 8  # with the loss and the weight
    assert wire < platform.bytes_up < wire + 250


def test_halves_keep_what_their_rounding_loses():
    values = torch.full((1, 3000), 1 + 2**-10, dtype=torch.float16)
    residual = torch.full((1, 3000), 2.0**-14)
    program = federated.program(lambda v, r: quantize(v, r, "bf16"), clients=1)
    sent, kept = program(values, residual)
    assert sent.dtype is torch.float16 and kept.dtype is torch.float32
    assert torch.equal(sent.float() + kept, values.float() + residual) and not torch.equal(sent, values)


def test_what_is_not_finite_is_seen_and_not_kept():
    values, residual = torch.ones(2, 100), torch.full((2, 100), 0.25)
    values[1, 3] = float("nan")
    sent, kept = federated.program(lambda v, r: quantize(v, r, "topk:k=8"), clients=2)(values, residual)
    assert sent[0].isfinite().all() and sent[1].isnan().any()
    assert torch.equal(kept[1], residual[1]) and not torch.equal(kept[0], residual[0])


def test_derivatives_go_straight_through():
    values, residual = torch.randn(2, 100), torch.randn(2, 100)
    weights = torch.arange(100.0)

    @federated.program(clients=2)
    def loss(values):
        sent, kept = quantize(values, residual, "topk:k=8")
        return federated.reduce_sum(sent) @ weights + federated.reduce_sum(kept).sum()

    torch.testing.assert_close(torch.func.grad(loss)(values), weights.expand(2, 100))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((torch.zeros(2, 3), torch.zeros(2, 3), "qsgd"), "'qsgd', which rounds at random: give a seed"),
        ((torch.zeros(2, 3), torch.zeros(2, 3), "qsgd:bits=2", 1), "error_feedback=True diverges"),
        ((torch.zeros(2, 3).double(), torch.zeros(2, 3), "topk"), "quantize by 'topk' of torch.float64, expected one"),
        ((torch.zeros(2, 3), torch.zeros(2, 4), "topk"), "with residuals .* zeros before the first round"),
        ((torch.zeros(2, 3), [torch.zeros(2, 3)], "topk"), "with residuals"),
        ((torch.zeros(2, 3).half(), torch.zeros(2, 3).half(), "topk"), "with residuals .*float16"),
        ((torch.zeros(2, 3), torch.zeros(3), "topk"), "expected 2 as the first axis"),
    ],
)
def test_mistakes(arguments, message):
    value, residual, codec, *seed = arguments
    program = federated.program(lambda: quantize(value, residual, codec, seed=seed[0] if seed else None), clients=2)
    with pytest.raises(InvalidArgument, match=message):
        program()


def test_codecs_at_random_are_not_traced():
    program = federated.program(lambda v, r: federated.reduce_sum(quantize(v, r, "qsgd", seed=1)[0]), clients=2)
    with pytest.raises(InvalidArgument, match="in a traced program, whose clients do not know their numbers"):
        federated.trace(program, torch.zeros(2, 3), torch.zeros(2, 3))
