"""Programs on isolated clients: equal to the program to the tolerance of their sums, and what the server sees.

The oracle is the program in one process; the server's view is what it receives as bytes.
"""

from __future__ import annotations

import functools
import itertools
import random
import secrets

import pytest
import torch
from torch.func import grad, hessian, jvp

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.library import aggregators
from bagua.federated.programs import messages, secure_sum
from bagua.federated.programs.fixed_point import FixedPoint
from bagua.federated.programs.graph_files import from_bytes
from tests.distributed.worlds import fast_in
from tests.federated.programs.test_trace import graph_of, network, two_rounds, weighted
from tests.federated.verbs.test_verbs import X, Y, fax

CODING = federated.FixedPoint(bits=48, fraction_bits=24)


@federated.program(clients=3)
def count(x, y):
    """Of integers and of real numbers."""
    near = federated.map_fn(lambda x, y: (y > x).to(torch.int32), (federated.broadcast(x), y))
    return {"near": federated.reduce_sum(near), "mean": federated.reduce_mean(y), "three": 3}


def clients_of(y):
    return federated.IsolatedClients([federated.Client(y=row) for row in y])


RUNS = {
    "gradient": grad(fax),
    "Hessian": hessian(fax),
    "weighted": weighted,
    "integers": count,
}


@fast_in("name", ["gradient", "integers"], list(RUNS))
def test_isolated_clients_give_what_the_program_gives(name):
    function = RUNS[name]
    graph = federated.trace(function, X, Y)
    # Half a step for each of three clients, and the division of a weighted mean makes it larger.
    found = federated.run_on(clients_of(Y), graph, coding=CODING, x=X)
    torch.testing.assert_close(found, function(X, Y), rtol=1e-6, atol=9 * CODING.tolerance(3))


def test_a_sum_is_within_its_tolerance_and_not_better():
    coding = federated.FixedPoint(bits=30, fraction_bits=4)
    torch.manual_seed(0)
    y = torch.rand(5, 400, dtype=torch.float64)
    program = federated.program(lambda y: federated.reduce_sum(y), clients=5)
    graph = federated.trace(program, y)
    found = federated.run_on(clients_of(y), graph, coding=coding)
    error = (found - y.sum(0)).abs().max()
    assert coding.tolerance(5) / 4 < error <= coding.tolerance(5)


@pytest.mark.slow("test_isolated_clients_give_what_the_program_gives")
def test_hypergradients_over_five_rounds():
    parameters, rate, images, labels = network()
    function = grad(two_rounds, (0, 1))
    graph = federated.trace(function, parameters, rate, images, labels)
    clients = [federated.Client(images=images[i], labels=labels[i]) for i in range(3)]
    found = federated.run_on(federated.IsolatedClients(clients), graph, parameters=parameters, rate=rate)
    torch.testing.assert_close(found, function(parameters, rate, images, labels), rtol=1e-4, atol=1e-6)


# ---- clients that are saved between rounds


class Saved(federated.IsolatedClients):
    """Of each client, only bytes are left between two requests."""

    def __init__(self, y):
        super().__init__([])
        self.rows, self.states = list(y), [federated.Client().state() for _ in y]

    num_clients = property(lambda self: len(self.rows))

    def exchange(self, request):
        clients = [federated.Client.restore(state, y=row) for state, row in zip(self.states, self.rows, strict=True)]
        replies = [client.answer(request) for client in clients]
        self.states = [client.state() for client in clients]
        return replies


def test_clients_are_restored_between_rounds():
    # Several rounds, whose later ones need what clients have computed in earlier ones.
    graph, function = graph_of("gradient of weighted"), grad(weighted)
    assert federated.cost_of(graph).rounds > 1
    platform = Saved(Y)
    for _ in range(2):  # the second begins with what the first has left
        found = federated.run_on(platform, graph, coding=CODING, x=X)
        torch.testing.assert_close(found, function(X, Y), rtol=1e-6, atol=9 * CODING.tolerance(3))
    # Nothing of a run that has ended, the key neither.
    assert platform.states[0] == federated.Client().state()


def test_a_value_of_two_rounds_is_sent_once():
    """It waits for the model of the second round, with which it is broadcast; clients keep it, saved ones too."""

    @federated.program(clients=3)
    def descent(model, rate, y):
        for _ in range(2):
            shared = federated.broadcast({"model": model, "rate": rate})
            model = federated.reduce_mean(
                federated.map_fn(lambda s, y: s["model"] - s["rate"] * (s["model"] - y), (shared, y))
            )
        return model

    rate = torch.tensor(0.5, dtype=torch.float64)
    graph = federated.trace(descent, X, rate, Y)
    cost = federated.cost_of(graph)
    assert cost.bytes_down == (8 + 8, 8)
    for platform in (clients_of(Y), Saved(Y)):
        found = federated.run_on(platform, graph, model=X, rate=rate)
        torch.testing.assert_close(found, Y.mean(0) * 0.75 + X * 0.25)


class Restoring(federated.IsolatedClients):
    """Every reply of a client is compared with that of one that is restored from its state."""

    def __init__(self, rows):
        super().__init__([federated.Client(y=row) for row in rows])
        self.rows, self.sizes = rows, []

    def exchange(self, request):
        opened = b"open" not in request
        states = [client.state() for client in self.clients]
        self.sizes += map(len, states)
        replies = super().exchange(request)
        if opened:  # not for keys, which are new each time
            for state, row, reply in zip(states, self.rows, replies, strict=True):
                assert federated.Client.restore(state, y=row).answer(request) == reply
        return replies


def test_restored_clients_reply_bit_for_bit_and_their_state_is_without_the_data():
    """The masks too: sums of restored clients that had lost theirs would be right, and their values seen by all."""
    rows = [torch.arange(100_000.0) / 1e6, torch.ones(100_000)]

    @federated.program(clients=2)
    def program(y):
        first = federated.map_fn(lambda y: y[1:3], y)  # a view of the data, which the second round needs
        total = federated.broadcast(federated.reduce_sum(first))
        return federated.reduce_sum(federated.map_fn(lambda a, b: a * b, (first, total)))

    platform = Restoring(rows)
    graph = federated.trace(program, torch.stack(rows))
    assert federated.cost_of(graph).rounds == 2
    found = federated.run_on(platform, graph)
    torch.testing.assert_close(found, program(torch.stack(rows)), rtol=1e-6, atol=1e-8)
    assert len(platform.sizes) == 6 and max(platform.sizes) < 50_000 < rows[0].nbytes


# ---- what the server sees


class Listening(federated.IsolatedClients):
    """Keeps all replies."""

    def __init__(self, clients):
        super().__init__(clients)
        self.replies = []

    def exchange(self, request):
        replies = super().exchange(request)
        self.replies.append([messages.read(reply) for reply in replies])
        return replies


def with_known_secrets(patch, seed):
    """Keys and session that are drawn from `seed`, and no secrets: what follows from them is the same each time."""
    from cryptography.hazmat.primitives.asymmetric import x25519

    draw = random.Random(seed).randbytes

    def take_key(self):
        self._key = x25519.X25519PrivateKey.from_private_bytes(draw(32))

    patch.setattr(secure_sum.SecureSum, "__post_init__", take_key)
    patch.setattr(secrets, "token_bytes", draw)


def see_masked_zeros():
    """What three clients that have nothing but zeros send."""
    y = torch.zeros(3, 4000)  # whoever saw codes would see zeros
    program = federated.program(lambda y: federated.reduce_sum(y), clients=3)
    platform = Listening([federated.Client(y=row) for row in y])
    assert torch.equal(federated.run_on(platform, federated.trace(program, y), coding=CODING), torch.zeros(4000))
    opening, replies = platform.replies
    assert all(list(reply) == ["key"] and len(reply["key"]) == 32 for reply in opening)
    assert all(list(reply) == ["masked", "index"] for reply in replies)
    return [CODING.unpack(reply["masked"], 4000) for reply in replies]


def test_the_server_sees_masked_vectors_only():
    """Of each client, a public key and numbers that are others in every run, whatever its values are."""
    runs = [see_masked_zeros() for _ in range(2)]
    for all_masked in runs:
        for masked in all_masked:
            assert masked.dtype == torch.int64 and int(masked.min()) >= 0 and int(masked.max()) < 2**48
        first, second, third = all_masked
        assert torch.equal(CODING.wrap(first + second + third), torch.zeros(4000, dtype=torch.int64))
        assert len(CODING.wrap(first + second).unique()) > 3990  # one client less is no sum of anything
    assert (runs[0][0] == runs[1][0]).sum() < 5


def test_masks_are_uniform():
    """Of known secrets: with new ones each time, one run in some thousand would have a mean that is too far away."""
    with pytest.MonkeyPatch.context() as patch:
        with_known_secrets(patch, seed=1)
        all_masked = see_masked_zeros()
        with_known_secrets(patch, seed=1)
        assert all(map(torch.equal, all_masked, see_masked_zeros()))
    for masked in all_masked:
        ones = torch.stack([(masked >> bit) & 1 for bit in range(48)]).double().mean(1)
        assert (ones - 0.5).abs().max() < 5 * 0.5 / 4000**0.5  # five standard deviations of each bit's mean


def test_clients_are_sent_their_part_only():
    """Not what the server computes, such as noise by a seed that is its secret."""

    @federated.program(clients=3)
    def noisy(x, y):
        total = federated.reduce_sum(federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), y)))
        return aggregators.add_noise(total, 1.0, 271828, torch.tensor(0)) * 3

    graph = federated.trace(noisy, X, Y)
    assert "noise" in str(graph)
    platform = clients_of(Y)
    requests = []
    exchange = platform.exchange
    platform.exchange = lambda request: requests.append(messages.read(request)) or exchange(request)
    torch.testing.assert_close(federated.run_on(platform, graph, x=X), noisy(X, Y))
    opening, first = requests
    sent = from_bytes(opening["graph"])
    assert [node.verb for node in sent.nodes] == ["broadcast", "map"] and "noise" not in str(sent)
    assert [value.tolist() for value in first["values"]] == [X.tolist()]


def test_what_the_server_draws_is_drawn_once():
    """All clients get the same numbers, although no argument of the program is in them."""

    @federated.program(clients=3)
    def dithered(y):
        noise = federated.broadcast(torch.randn(2))
        mean = federated.reduce_mean(federated.map_fn(lambda noise, y: noise + y, (noise, y)))
        return mean, federated.reduce_sum(federated.map_fn(lambda noise: noise * noise, noise))

    graph = federated.trace(dithered, Y)
    torch.manual_seed(1)
    drawn = torch.randn(2)
    torch.manual_seed(1)
    mean, squares = federated.run_on(clients_of(Y), graph)
    torch.testing.assert_close(mean, drawn + Y.mean(0))
    torch.testing.assert_close(squares, 3 * drawn**2)


def test_masks_of_two_sums_differ():
    coding = federated.FixedPoint(bits=62)
    first, second = (secure_sum.SecureSum(coding) for _ in range(2))
    keys = [first.public_key, second.public_key]
    assert [first.agree_on_seeds(keys, b"session"), second.agree_on_seeds(keys, b"session")] == [0, 1]
    zeros = [torch.zeros(1000)]
    masks = [first.mask(zeros, number) for number in (0, 1)]
    assert (masks[0] == masks[1]).sum() == 0
    assert torch.equal(coding.wrap(masks[1] + second.mask(zeros, 1)), torch.zeros(1000, dtype=torch.int64))


def test_masks_are_those_of_the_seed_s_stream_by_hand():
    """The numbers are ChaCha20's, 8 bytes each, so that other implementations can take part."""
    numbers = secure_sum.numbers_of(bytes(range(32)), 7, 3)
    state = [int.from_bytes(b"expand 32-byte k"[i : i + 4], "little") for i in range(0, 16, 4)]
    state += [int.from_bytes(bytes(range(32))[i : i + 4], "little") for i in range(0, 32, 4)] + [0, 7, 0, 0]
    stream = b"".join(word.to_bytes(4, "little") for word in chacha_block(state))
    expected = [int.from_bytes(stream[i : i + 8], "little", signed=True) for i in range(0, 24, 8)]
    assert numbers.tolist() == expected


def chacha_block(state):
    """RFC 8439, 2.3."""
    words = list(state)

    def turn(a, b, c, d):
        for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            words[x] = (words[x] + words[y]) & 0xFFFFFFFF
            words[z] ^= words[x]
            words[z] = ((words[z] << bits) | (words[z] >> (32 - bits))) & 0xFFFFFFFF

    for _ in range(10):
        for i in range(4):
            turn(i, i + 4, i + 8, i + 12)
        for i in range(4):
            turn(i, (i + 1) % 4 + 4, (i + 2) % 4 + 8, (i + 3) % 4 + 12)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(words, state, strict=True)]


# ---- what is refused


def test_what_is_out_of_range_raises():
    graph = graph_of("value")
    with pytest.raises(InvalidArgument, match="out of the range of fixed point"):
        federated.run_on(clients_of(Y), graph, coding=federated.FixedPoint(bits=12, fraction_bits=8), x=X)
    many = federated.trace(federated.program(lambda y: federated.reduce_sum(y), clients=3), torch.zeros(3).int())
    big = federated.IsolatedClients([federated.Client(y=torch.tensor(400, dtype=torch.int32)) for _ in range(3)])
    with pytest.raises(InvalidArgument, match=r"out of the range .* for a sum of 3 .*\(an integer: 170\)"):
        federated.run_on(big, many, coding=federated.FixedPoint(bits=10, fraction_bits=0))


SECRET = 12345


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda y: y, "out of the range"),
        (lambda y: torch.nn.functional.nll_loss(torch.zeros(2), y.long()), "raised IndexError on"),
    ],
)
def test_errors_of_clients_say_no_values(function, message):
    """Flower, for one, tells the server what an error at a client says."""
    data = [torch.tensor(float(SECRET)), torch.zeros(())]
    program = federated.program(lambda y: federated.reduce_sum(federated.map_fn(function, y)), clients=2)
    graph = federated.trace(program, torch.zeros(2))
    platform = federated.IsolatedClients([federated.Client(y=one) for one in data])
    with pytest.raises(InvalidArgument, match=message) as raised:
        federated.run_on(platform, graph, coding=federated.FixedPoint(bits=10, fraction_bits=0))
    assert str(SECRET) not in str(raised.value).replace(",", "")


def test_fewer_than_two_clients_are_refused():
    alone = federated.trace(federated.program(lambda y: federated.reduce_sum(y), clients=1), Y[:1])
    with pytest.raises(InvalidArgument, match="would be that client's values"):
        federated.run_on(clients_of(Y[:1]), alone)
    # By the client, too, whatever the server says.
    member = secure_sum.SecureSum(CODING)
    with pytest.raises(InvalidArgument, match="over 1 client, expected two"):
        member.agree_on_seeds([member.public_key], b"session")
    with pytest.raises(InvalidArgument, match="one of each"):
        member.agree_on_seeds([member.public_key] * 2, b"session")


def test_a_round_is_answered_once():
    graph = graph_of("value")
    platform = Listening([federated.Client(y=row) for row in Y])
    requests = []
    exchange = platform.exchange
    platform.exchange = lambda request: requests.append(request) or exchange(request)
    federated.run_on(platform, graph, x=X)
    with pytest.raises(InvalidArgument, match="round 0 out of turn"):
        platform.clients[0].answer(requests[1])


@pytest.mark.parametrize(
    "clients, values, message",
    [
        (Y[:2], {"x": X}, "over 3 clients, but the platform has 2"),
        (Y.double(), {"x": X}, "needs of a client y: float32\\[2\\], but got torch.float64"),
    ],
)
def test_values_are_those_of_the_graph(clients, values, message):
    graph, platform = graph_of("value"), clients_of(clients)
    with pytest.raises(InvalidArgument, match=message):
        federated.run_on(platform, graph, **values)
    assert platform.clients[0].state() == federated.Client().state()  # of no run


def test_what_stays_at_clients_does_not_leave():
    tangents = lambda x, y: jvp(lambda y: federated.broadcast(x) * y, (y,), (y,))[1]  # noqa: E731
    graph = federated.trace(federated.program(tangents, clients=3), X, Y)
    torch.testing.assert_close(graph(X, Y), X * Y)
    with pytest.raises(InvalidArgument, match="stays at the clients: reduce it"):
        federated.run_on(clients_of(Y), graph, x=X)


def test_weights_of_nobody_have_no_mean():
    program = federated.program(lambda y: federated.reduce_weighted_mean(y, y[:, 0]), clients=3)
    with pytest.raises(InvalidArgument, match="add up to 0"):
        federated.run_on(clients_of(0 * Y), federated.trace(program, Y))


@pytest.mark.parametrize("change", [lambda r: r[:2], lambda r: [r[0], *r[:2]]])
def test_a_round_needs_one_reply_of_every_client(change):
    graph, platform = graph_of("value"), clients_of(Y)
    exchange = platform.exchange
    rounds = iter(range(10))
    platform.exchange = lambda request: change(exchange(request)) if next(rounds) else exchange(request)
    with pytest.raises(InvalidArgument, match="repl"):
        federated.run_on(platform, graph, x=X)


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: b"garbage",
        lambda whole: b"",
        lambda whole: whole[:-1],
        lambda whole: whole + b"x",
        lambda whole: whole[4:],
        lambda whole: (2**31).to_bytes(4, "little") + whole[4:],
        lambda whole: messages.write([1]),
        lambda whole: whole.replace(b"[40]", b"[41]"),
        lambda whole: whole.replace(b"[40]", b"[-4]"),
    ],
)
def test_what_is_no_message(make):
    whole = messages.write({"what": "round", "values": [torch.arange(10.0).view(torch.uint8)]})
    with pytest.raises(InvalidArgument, match="no message of run_on"):
        federated.Client(y=Y[0]).answer(make(whole))


@pytest.mark.parametrize(
    "number, change, cause",
    [
        (0, {"coding": []}, IndexError),
        (0, {"coding": ["fp16", 1, 2, 3]}, TypeError),
        (0, {"turns": [1]}, TypeError),
        (0, {"deltas": {}}, KeyError),
        (1, {"deltas": {"codec": "bf16", "at": [0], "base": None}}, KeyError),  # and no base in the round
        (1, {"keys": 3}, TypeError),
        (1, {"alive": 3}, TypeError),
        (1, {"values": [3]}, AttributeError),
    ],
)
def test_what_is_no_request(number, change, cause):
    """What it raises in Python is its cause, as what the graph raises on a client's data."""
    platform = clients_of(Y)
    exchange, numbers = platform.exchange, itertools.count()

    def changed(request):
        if next(numbers) == number or "deltas" in change:
            request = messages.write(messages.read(request) | change)
        return exchange(request)

    platform.exchange = changed
    with pytest.raises(
        InvalidArgument, match=f"a message that run_on does not send: it raised {cause.__name__}"
    ) as found:
        federated.run_on(platform, graph_of("value"), x=X)
    assert isinstance(found.value.__cause__, cause) and next(numbers) == number + 1


def test_messages_come_back_as_they_were():
    values = [
        torch.arange(3),
        torch.tensor(True),
        torch.zeros(0, 2),
        torch.randn(2, 3).to(torch.bfloat16),
        torch.rand(2).to(torch.complex64),
    ]
    message = {"a": (1, None, "x"), "bytes": b"\x00\xff", "values": values, 3: {"nothing": b""}}
    found = messages.read(messages.write(message))
    assert {key: value for key, value in found.items() if key != "values"} == {
        "a": (1, None, "x"),
        "bytes": b"\x00\xff",
        3: {"nothing": b""},
    }
    for value, expected in zip(found["values"], values, strict=True):
        assert value.dtype is expected.dtype and torch.equal(value, expected)


class Weighing(federated.IsolatedClients):
    """Counts the bytes to and from each client."""

    def __init__(self, clients):
        super().__init__(clients)
        self.down, self.up = 0, [0] * len(clients)

    def exchange(self, request):
        replies = super().exchange(request)
        self.down += len(request)
        self.up = [so_far + len(reply) for so_far, reply in zip(self.up, replies, strict=True)]
        return replies


@pytest.mark.parametrize("coding", [FixedPoint(), FixedPoint(24, 12), FixedPoint(9, 3)], ids=str)
def test_the_cost_is_what_travels(coding):
    """Two rounds; sums of a tree with complex numbers; a value below what nine bits hold."""

    def two(x, y):
        first = federated.reduce_sum(federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), y)))
        values = federated.map_fn(
            lambda m, y: {"a": m + y, "b": (m * y).to(torch.complex64)}, (federated.broadcast(first), y)
        )
        return federated.reduce_mean(values)

    x, y = torch.full((300,), 0.5), torch.full((3, 300), 0.5)
    graph = federated.trace(federated.program(two, clients=3), x, y)
    platform = Weighing([federated.Client(y=row) for row in y])
    federated.run_on(platform, graph, coding=coding, x=x)
    cost = federated.cost_of(graph, coding=coding)
    assert cost.rounds == 2
    assert (sum(cost.bytes_down), [sum(cost.bytes_up)] * 3) == (platform.down, platform.up)
    assert sum(cost.bytes_up) - 500 < (300 + 900) * coding.bits / 8 < sum(cost.bytes_up)


@pytest.mark.parametrize(
    "number, change, message",
    [
        (0, lambda reply: messages.write({"key": b"short"}), "reply 1 has the key b'short', expected 32 bytes"),
        (1, lambda reply: messages.write({"masked": 3, "index": "first"}), "replies of the clients .*'first'"),
    ],
)
def test_a_reply_that_is_none_of_a_client_is_named(number, change, message):
    graph, platform = graph_of("value"), clients_of(Y)
    exchange, requests = platform.exchange, itertools.count()

    def with_another_reply(request):
        replies = exchange(request)
        if next(requests) == number:
            index = 1 if number == 0 else [messages.read(r)["index"] for r in replies].index(1)
            replies[index] = change(replies[index])
        return replies

    platform.exchange = with_another_reply
    with pytest.raises(InvalidArgument, match=message):
        federated.run_on(platform, graph, x=X)


def test_clients_that_are_somewhere_else_do_not_draw_the_same():
    def noisy(y, randomness):
        mapped = federated.map_fn(lambda y: y + torch.rand(2), y, randomness=randomness)
        return federated.reduce_sum(mapped)

    same, different = (
        federated.trace(federated.program(functools.partial(noisy, randomness=kind), clients=3), Y)
        for kind in ("same", "different")
    )
    assert not torch.equal(federated.run_on(clients_of(Y), different), Y.sum(0))
    with pytest.raises(InvalidArgument, match='draws random numbers, the "same" at all clients'):
        federated.run_on(clients_of(Y), same)


def test_replies_come_in_any_order():
    graph, platform = graph_of("value"), clients_of(Y)
    exchange = platform.exchange
    turns = itertools.count()
    platform.exchange = lambda request: (lambda replies, by: replies[by:] + replies[:by])(
        exchange(request), next(turns) % 3
    )
    torch.testing.assert_close(federated.run_on(platform, graph, x=X), fax(X, Y))
