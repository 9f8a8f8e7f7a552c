"""Bytes to and from a client, by hand: the same on any number of ranks, in compiled code, and as run_on sends."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, vmap

import bagua
from bagua import federated
from bagua.federated import Coded, Simulation
from bagua.federated.library.aggregators import Aggregator, Clip, Mean, Median, Quantize, SecureSum, Sum
from bagua.federated.verbs.placement import local_placement
from bagua.federated.verbs.verbs import chosen_chunk
from tests.conformance.training import process_group
from tests.distributed.worlds import SAME_TEST

SPLITS = ((3, 3), (4, 0, 2))
MODEL = {"w": torch.ones(3, 700), "b": torch.ones(5, dtype=torch.float16)}
ROWS = torch.arange(18.0).view(6, 3).cos()
MASK = torch.tensor([True, True, False, True, True, False])
WIRE = Quantize("minmax_uint8").wire_bytes(MODEL)
OWN = 3 * 700 * 4 + 5 * 2


def trained(model, y):
    return {"w": model["w"] * y[:, None], "b": model["b"] + 1}


def fedavg(model, y, mask):
    shared = federated.broadcast({"model": model, "rate": torch.tensor(0.5)})
    return federated.reduce_mean(federated.map_fn(lambda s, y: trained(s["model"], y), (shared, y)))


def in_chunks(model, y, mask):
    return federated.map_reduce(trained, (federated.broadcast(model), y), reduce="mean", chunk_size=2)


def counted(model, y, mask):
    """Integers, and a weighted mean, which sends products in float32 and the weights."""
    mapped = federated.map_fn(trained, (federated.broadcast(model), y))
    return federated.reduce_sum((y > 0).to(torch.int16)), federated.reduce_weighted_mean(mapped, y[:, 0], mask=mask)


def through(*steps, masked=False):
    aggregate = Aggregator(*steps)

    def program(model, y, mask):
        value = federated.map_fn(trained, (federated.broadcast(model), y))
        return aggregate(value, aggregate.init(model), mask=mask if masked else None)[0]

    return program


def of_each(model, y, mask):
    return federated.gather(federated.map_fn(trained, (federated.broadcast(model), y)))


def loss(model, y):
    value = federated.map_fn(lambda m, y: (trained(m, y)["w"] ** 2).sum(), (federated.broadcast(model), y))
    return federated.reduce_mean(value)


def gradient(model, y, mask):
    return grad(lambda w: loss({"w": w, "b": MODEL["b"]}, y))(model["w"])


def of_a_batch(model, y, mask):
    batch = {name: torch.stack([leaf] * 4) for name, leaf in model.items()}
    return vmap(lambda model: through(Quantize("minmax_uint8"))(model, y, mask))(batch)


def with_shards(model, y, mask):
    """A sum over ranks that hold one client together is none between clients and the server."""
    client = lambda m: federated.reduce_from_group(m["w"], SELF[0]).sum()  # noqa: E731
    return federated.reduce_sum(federated.map_fn(client, federated.broadcast(model)))


SELF = []  # a group of this rank alone
PROGRAMS = {  # with the bytes down and up
    "fedavg": (fedavg, OWN + 4, OWN),
    "in chunks": (in_chunks, OWN, OWN),
    "counted": (counted, OWN, 3 * 2 + 2105 * 4 + 4),
    "sum": (through(Sum()), OWN, OWN),
    "quantized": (through(Clip(1e6), Quantize("minmax_uint8")), OWN, WIRE),
    "quantized, masked": (through(Quantize("minmax_uint8"), Sum(), masked=True), OWN, WIRE),
    "secure": (through(SecureSum(24, 8), Mean(), masked=True), OWN, 2106 * 3),
    "quantized and secure": (through(Quantize("bf16"), SecureSum(20, 4)), OWN, (2105 * 20 + 7) // 8),
    "median": (through(Median()), OWN, OWN),
    "of each": (of_each, OWN, OWN),
    # The model and the cotangent of the mean; the loss and the sum of the cotangents.
    "gradient": (gradient, OWN + 4, 4 + 2100 * 4),
    "of a batch": (of_a_batch, 4 * OWN, 4 * WIRE),
}


def run(name, split=None):
    function, *_ = PROGRAMS[name]
    program = federated.program(function, clients=6, num_local=split)
    mine = slice(0, 6) if split is None else federated.local_slice(6, num_local=split)
    with federated.record() as verbs:
        program(MODEL, ROWS[mine], MASK[mine])
    return verbs.bytes_down, verbs.bytes_up


def on_ranks(rank, world_size, split):
    with process_group():
        found = {name: run(name, split) for name in PROGRAMS}
        SELF[:] = [bagua.new_group([one]) for one in range(world_size)][rank : rank + 1]
        program = federated.program(with_shards, clients=6, num_local=split)
        mine = federated.local_slice(6, num_local=split)
        with federated.record() as verbs:
            program(MODEL, ROWS[mine], MASK[mine])
    return found, list(verbs), verbs.bytes_down, verbs.bytes_up


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_of_a_client(name):
    _, down, up = PROGRAMS[name]
    assert run(name) == (down, up)


@pytest.mark.parametrize("split", [SPLITS[1], pytest.param(SPLITS[0], marks=SAME_TEST)], ids=str)
def test_they_are_the_same_on_ranks(pools, split):
    expected = {name: (down, up) for name, (_, down, up) in PROGRAMS.items()}
    for found, *with_shards in pools[len(split)].run(on_ranks, args=(split,)):
        assert found == expected
        assert with_shards == [["broadcast", "reduce_sum", "reduce_sum"], OWN, 4]


@pytest.mark.slow("test_bytes_of_a_client")
@pytest.mark.parametrize("name", ["fedavg", "quantized"])
def test_they_are_the_same_in_compiled_code(name):
    torch.compiler.reset()
    function, down, up = PROGRAMS[name]
    program = federated.program(function, clients=6)
    compiled = torch.compile(lambda model: program(model, ROWS, MASK), backend="aot_eager")
    compiled(MODEL)
    with federated.record() as verbs:
        compiled(MODEL)
    assert (verbs.bytes_down, verbs.bytes_up) == (down, up)


@pytest.mark.parametrize("name", ["counted", "quantized", "quantized and secure"])
def test_a_graph_counts_as_its_program(name):
    """Of a secure sum it has the sum, of whose values masks and bits are ``run_on``'s."""
    function, down, up = PROGRAMS[name]
    graph = federated.trace(federated.program(function, clients=6), MODEL, ROWS, MASK)
    with federated.record() as verbs:
        graph(MODEL, ROWS, MASK)
    assert (verbs.bytes_down, verbs.bytes_up) == (down, OWN if name == "quantized and secure" else up)


MANY, LARGE = 14, torch.zeros(400_000)  # so many clients of that size are computed in chunks


def of_many(num_ranks):
    aggregate = Aggregator(Quantize("minmax_uint8"))
    program = federated.program(lambda y: aggregate(y, aggregate.init(LARGE))[0], clients=MANY)
    with federated.record() as verbs:
        program(LARGE.expand(MANY // num_ranks, -1))
    return verbs.bytes_up


def of_many_on_ranks(rank, world_size):
    with process_group():
        return of_many(world_size)


def test_bytes_do_not_depend_on_chunks(pool2):
    """On a rank the last chunk is smaller than the others."""
    sizes = {number: local_placement("clients", number) for number in (MANY, MANY // 2)}
    assert [chosen_chunk([LARGE.expand(number, -1)], clients) for number, clients in sizes.items()] == [5, 4]
    wire = Quantize("minmax_uint8").wire_bytes(LARGE)
    assert [of_many(1), *pool2.run(of_many_on_ranks)] == [wire] * 3


def test_a_record_inside_of_another_counts_for_both():
    program = federated.program(lambda y: federated.reduce_sum(y), clients=6)
    with federated.record() as outer:
        program(ROWS)
        with federated.record() as inner:
            program(ROWS)
    assert (inner, inner.bytes_up) == (["reduce_sum"], 12) and (outer, outer.bytes_up) == (["reduce_sum"] * 2, 24)


def test_figures_are_what_a_platform_sends():
    """A large model, beside which the text of a program is small."""
    size, clients = 100_000, 3
    rows = torch.randn(clients, size, generator=torch.Generator().manual_seed(1))

    @federated.program(clients=clients)
    def exact(x, y):
        return federated.reduce_mean(federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y)))

    @federated.program(clients=clients)
    def coded(x, y):
        aggregate = Aggregator(Quantize("minmax_uint8"))
        values = federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y))
        return aggregate(values, aggregate.init(x))[0] / clients

    simulation = Simulation(
        lambda x, round: (x + coded(x, rows[round.clients]), {}),
        torch.zeros(size),
        population=clients,
        cohort=clients,
        seed=1,
    )
    (figures,) = simulation.run(1)
    graph = federated.trace(exact, rows[0], rows)
    platform = federated.IsolatedClients([federated.Client.in_the_clear(y=row) for row in rows])
    coding = Coded("minmax_uint8")
    found = federated.run_on(platform, graph, coding=coding, x=torch.zeros(size))
    torch.testing.assert_close(found, simulation.state, rtol=0, atol=1e-6)
    cost = federated.cost_of(graph, coding=coding)
    for name in ("bytes_down", "bytes_up"):
        assert getattr(platform, name) == sum(getattr(cost, name)) == pytest.approx(figures[name], rel=0.01)
    assert figures["bytes_up"] == Quantize("minmax_uint8").wire_bytes(rows[0])
