"""Uploads by codecs, against a loop over clients that encodes and decodes, with what each message has lost."""

from __future__ import annotations

import itertools

import pytest
import torch

import bagua
from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated import Coded, FixedPoint
from bagua.federated.programs import messages
from tests.distributed.worlds import fast_in, in_turns

NUM_CLIENTS = 3
X = torch.linspace(-1, 1, 3000)
ROWS = torch.randn(NUM_CLIENTS, 3000, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [10], [0.1]])


def client(x, y):
    """Beside what is coded a count, a number, and a half."""
    return {"a": x * y, "b": (x + y)[:5], "h": y[:2100].half(), "n": (y > 0).sum(), "loss": (x * y).sum()}


@federated.program(clients=NUM_CLIENTS)
def two_rounds(x, y):
    first = federated.reduce_sum(federated.map_fn(client, (federated.broadcast(x), y)))
    second = federated.reduce_mean(federated.map_fn(lambda a, y: a - y, (federated.broadcast(first["a"]), y)))
    return first, second


GRAPH = federated.trace(two_rounds, X, ROWS)


def clients_of(rows):
    return federated.IsolatedClients([federated.Client.in_the_clear(y=row) for row in rows])


class Saved(federated.IsolatedClients):
    """Of each client, only bytes are left between two requests."""

    def __init__(self, rows):
        super().__init__([federated.Client.in_the_clear(y=row) for row in rows])
        self.rows = rows

    def exchange(self, request):
        replies = super().exchange(request)
        states = [client.state() for client in self.clients]
        self.clients = [federated.Client.restore(s, y=row) for s, row in zip(states, self.rows, strict=True)]
        return replies


def through(codec, value, kept, place, key=None):
    """What the server decodes of a client's value; what is lost is kept by place, unless that is None."""
    wide = value.float() if kept is None or place not in kept else value.float() + kept[place]
    rounded = wide.to(value.dtype)
    decoded = codec.decode(codec.encode(rounded, key=key), rounded.numel(), rounded.dtype)
    if kept is not None:
        kept[place] = wide - decoded.float()
    return decoded


def in_a_loop(x, rows, kept, codec, seed=None):
    """Both rounds; `kept` has a dictionary for each client, or None."""
    key = lambda *parts: None if seed is None else codec.with_seed(seed, *parts).seed  # noqa: E731
    total = {"a": 0, "b": 0, "h": 0, "n": 0, "loss": 0}
    for i, y in enumerate(rows):
        one = client(x, y)
        of_floats = through(codec, torch.cat([one["a"], one["b"]]), kept[i], "floats", key(0, 0, i))
        one["a"], one["b"] = of_floats[:3000], of_floats[3000:]
        one["h"] = through(codec, one["h"], kept[i], "halves", key(0, 1, i))
        for name, value in one.items():
            total[name] = total[name] + (value if name == "n" else value.double())
    for name, dtype in {"a": torch.float32, "b": torch.float32, "h": torch.float16, "loss": torch.float32}.items():
        total[name] = total[name].to(dtype)
    second = sum(through(codec, total["a"] - y, kept[i], "second", key(1, 0, i)).double() for i, y in enumerate(rows))
    return total, second.float() / len(rows)


RUNS = [("minmax_uint8", True), ("topk:k=8", True), ("topk:k=8", False)]


@fast_in("make", [Saved], [Saved, clients_of])
@pytest.mark.parametrize("codec, feedback", RUNS)
def test_three_runs_are_those_of_a_loop(make, codec, feedback):
    platform = make(ROWS)
    kept = [{} if feedback else None for _ in ROWS]
    found = []
    for _ in range(3):
        found.append(federated.run_on(platform, GRAPH, coding=Coded(codec, error_feedback=feedback), x=X))
        expected = in_a_loop(X, ROWS, kept, bagua.codecs.get(codec))
        torch.testing.assert_close(found[-1], expected, rtol=0, atol=0)
    assert torch.equal(found[0][0]["a"], found[1][0]["a"]) is not feedback


def test_what_is_lost_is_of_one_program():
    """Another learning rate leaves it, and so do programs that send numbers, or are masked; others replace it."""
    coding, codec = Coded("topk:k=8"), bagua.codecs.get("topk:k=8")
    numbers = federated.trace(federated.program(lambda y: federated.reduce_sum(y.sum(1)), clients=NUM_CLIENTS), ROWS)
    same_shapes = federated.trace(federated.program(lambda y: federated.reduce_sum(y.exp()), clients=NUM_CLIENTS), ROWS)
    platform = clients_of(ROWS)
    sizes = []
    for other in (same_shapes, GRAPH):
        kept = [{} for _ in ROWS]
        for rate in (0.5, 0.3, 0.1):
            scaled = federated.program(lambda y, rate=rate: federated.reduce_sum(y * rate), clients=NUM_CLIENTS)
            found = federated.run_on(platform, federated.trace(scaled, ROWS), coding=coding)
            expected = sum(through(codec, y * rate, kept[i], "y").double() for i, y in enumerate(ROWS)).float()
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            federated.run_on(platform, numbers, coding=coding)
            federated.run_on(platform, GRAPH, x=X)
        sizes.append(len(platform.clients[0].state()))
        federated.run_on(platform, other, coding=coding, **({"x": X} if other is GRAPH else {}))
    assert sizes[0] == sizes[1] < 2 * ROWS[0].nbytes


def test_codecs_at_random_draw_from_the_seed():
    results = []
    for seed in (5, 5, 6):
        coding, kept = Coded("qsgd:bits=4", seed=seed), [{} for _ in ROWS]
        results.append(federated.run_on(clients_of(ROWS), GRAPH, coding=coding, x=X))
        expected = in_a_loop(X, ROWS, kept, bagua.codecs.get("qsgd:bits=4"), seed)
        torch.testing.assert_close(results[-1], expected, rtol=0, atol=0)
    assert torch.equal(results[0][1], results[1][1]) and not torch.equal(results[0][1], results[2][1])


@pytest.mark.parametrize("feedback", [True, False])
def test_feedback_makes_topk_converge(feedback):
    """The clients' largest elements cancel out, so the others are what moves the mean; they are never the largest."""
    size = 64
    target, pulls = torch.linspace(0.5, 1, size), torch.zeros(2, size)
    pulls[:, :8] = torch.tensor([[5.0], [-5.0]])

    @federated.program(clients=2)
    def gradient(x, pull):
        return federated.reduce_mean(
            federated.map_fn(lambda x, pull: x - target + pull, (federated.broadcast(x), pull))
        )

    graph = federated.trace(gradient, target, pulls)
    platform = federated.IsolatedClients([federated.Client.in_the_clear(pull=pull) for pull in pulls])
    x = torch.zeros(size)
    for _ in range(50):
        x = x - 0.1 * federated.run_on(platform, graph, coding=Coded("topk:k=8", error_feedback=feedback), x=x)
    distance = float((x - target)[8:].norm() / target[8:].norm())
    assert distance < 0.2 if feedback else distance == 1


def test_one_client_is_enough_in_the_clear():
    graph = federated.trace(federated.program(lambda y: federated.reduce_sum(y), clients=1), ROWS[:1])
    bound = bagua.codecs.get("minmax_uint8").error_bound(ROWS[0])
    found = federated.run_on(clients_of(ROWS[:1]), graph, coding=Coded("minmax_uint8"))
    assert ((found - ROWS[0]).abs() <= bound).all()


# ---- bytes


class Weighing(federated.IsolatedClients):
    """Counts the bytes to and from each client; some stop answering at an exchange."""

    def __init__(self, rows, gone=None):
        super().__init__([federated.Client.in_the_clear(y=row) for row in rows])
        self.gone, self.down, self.up, self.exchanges = gone or {}, 0, [0] * len(rows), 0

    def exchange(self, request):
        number, self.exchanges = self.exchanges, self.exchanges + 1
        self.down += len(request)
        replies = {i: c.answer(request) for i, c in enumerate(self.clients) if number < self.gone.get(i, 100)}
        for index, reply in replies.items():
            self.up[index] += len(reply)
        return list(replies.values())


CODINGS = [FixedPoint(24, 4), Coded("minmax_uint8"), Coded("topk:k=8"), Coded("qsgd", seed=2)]


@in_turns("coding, threshold", CODINGS, [None, 3])
def test_the_cost_is_what_travels(coding, threshold):
    platform = Weighing(ROWS)
    for _ in range(2):  # figures are of the last run
        platform.down, platform.up = 0, [0] * NUM_CLIENTS
        federated.run_on(platform, GRAPH, coding=coding, threshold=threshold, x=X)
        cost = federated.cost_of(GRAPH, coding=coding, threshold=threshold)
        assert (sum(cost.bytes_down), [sum(cost.bytes_up)] * NUM_CLIENTS) == (platform.down, platform.up)
        assert (platform.bytes_down, platform.bytes_up) == (platform.down, platform.up[0])
    if isinstance(coding, Coded):
        codec = bagua.codecs.get(coding.codec)
        coded = sum(
            codec.wire_bytes(n, d) for n, d in ((3005, torch.float32), (2100, torch.half), (3000, torch.float32))
        )
        assert coded < sum(cost.bytes_up) < coded + 700


@in_turns("coding, exchange", [FixedPoint(24, 4), Coded("minmax_uint8")], [1, 2])
def test_drop_outs_move_the_cost_by_less_than_a_hundredth(coding, exchange):
    rows, x = torch.randn(7, 20_000, generator=torch.Generator().manual_seed(2)), torch.ones(20_000)

    @federated.program(clients=7)
    def mean(x, y):
        return federated.reduce_mean(federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), y)))

    graph = federated.trace(mean, x, rows)
    platform = Weighing(rows, gone={3: exchange})
    found = federated.run_on(platform, graph, coding=coding, threshold=5, x=x)
    is_masked = isinstance(coding, FixedPoint)
    assert platform.exchanges == (4 if is_masked else 2)
    left = [i for i in range(7) if i != 3] if exchange == 1 or is_masked else list(range(7))
    torch.testing.assert_close(found, rows[left].mean(0), rtol=0, atol=0.1 if is_masked else 0.05)
    cost = federated.cost_of(graph, coding=coding, threshold=5)
    assert platform.bytes_down == pytest.approx(sum(cost.bytes_down), rel=0.01)
    assert platform.bytes_up == pytest.approx(sum(cost.bytes_up), rel=0.01)


def test_a_client_that_comes_back_is_not_in_the_run():
    """It has missed the first round of two."""
    platform = Weighing(ROWS)
    exchange, numbers = platform.exchange, itertools.count()
    platform.exchange = lambda request: exchange(request)[(1 if next(numbers) == 1 else 0) :]
    (total, mean) = federated.run_on(platform, GRAPH, coding=Coded("bf16"), threshold=1, x=X)
    expected = (X * ROWS[1:]).sum(0)
    torch.testing.assert_close(total["a"], expected, rtol=0, atol=0.1)
    torch.testing.assert_close(mean, expected - ROWS[1:].mean(0), rtol=0, atol=0.3)


# ---- what is refused


def test_clients_answer_in_the_clear_only_if_they_say_so():
    """The server asks for it, in the open or by changing what the opening of a masked run says."""
    platform = federated.IsolatedClients([federated.Client(y=row) for row in ROWS])
    message = r"a run with Coded\(codec='fp16'.* make it by Client.in_the_clear"
    with pytest.raises(InvalidArgument, match=message):
        federated.run_on(platform, GRAPH, coding=Coded("fp16"), x=X)
    platform.clients = [
        federated.Client.restore(client.state(), y=row) for client, row in zip(platform.clients, ROWS, strict=True)
    ]
    exchange = platform.exchange
    coding = {"coding": ["fp16", False, None]}
    platform.exchange = lambda request: exchange(messages.write(messages.read(request) | coding))
    with pytest.raises(InvalidArgument, match=message):
        federated.run_on(platform, GRAPH, x=X)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Coded("zip"), "unknown codec 'zip'"),
        (lambda: Coded("qsgd"), "rounds at random: give it a seed, another one for each run"),
        (lambda: Coded("qsgd:bits=2", seed=1), "error_feedback=True diverges"),
        (lambda: Coded("qsgd", seed=-1), "seed -1 is not an integer from 0"),
        (lambda: run(ROWS.double(), "bf16"), r"torch.float64 of shape \[3000\] by the codec 'bf16', expected one of"),
        (lambda: run(ROWS * float("nan"), "topk"), "a client's value is not finite, or is not in the range of"),
        (lambda: run(torch.tensor([1.0, float("nan")]), "topk"), "a client's value is not finite"),
        (lambda: run(ROWS * 1e6, "fp16"), "not in the range of the codec 'fp16'"),
        (lambda: run(ROWS, "bf16", threshold=4), "threshold=4 for 3 clients, expected 1 to all of them"),
        (lambda: run(ROWS, "bf16", threshold=0), "threshold=0 for 3 clients"),
        (lambda: federated.cost_of(GRAPH, threshold=3), "give the coding, too"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def run(rows, codec, **options):
    graph = federated.trace(federated.program(lambda y: federated.reduce_sum(y), clients=len(rows)), rows)
    return federated.run_on(clients_of(rows), graph, coding=Coded(codec), **options)


def changed_to(reply, dtype, number):
    """Fills its tensors of this dtype with a number: of uint8, the codec's messages; of float32, the loss."""
    return reply | {"coded": [torch.full_like(x, number) if x.dtype is dtype else x for x in reply["coded"]]}


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda reply: {**reply, "coded": reply["coded"][:1]}, "client 1 sent .* for a sum, expected"),
        (lambda reply: {**reply, "coded": [x[:-1] if x.dim() else x for x in reply["coded"]]}, "client 1 sent"),
        (lambda reply: changed_to(reply, torch.uint8, 255), "client 1 sent values for a sum that are not finite"),
        (lambda reply: changed_to(reply, torch.float32, float("nan")), "client 1 sent values .* not finite"),
        (lambda reply: {**reply, "coded": 3}, r"client 1 sent \['int'\]"),
        (lambda reply: {**reply, "index": 0}, "2 of 3 clients are left after round 0, of which 3 are needed; gone: 1"),
    ],
)
def test_a_reply_that_is_none_is_named(change, message):
    platform, numbers = clients_of(ROWS), itertools.count()
    exchange = platform.exchange

    def changed(request):
        replies = exchange(request)
        if next(numbers) == 1:
            replies[1] = messages.write(change(messages.read(replies[1])))
        return replies

    platform.exchange = changed
    with pytest.raises(InvalidArgument, match=message):
        federated.run_on(platform, GRAPH, coding=Coded("bf16"), x=X)
