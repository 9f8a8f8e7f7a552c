"""Clients that are left out for what they have: by filters of an aggregator, and by masks of map_reduce."""

from __future__ import annotations

import re

import pytest
import torch
from torch.func import grad, jvp

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library.aggregators import Aggregator, Clip, Finite, Mean, Median, NormBelow, SecureSum, Sum
from tests.conformance.training import process_group

NAN, INF = float("nan"), float("inf")
ROWS = torch.tensor([[3.0, 4.0], [NAN, 1.0], [0.5, -0.25], [30.0, 40.0], [1.0, INF], [-2.0, 1.0]])
MASK = torch.tensor([True, True, True, True, True, False])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
KEPT = {"finite": [0, 2, 3], "norm": [0, 2], "both": [0, 2]}  # of MASK
FILTERS = {"finite": (Finite(),), "norm": (NormBelow(10.0),), "both": (Finite(), NormBelow(10.0))}
LEFT_OUT = {"finite": [2], "norm": [3], "both": [2, 1]}


def aggregated(chain, rows, num_local=None, **options):
    aggregate = Aggregator(*chain)
    mine = federated.local_slice(6, num_local=num_local)
    options = {name: value[mine] for name, value in options.items()}

    @federated.program(clients=6, num_local=num_local)
    def program(rows, state):
        return aggregate({"a": rows[:, :1], "b": rows[:, 1:]}, state, **options)

    value, state = program(rows[mine], aggregate.init({"a": torch.zeros(1), "b": torch.zeros(1)}))
    return torch.cat([value["a"], value["b"]]), [int(number) for number in state if isinstance(number, torch.Tensor)]


def expected(kept, weights=None):
    """The weighted mean in a loop."""
    total, weight = torch.zeros(2), 0.0
    for client in kept:
        one = 1.0 if weights is None else float(weights[client])
        total, weight = total + one * ROWS[client], weight + one
    return total / weight


def on_ranks(rank, world_size, num_local):
    with process_group():
        return {
            (name, is_weighted): aggregated(
                (*FILTERS[name], Mean()), ROWS, num_local, mask=MASK, **({"weights": WEIGHTS} if is_weighted else {})
            )
            for name in FILTERS
            for is_weighted in (False, True)
        }


@pytest.mark.parametrize("split", [(3, 3), (4, 0, 2)], ids=str)
def test_the_mean_is_of_those_that_pass_on_any_number_of_ranks(pools, split):
    for found in pools[len(split)].run(on_ranks, args=(split,)):
        for (name, is_weighted), (value, left_out) in found.items():
            torch.testing.assert_close(value, expected(KEPT[name], WEIGHTS if is_weighted else None))
            assert left_out == LEFT_OUT[name]


def test_other_reductions_leave_them_out_too():
    assert aggregated((Finite(), Sum()), ROWS, mask=MASK)[0].tolist() == [33.5, 43.75]
    torch.testing.assert_close(aggregated((Finite(), SecureSum(), Mean()), ROWS, mask=MASK)[0], expected([0, 2, 3]))
    value, left_out = aggregated((NormBelow(10.0), Median()), ROWS)
    assert (value.tolist(), left_out) == ([0.5, 1.0], [3])
    clipped = ROWS[[0, 2, 5]] * torch.tensor([[1 / 5], [1.0], [1 / 5**0.5]])
    torch.testing.assert_close(aggregated((NormBelow(10.0), Clip(1.0), Mean()), ROWS)[0], clipped.mean(0))


def test_derivatives_are_those_of_the_clients_that_pass():
    aggregate = Aggregator(NormBelow(10.0), Mean())
    data = torch.tensor([1.0, 2.0, 100.0])

    @federated.program(clients=3)
    def loss(x):
        values = federated.map_fn(lambda x, y: (x * y).sin() + y, (federated.broadcast(x), data))
        return aggregate(values, aggregate.init(x))[0] ** 2

    def in_a_loop(x):
        return (sum((x * y).sin() + y for y in data[:2]) / 2) ** 2

    x = torch.tensor(0.3)
    torch.testing.assert_close(loss(x), in_a_loop(x))
    torch.testing.assert_close(grad(loss)(x), grad(in_a_loop)(x))
    torch.testing.assert_close(jvp(loss, (x,), (torch.tensor(2.0),))[1], jvp(in_a_loop, (x,), (torch.tensor(2.0),))[1])


def test_on_isolated_clients():
    aggregate = Aggregator(Finite(), NormBelow(10.0), Mean())
    program = federated.program(lambda rows, state: aggregate(rows, state), clients=6)
    graph = federated.trace(program, torch.ones(6, 2), aggregate.init(torch.zeros(2)))
    clients = federated.IsolatedClients([federated.Client(rows=row) for row in ROWS])
    value, state = federated.run_on(clients, graph, state=aggregate.init(torch.zeros(2)))
    torch.testing.assert_close(value, expected([0, 2, 5]), atol=1e-6, rtol=1e-6)
    assert [int(number) for number in state[:2]] == [2, 1]


def test_a_round_with_nobody_left_is_said_so_by_its_number():
    aggregate = Aggregator(Finite(), Mean())

    def step(state, round):
        values = torch.full((2, 3), NAN if round.number == 2 else 1.0)
        return federated.program(lambda v: aggregate(v, aggregate.init(state))[0], clients=2)(values), {}

    run = federated.Simulation(step, torch.zeros(3), population=4, cohort=2, seed=1)
    with pytest.raises(InvalidArgument, match="in round 2: .*add up to 0"):
        run.run(4)
    assert run.round == 2
    assert run.state.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormBelow(0.0), "NormBelow(norm=0.0), expected a finite number above 0"),
        (lambda: Aggregator(Clip(1.0), Finite()), "steps in the order Clip, Finite, expected: filters, clip"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        make()


# --- gather


def gathered_on_ranks(rank, world_size, num_local):
    with process_group():
        mine = federated.local_slice(6, num_local=num_local)
        rows = {"a": ROWS.nan_to_num(1.0, 2.0)[mine], "n": torch.arange(6)[mine]}

        @federated.program(clients=6, num_local=num_local)
        def program(x):
            values = federated.map_fn(lambda x, row: (x * row).sin(), (federated.broadcast(x), rows["a"]))
            everyone = federated.gather({"values": values, "n": rows["n"]})
            return everyone, (everyone["values"] * torch.arange(6.0)[:, None]).sum()

        x = torch.tensor([0.3, -0.2])
        return program(x)[0], grad(lambda x: program(x)[1])(x), jvp(lambda x: program(x)[1], (x,), (x,))[1]


@pytest.mark.parametrize("split", [(3, 3), (4, 0, 2)], ids=str)
def test_gathered_values_and_their_derivatives(pools, split):
    x, rows = torch.tensor([0.3, -0.2]), ROWS.nan_to_num(1.0, 2.0)

    def in_a_loop(x):
        return sum(client * (x * rows[client]).sin().sum() for client in range(6))

    for everyone, gradient, tangent in pools[len(split)].run(gathered_on_ranks, args=(split,)):
        assert everyone["n"].tolist() == list(range(6))
        torch.testing.assert_close(everyone["values"], torch.stack([(x * row).sin() for row in rows]))
        torch.testing.assert_close(gradient, grad(in_a_loop)(x))
        torch.testing.assert_close(tangent, jvp(in_a_loop, (x,), (x,))[1])


def test_what_isolated_clients_have_is_not_gathered():
    with pytest.raises(InvalidArgument, match="gather in a traced program, whose clients' values stay with them"):
        federated.trace(federated.program(lambda x: federated.gather(x).sum(), clients=3), torch.ones(3))


# --- map_reduce


def reduced(reduce, rows, mask, num_local=None, chunk_size=None):
    mine = federated.local_slice(6, num_local=num_local)

    def of_client(x, row):
        value = {"a": (x * row[0]).sin(), "n": row[1].to(torch.float64)}
        return (value, row[0] + 5) if reduce == "weighted_mean" else value

    @federated.program(clients=6, num_local=num_local)
    def program(x):
        arguments = (federated.broadcast(x), rows[mine])
        return federated.map_reduce(of_client, arguments, reduce=reduce, mask=mask[mine], chunk_size=chunk_size)

    return program


def reduced_in_a_loop(reduce, x, kept):
    a = n = weights = 0.0
    for client in kept:
        weight = ROWS[client, 0] + 5 if reduce == "weighted_mean" else 1.0
        a, n = a + weight * (x * ROWS[client, 0]).sin(), n + weight * ROWS[client, 1].double()
        weights = weights + weight
    weights = 1.0 if reduce == "sum" else weights
    return {"a": a / weights, "n": n / weights}


KINDS = ("sum", "mean", "weighted_mean")
PRESENT = torch.tensor([True, False, True, True, False, True])  # those whose rows are finite


def masked_on_ranks(rank, world_size, num_local):
    with process_group():
        x = torch.tensor(0.7)
        found = {}
        for kind in KINDS:
            program = reduced(kind, ROWS, PRESENT, num_local, chunk_size=2)
            # The derivative of a client that is left out has to be finite.
            finite = reduced(kind, ROWS.nan_to_num(1.0, 2.0), PRESENT, num_local, chunk_size=2)
            found[kind] = (program(x), grad(lambda x: finite(x)["a"] ** 2)(x))  # noqa: B023
        return found


@pytest.mark.parametrize("split", [(3, 3), (4, 0, 2)], ids=str)
def test_masks_of_map_reduce_on_any_number_of_ranks(pools, split):
    x, kept = torch.tensor(0.7), [0, 2, 3, 5]
    for found in pools[len(split)].run(masked_on_ranks, args=(split,)):
        for kind, (value, gradient) in found.items():
            in_a_loop = lambda x: reduced_in_a_loop(kind, x, kept)  # noqa: B023, E731
            for name, one in in_a_loop(x).items():
                torch.testing.assert_close(value[name], one.to(value[name].dtype), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(gradient, grad(lambda x: in_a_loop(x)["a"] ** 2)(x), rtol=1e-4, atol=1e-5)  # noqa: B023


def test_masks_that_are_none():
    program = reduced("mean", ROWS, torch.zeros(6, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="add up to 0"):
        program(torch.tensor(0.7))
    with pytest.raises(InvalidArgument, match=r"map_reduce: mask of shape \[5\], expected \[6\]"):
        reduced("mean", ROWS, torch.ones(5, dtype=torch.bool))(torch.tensor(0.7))
    with pytest.raises(InvalidArgument, match="map_reduce: mask of torch.float32, expected torch.bool"):
        reduced("mean", ROWS, torch.ones(6))(torch.tensor(0.7))
