"""Broadcasts of changes, against a loop that keeps what the clients have; and clients that have missed some."""

from __future__ import annotations

import itertools

import pytest
import torch

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated import Coded, Deltas, FixedPoint, Simulation
from bagua.federated.programs import messages
from tests.conformance.training import process_group
from tests.distributed.worlds import in_turns

NUM_CLIENTS, SIZE = 3, 2500
ROWS = torch.randn(NUM_CLIENTS, SIZE, generator=torch.Generator().manual_seed(1))
XS = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(2)).cumsum(0)
HALF = torch.linspace(-1, 1, 2100).half()


@federated.program(clients=NUM_CLIENTS)
def program(x, late, rate, y):
    """`late` is sent in the second round, after what the first one has summed."""
    first = federated.reduce_sum(federated.map_fn(lambda x, r, y: r * x - y, (*federated.broadcast((x, rate)), y)))
    shared = federated.broadcast((late, first[:2100]))
    return first, federated.reduce_mean(federated.map_fn(lambda h, f, y: h.float() * f + y[:2100], (*shared, y)))


RATE = torch.tensor(0.5)
GRAPH = federated.trace(program, XS[0], HALF, RATE, ROWS)


class Saved(federated.IsolatedClients):
    """Of each client, only bytes are left between two requests; some stop answering at an exchange."""

    def __init__(self):
        super().__init__([federated.Client.in_the_clear(y=row) for row in ROWS])
        self.gone, self.number = {}, 0

    def exchange(self, request):
        number, self.number = self.number, self.number + 1
        there = [i for i in range(NUM_CLIENTS) if number < self.gone.get(i, 100)]
        replies = [self.clients[i].answer(request) for i in there]
        self.clients = [
            federated.Client.restore(one.state(), y=row) for one, row in zip(self.clients, ROWS, strict=True)
        ]
        return replies


class Kept:
    """What the clients have of one value."""

    def __init__(self, codec):
        self.codec, self.value = bagua.codecs.get(codec), None

    def send(self, value, is_whole=False):
        if self.value is None or is_whole:
            self.value = value.float()
        else:
            message = self.codec.encode(value.float() - self.value)
            self.value = self.value + self.codec.decode(message, value.numel(), torch.float32)
        return self.value.to(value.dtype)


def run(platform, deltas, number, **options):
    values = {"x": XS[number], "late": HALF * (number + 1), "rate": RATE}
    return federated.run_on(platform, GRAPH, deltas=deltas, **values, **options)


def check(found, kept, number, is_whole=False, atol=1e-5):
    x, late = kept[0].send(XS[number], is_whole), kept[1].send(HALF * (number + 1), is_whole)
    expected = program(x, late, RATE, ROWS)
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    exact = program(XS[number], HALF * (number + 1), RATE, ROWS)[0]
    assert is_whole or number == 0 or (found[0] - expected[0]).norm() < (found[0] - exact).norm()


OPTIONS = {"masked": {}, "any": {"threshold": 3}, "coded": {"coding": Coded("fp16")}}


@in_turns("kind, codec", list(OPTIONS), ["minmax_uint8", "topk:k=256"])
def test_runs_are_those_of_a_loop(kind, codec):
    platform, deltas, kept = Saved(), Deltas(codec), [Kept(codec), Kept(codec)]
    options = OPTIONS[kind]
    for number in range(4):
        check(run(platform, deltas, number, **options), kept, number, atol=0.05 if "coding" in options else 1e-5)


def test_a_client_that_has_missed_a_message_makes_all_get_whole_values():
    codec, coding = "topk:k=128", Coded("fp16")
    platform, deltas, kept = Saved(), Deltas(codec), [Kept(codec), Kept(codec)]
    check(run(platform, deltas, 0, coding=coding), kept, 0, atol=0.05)
    earlier = platform.clients[1].state()
    check(run(platform, deltas, 1, coding=coding), kept, 1, atol=0.05)
    few = platform.bytes_down
    platform.clients[1] = federated.Client.restore(earlier, y=ROWS[1])
    check(run(platform, deltas, 2, coding=coding), kept, 2, is_whole=True, atol=0.05)
    assert platform.bytes_down > few + 10_000
    platform.clients[2] = federated.Client.in_the_clear(y=ROWS[2])
    check(run(platform, deltas, 3, coding=coding), kept, 3, is_whole=True, atol=0.05)
    check(run(platform, deltas, 4, coding=coding), kept, 4, atol=0.05)
    assert platform.bytes_down < few + 100


@pytest.mark.parametrize("exchange", [1, 2])
def test_one_that_has_dropped_out_gets_whole_values_when_it_is_back(exchange):
    """Before the first round, and between it and the second, when it has a part of what was sent."""
    platform, deltas = Saved(), Deltas("topk")
    options = {"threshold": 1, "coding": Coded("fp16")}
    run(platform, deltas, 0, **options)
    platform.gone, platform.number = {1: exchange}, 0
    run(platform, deltas, 1, **options)
    platform.gone = {}
    torch.testing.assert_close(
        run(platform, deltas, 2, **options), program(XS[2], HALF * 3, RATE, ROWS), rtol=0, atol=0.05
    )


@pytest.mark.parametrize("exchange", [1, 2])
def test_after_a_run_that_fails_whole_values_are_sent(exchange):
    codec = "topk:k=128"
    platform, deltas, kept = Saved(), Deltas(codec), [Kept(codec), Kept(codec)]
    check(run(platform, deltas, 0), kept, 0)
    platform.gone, platform.number = {1: exchange}, 0
    with pytest.raises(InvalidArgument, match="2 replies"):
        run(platform, deltas, 1)
    platform.gone = {}
    found = run(platform, deltas, 2)
    # Those that have got all of the failed run are ahead; after its first round they are where they were.
    check(found, kept, 2, is_whole=exchange == 2)


def test_other_graphs_share_what_was_sent():
    codec = "topk:k=128"
    platform, deltas, kept = Saved(), Deltas(codec), [Kept(codec), Kept(codec)]

    @federated.program(clients=NUM_CLIENTS)
    def evaluate(x, z, y):
        shared = federated.broadcast((x, z))
        return federated.reduce_mean(federated.map_fn(lambda x, z, y: (x - y) ** 2 + z.sum(), (*shared, y)))

    z = Kept(codec)
    evaluation = federated.trace(evaluate, XS[0], XS[0], ROWS)
    check(run(platform, deltas, 0), kept, 0)
    for number in (1, 3):  # the first time without a change of z
        found = federated.run_on(platform, evaluation, deltas=deltas, x=XS[number], z=XS[number])
        expected = evaluate(kept[0].send(XS[number]), z.send(XS[number]), ROWS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
        check(run(platform, deltas, number + 1), kept, number + 1)
    other = federated.trace(evaluate, XS[0, :7], XS[0, :7], ROWS[:, :7])  # other values of the same names
    clients = [
        federated.Client.restore(one.state(), y=row[:7]) for one, row in zip(platform.clients, ROWS, strict=True)
    ]
    found = federated.run_on(federated.IsolatedClients(clients), other, deltas=deltas, x=XS[0, :7], z=XS[0, :7])
    torch.testing.assert_close(found, evaluate(XS[0, :7], XS[0, :7], ROWS[:, :7]), rtol=0, atol=1e-5)


def test_errors_do_not_add_up():
    """A message has 256 elements of each 2048; after ten the clients have the model to the bit."""
    platform, deltas = Saved(), Deltas("topk:k=256")
    graph = federated.trace(
        federated.program(lambda x, y: federated.reduce_mean(federated.broadcast(x) + 0 * y), clients=NUM_CLIENTS),
        XS[0],
        ROWS,
    )
    distances = [
        (federated.run_on(platform, graph, deltas=deltas, x=XS[min(number, 1)]) - XS[1]).abs().max()
        for number in range(12)
    ]
    assert distances[1] > 1 and distances[5] > 0.1 and distances[11] < 1e-6


@in_turns("coding, threshold", [FixedPoint(40, 16), Coded("minmax_uint8")], [None, 3])
def test_the_cost_is_what_travels(coding, threshold):
    platform, deltas = Saved(), Deltas("minmax_uint8")
    down = []
    for number in range(3):
        cost = federated.cost_of(GRAPH, coding=coding, threshold=threshold, deltas=deltas)
        run(platform, deltas, number, coding=coding, threshold=threshold)
        assert (platform.bytes_down, platform.bytes_up) == (sum(cost.bytes_down), sum(cost.bytes_up))
        down.append(platform.bytes_down)
    wire = sum(bagua.codecs.get("minmax_uint8").wire_bytes(n, torch.float32) for n in (SIZE, 2100))
    saved = SIZE * 4 + 2100 * 2 - wire
    assert down[1] == down[2] and saved - 100 < down[0] - down[1] < saved


def test_a_client_does_not_compute_from_another_base():
    """Whatever the server says."""
    platform, deltas, numbers = Saved(), Deltas("bf16"), itertools.count()
    run(platform, deltas, 0)
    exchange = platform.exchange
    platform.clients[1] = federated.Client(y=ROWS[1])

    def lying(request):
        replies = exchange(request)
        if next(numbers) == 0:
            replies = [messages.write({**messages.read(reply), "has": True}) for reply in replies]
        return replies

    platform.exchange = lying
    with pytest.raises(InvalidArgument, match="has missed a message: it needs whole values"):
        run(platform, deltas, 1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Deltas("zip"), "unknown codec 'zip'"),
        (lambda: Deltas("qsgd:bits=2"), "'qsgd:bits=2' with error_feedback=True diverges"),
        (lambda: federated.cost_of(GRAPH, deltas=Deltas("bf16")), "give the coding, too"),
        (lambda: send(XS[:1].double()), r"torch.float64 of shape \[2500\] by the codec 'fp16'"),
        (lambda: send(XS[:1], XS[1] * float("inf")), "sent as a change by the codec 'fp16' is not finite"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def send(*values):
    deltas, clients = Deltas("fp16"), torch.arange(3)
    state = deltas.init(values[0][0])
    for value in values:
        for _ in range(2):
            _, state = deltas.send(value.reshape(-1), state, clients)


# ---- in simulations


def simulation(codec, cohort, split=None):
    deltas = Deltas(codec)

    @federated.program(clients=cohort, num_local=split)
    def change(x, y):
        return federated.reduce_mean(federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y)))

    def step(state, round):
        sent, kept = deltas.send(state["x"], state["kept"], round.cohort)
        return {"x": state["x"] + 0.5 * change(sent, ROWS[round.clients]), "kept": kept}, {}

    state = {"x": torch.zeros(SIZE), "kept": deltas.init(torch.zeros(SIZE))}
    return Simulation(step, state, population=NUM_CLIENTS, cohort=cohort, seed=3, num_local=split)


def on_ranks(rank, world_size, split):
    with process_group():
        run = simulation("qsgd", NUM_CLIENTS, split)
        return run.run(4), run.state["x"]


def test_a_simulation_on_ranks(pools):
    alone = simulation("qsgd", NUM_CLIENTS)
    figures = alone.run(4)
    wire = bagua.codecs.get("qsgd").wire_bytes(SIZE, torch.float32)
    assert [one["bytes_down"] for one in figures] == [SIZE * 4, wire, wire, wire]
    for found, x in pools[2].run(on_ranks, args=((1, 2),)):
        assert found == figures
        torch.testing.assert_close(x, alone.state["x"], rtol=0, atol=1e-5)


def test_a_simulation_is_what_clients_somewhere_else_do():
    run, platform, deltas = simulation("topk:k=128", NUM_CLIENTS), Saved(), Deltas("topk:k=128")

    @federated.program(clients=NUM_CLIENTS)
    def change(x, y):
        return federated.reduce_mean(federated.map_fn(lambda x, y: y - x, (federated.broadcast(x), y)))

    x = torch.zeros(SIZE)
    graph = federated.trace(change, x, ROWS)
    for number in range(4):
        x = x + 0.5 * federated.run_on(platform, graph, deltas=deltas, x=x)
        run.run(number + 1)
        torch.testing.assert_close(run.state["x"], x, rtol=0, atol=1e-4)


def test_cohorts_that_change_get_whole_values():
    run = simulation("topk:k=128", 2)
    figures = run.run(8)
    cohorts = [set(run.sample(number).cohort.tolist()) for number in range(8)]
    wire = bagua.codecs.get("topk:k=128").wire_bytes(SIZE, torch.float32)
    expected = [SIZE * 4] + [wire if now == before else SIZE * 4 for before, now in itertools.pairwise(cohorts)]
    assert [one["bytes_down"] for one in figures] == expected and len(set(expected)) == 2
