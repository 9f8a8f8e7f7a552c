"""Nodes that fail or do not reply: they drop out of a run at every point, or end it with errors that name them."""

from __future__ import annotations

import logging

import pytest
import torch

from bagua import federated
from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument
from bagua.federated.programs.nodes import NodePlatform
from tests.federated.programs import test_dropouts
from tests.federated.programs.test_dropouts import GRAPH, NUM_CLIENTS, ROWS, THRESHOLD, X

pytestmark = pytest.mark.needs("Crypto")
NAMES = "abcdefg"
LATE, FAILS = "late", "fails"


class Nodes(NodePlatform):
    """Nodes in this process. ``lost`` has of each that stops to reply the exchange and how."""

    framework, at_a_node = "Test", "process"

    def __init__(self, lost, clients=NUM_CLIENTS, timeout=0.01):
        self.clients = dict(zip(NAMES, [federated.Client(y=row) for row in ROWS], strict=True))
        self.lost, self.asked = lost, []
        super().__init__(clients, timeout)

    def _connected(self):
        return reversed(self.clients)

    def _send(self, request, number, nodes, enough):
        assert number == len(self.asked)
        self.asked.append("".join(nodes))
        replies, errors = {}, {}
        for node in reversed(nodes):
            since, how = self.lost.get(node, (number + 1, None))
            if number < since:
                replies[node] = self.clients[node].answer(request)
            elif how is FAILS:
                errors[node] = f"broken since {since}"
        return replies, errors


@pytest.mark.parametrize("exchange", range(test_dropouts.SECOND_REVEALED + 1))
def test_nodes_drop_out_for_the_rest_of_a_run(exchange, caplog):
    platform = Nodes({"b": (exchange, LATE), "d": (exchange, FAILS)})
    with caplog.at_level(logging.WARNING, "bagua"):
        found = federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)
    gone = {1: exchange, 3: exchange}
    rounds = (test_dropouts.left(gone, one) for one in (test_dropouts.FIRST, test_dropouts.SECOND))
    torch.testing.assert_close(found, test_dropouts.in_a_loop(*rounds), atol=1e-6, rtol=1e-6)
    num_exchanges = test_dropouts.SECOND_REVEALED + 1
    assert platform.asked == [NAMES] * (exchange + 1) + ["acefg"] * (num_exchanges - 1 - exchange)
    assert [record.getMessage() for record in caplog.records] == [
        f"node d of Test has dropped out in exchange {exchange} of 7 clients: broken since {exchange}",
        f"node b of Test has dropped out in exchange {exchange} of 7 clients: no reply within 0.01 s",
    ]
    platform.lost = {}
    federated.run_on(platform, GRAPH, threshold=THRESHOLD, x=X)
    assert platform.asked[num_exchanges:] == [NAMES] * num_exchanges


@pytest.mark.parametrize(
    "lost, options, error, text",
    [
        (
            {"b": (1, LATE)},
            {},
            DeadlineExceeded,
            "node b of Test did not reply in exchange 1 of 7 clients, within 0.01",
        ),
        (
            {"c": (0, FAILS), "e": (0, LATE)},
            {},
            BaguaError,
            "node c of Test failed in exchange 0 of 7 clients; node c, b",
        ),
        (
            {"a": (0, LATE), "b": (0, LATE), "g": (0, FAILS)},
            {"threshold": THRESHOLD},
            DeadlineExceeded,
            "node a, b of Test did not reply in exchange 0 of 7 clients, of which 5 are needed and 7 were left, within "
            "0.01 s: is its process running?; the client on node g failed, broken since 0",
        ),
        (
            {"a": (0, LATE), "b": (1, FAILS), "f": (2, LATE), "g": (2, LATE)},
            {"threshold": THRESHOLD},
            DeadlineExceeded,
            "node f, g of Test did not reply in exchange 2 of 7 clients, of which 5 are needed and 5 were left, within",
        ),
    ],
)
def test_too_few_end_the_run(lost, options, error, text):
    with pytest.raises(error) as caught:
        federated.run_on(Nodes(lost), GRAPH, x=X, **options)
    assert text in str(caught.value) and type(caught.value) is error


def test_which_nodes_take_part():
    assert Nodes({}).nodes == list(NAMES)
    assert Nodes({}, clients="gca").nodes == ["g", "c", "a"]
    with pytest.raises(DeadlineExceeded, match="7 nodes of Test are connected after 0.01 s, expected 8"):
        Nodes({}, clients=8)
    with pytest.raises(InvalidArgument, match="7 nodes of Test for 6 clients: give those that take part, of .'a', 'b'"):
        Nodes({}, clients=6)
