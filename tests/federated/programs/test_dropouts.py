"""Sums that survive clients that drop out: at every point of a run, against loops over those that are left."""

from __future__ import annotations

import itertools

import pytest
import torch

from bagua import federated
from bagua.errors import InvalidArgument
from bagua.federated.programs import dropouts, messages
from bagua.federated.programs.fixed_point import FixedPoint

pytestmark = pytest.mark.needs("Crypto")
NUM_CLIENTS, THRESHOLD = 7, 5
X = torch.tensor([2.0, -1.0])
ROWS = torch.arange(14.0).view(7, 2).cos()
# The exchanges of a run of two rounds.
KEYS, SHARES, FIRST, FIRST_REVEALED, SECOND, SECOND_REVEALED = range(6)


def two_rounds(x, y):
    total = federated.reduce_sum(federated.map_fn(lambda x, y: x * y, (federated.broadcast(x), y)))
    mean = federated.reduce_mean(federated.map_fn(lambda m, y: (m + y) ** 2, (federated.broadcast(total), y)))
    return total, mean


GRAPH = federated.trace(federated.program(two_rounds, clients=NUM_CLIENTS), X, ROWS)


def in_a_loop(first, second):
    """The sum over the clients of the first round, and the mean over those of the second."""
    total = sum(X * ROWS[client] for client in first)
    return total, sum((total + ROWS[client]) ** 2 for client in second) / len(second)


class Dropping(federated.IsolatedClients):
    """Clients that answer no more from an exchange on: ``gone`` has the first one of each."""

    def __init__(self, gone=None, restores=False):
        super().__init__([federated.Client(y=row) for row in ROWS])
        self.gone, self.restores = gone or {}, restores
        self.requests, self.replies = [], []

    def exchange(self, request):
        number = len(self.requests)
        self.requests.append(request)
        replies = []
        for index, client in enumerate(self.clients):
            if number >= self.gone.get(index, 100):
                continue
            replies.append(client.answer(request))
            if self.restores:
                self.clients[index] = federated.Client.restore(client.state(), y=ROWS[index])
        self.replies.append(replies)
        return replies


def left(gone, exchange):
    """The clients that have answered this exchange, in a run where the first one has all of them."""
    return [client for client in range(NUM_CLIENTS) if gone.get(client, 100) > exchange]


def check(gone, **options):
    platform = Dropping(gone, **options)
    total, mean = federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)
    expected = in_a_loop(left(gone, FIRST), left(gone, SECOND))
    torch.testing.assert_close((total, mean), expected, atol=1e-6, rtol=1e-6)
    return platform


@pytest.mark.parametrize("exchange", range(SHARES, SECOND_REVEALED + 1))
@pytest.mark.parametrize("clients", [(0,), (6,), (1, 3)], ids=str)
def test_at_every_point(clients, exchange):
    check(dict.fromkeys(clients, exchange))


@pytest.mark.parametrize("exchanges", itertools.combinations(range(SHARES, SECOND_REVEALED + 1), 2))
def test_at_two_points(exchanges):
    check({2: exchanges[0], 0: exchanges[1]})


def test_none_drops_out_and_clients_may_be_restored_in_between():
    check({}, restores=True)
    check({1: SECOND, 3: FIRST_REVEALED}, restores=True)


def test_a_client_that_sends_no_keys_is_not_there():
    """The others have the numbers before it and after it."""
    platform = Dropping({2: KEYS})
    total, _ = federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)
    torch.testing.assert_close(total, in_a_loop([0, 1, 3, 4, 5, 6], [0])[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("exchange", range(SECOND_REVEALED + 1))
def test_fewer_than_the_threshold_are_too_few(exchange):
    where = ["the exchange of keys", "the exchange of shares"]
    where += [f"{part}round {number}" for number in (0, 1) for part in ("", "the end of ")]
    with pytest.raises(
        InvalidArgument, match=f"^4 of 7 clients are left after {where[exchange]}, of which 5 are needed"
    ):
        federated.run_on(Dropping(dict.fromkeys((0, 2, 4), exchange)), GRAPH, threshold=THRESHOLD, x=X)


def test_the_server_sees_sums_only():
    """Of zeros it gets numbers that look drawn, and shares of one secret of each client: of the seed's, as all sent."""
    coding = FixedPoint(48, 24)
    program = federated.program(lambda y: federated.reduce_sum(y), clients=NUM_CLIENTS)
    graph = federated.trace(program, torch.zeros(NUM_CLIENTS, 3000))
    platform = Dropping({3: FIRST_REVEALED})
    platform.clients = [federated.Client(y=torch.zeros(3000)) for _ in range(NUM_CLIENTS)]
    assert not federated.run_on(platform, graph, threshold=THRESHOLD, coding=coding).any()
    masked = [messages.read(reply) for reply in platform.replies[FIRST]]
    for reply in masked:
        assert set(reply) == {"masked", "index"}
        codes = coding.unpack(reply["masked"], 3000)
        ones = torch.stack([(codes >> bit) & 1 for bit in range(48)]).double().mean(1)
        assert float((ones - 0.5).abs().max()) < 5 * 0.5 / 3000**0.5
    seeds = [client._sum._seeds[0] for client in platform.clients]
    revealed = [messages.read(reply) for reply in platform.replies[FIRST_REVEALED]]
    assert [set(reply) for reply in revealed] == [{"index", "revealed"}] * 6
    for client in range(NUM_CLIENTS):
        shares = {reply["index"]: reply["revealed"][client] for reply in revealed}
        assert dropouts._combined(shares, THRESHOLD) == seeds[client]
    # Without the clients' own masks their sum would be zero already.
    total = sum(coding.unpack(reply["masked"], 3000) for reply in masked)
    assert int((coding.wrap(total) != 0).sum()) > 2990


def _members():
    coding = FixedPoint(32, 8)
    members = [dropouts.Member(coding, 1, THRESHOLD) for _ in range(NUM_CLIENTS)]
    keys = [member.public_keys for member in members]
    boxes = dict(enumerate(member.share(keys, b"session") for member in members))
    return members, boxes


def test_a_client_reveals_once_and_only_what_the_protocol_needs():
    members, boxes = _members()
    for member in members:
        member.receive(boxes)
        member.mask([torch.zeros(3)], 0, range(NUM_CLIENTS))
    first = members[0]
    for survivors in ([0, 1, 2, 3], [1, 2, 3, 4, 5], [0, 1, 2, 3, 9]):  # too few, not itself, an unknown one
        with pytest.raises(InvalidArgument, match="a client reveals them once for each sum"):
            first.reveal(0, survivors)
    revealed = first.reveal(0, [0, 1, 2, 3, 4])
    assert set(revealed) == set(range(NUM_CLIENTS)) and {len(share) for share in revealed.values()} == {32}
    with pytest.raises(InvalidArgument, match="once for each sum"):
        first.reveal(0, [0, 1, 2, 3, 4, 5])
    with pytest.raises(InvalidArgument, match="a client takes part once in each"):
        first.mask([torch.zeros(3)], 0, range(NUM_CLIENTS))


def test_shares_that_were_changed_on_their_way_are_refused():
    members, boxes = _members()
    changed = bytearray(boxes[1][0])
    changed[5] ^= 1
    boxes[1][0] = bytes(changed)
    with pytest.raises(InvalidArgument, match="the share of client 1 is not what it has encrypted"):
        members[0].receive(boxes)


def test_fewer_shares_than_the_threshold_give_nothing():
    members, boxes = _members()
    for member in members:
        member.receive(boxes)
    secret = members[4]._seeds[0]
    shares = {index: member._shares[4][32:64] for index, member in enumerate(members)}
    for some in itertools.combinations(range(NUM_CLIENTS), THRESHOLD):
        assert dropouts._combined({index: shares[index] for index in some}, THRESHOLD) == secret
    for some in itertools.combinations(range(NUM_CLIENTS), THRESHOLD - 1):
        assert dropouts._combined({index: shares[index] for index in some}, THRESHOLD) != secret


def test_shares_are_given_once():
    members, _ = _members()
    with pytest.raises(InvalidArgument, match="for a second time"):
        members[0].share([member.public_keys for member in members], b"session")


def test_shares_that_a_client_makes_up_are_noticed():
    platform = Dropping()
    exchange = platform.exchange

    def with_another_share(request):
        replies = exchange(request)
        if len(platform.requests) == FIRST_REVEALED + 1:
            reply = messages.read(replies[0])
            reply["revealed"][4] = bytes(32)
            replies[0] = messages.write(reply)
        return replies

    platform.exchange = with_another_share
    with pytest.raises(InvalidArgument, match="the shares of a secret of client 4 do not give it"):
        federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)


def test_a_platform_learns_at_the_start_how_many_are_enough():
    platform, begun = Dropping(), []
    platform.begin = lambda enough: begun.append((enough, len(platform.requests)))
    federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)
    exchanges = len(platform.requests)
    federated.run_on(platform, GRAPH, x=X)
    assert begun == [(THRESHOLD, 0), (NUM_CLIENTS, exchanges)]


@pytest.mark.parametrize("threshold", [4, 8, 0, True, 5.5])
def test_thresholds(threshold):
    with pytest.raises(InvalidArgument, match="for 7 clients, expected more than two thirds of two or more"):
        federated.run_on(Dropping(), GRAPH, threshold=threshold, x=X)


def test_one_client_is_refused_by_itself():
    member = dropouts.Member(FixedPoint(), 1, 1)
    with pytest.raises(InvalidArgument, match="threshold=1 for 1 clients"):
        member.share([member.public_keys], b"session")
