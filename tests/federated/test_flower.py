"""Programs in Flower's own simulation, where clients are other processes; the oracle is the program in one process.

Clients that drop out are lost by a grid in this process, against loops over those that are left.
"""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian

from bagua import federated
from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument
from bagua.federated import flower
from tests.federated.programs import test_dropouts
from tests.federated.programs.test_trace import weighted
from tests.federated.verbs.test_verbs import X, Y, fax

CODING = federated.FixedPoint(bits=48, fraction_bits=24)


@pytest.fixture(scope="module")
def simulated():
    """What happened in one simulation: starting one takes seconds. By name, results or what was raised."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    rows = list(Y)
    happened = {}

    def data_of(context):
        return {"y": rows[context.node_config["partition-id"]]}

    def keep(name, function, *args, **kwargs):
        try:
            happened[name] = function(*args, **kwargs)
        except BaguaError as error:
            happened[name] = error

    server = ServerApp()

    @server.main()
    def main(grid, context):
        platform = flower.FlowerPlatform(grid, 3, timeout=60)
        happened["nodes"] = platform.nodes
        wrong = federated.trace(fax, X.double(), Y.double())  # of other data than the clients have
        keep("failing", federated.run_on, platform, wrong, x=X.double())
        for name, function in RUNS.items():
            keep(name, federated.run_on, platform, federated.trace(function, X, Y), coding=CODING, x=X)
        keep("coded", coded_runs, platform)
        absent = flower.FlowerPlatform(grid, [*platform.nodes[:2], 77], timeout=10)
        keep("missing", federated.run_on, absent, federated.trace(fax, X, Y), x=X)
        keep("few", flower.FlowerPlatform, grid, 4, timeout=0.2)
        keep("many", flower.FlowerPlatform, grid, 2)

    run_simulation(server, flower.client_app(data_of, in_the_clear=True), 3)
    return happened


def coded_runs(platform):
    """Three, in which each client and the server need what the runs before have left."""
    graph, deltas = federated.trace(grad(fax), X, Y), federated.Deltas("onebit")
    found = []
    for number in range(3):
        gradient = federated.run_on(platform, graph, coding=federated.Coded("onebit"), deltas=deltas, x=X + number)
        found.append((gradient, platform.bytes_down, platform.bytes_up))
    return found


RUNS = {"value": fax, "gradient": grad(fax), "gradient of weighted": grad(weighted), "Hessian": hessian(fax)}


@pytest.mark.needs("flwr", "ray")
@pytest.mark.parametrize("name", RUNS)
def test_flower_gives_what_the_program_gives(simulated, name):
    if isinstance(simulated[name], Exception):
        raise simulated[name]
    torch.testing.assert_close(simulated[name], RUNS[name](X, Y), rtol=1e-6, atol=9 * CODING.tolerance(3))


@pytest.mark.needs("flwr", "ray")
def test_codecs_and_bytes_are_those_of_isolated_clients(simulated):
    if isinstance(simulated["coded"], Exception):
        raise simulated["coded"]
    expected = coded_runs(federated.IsolatedClients([federated.Client.in_the_clear(y=row) for row in Y]))
    assert expected[0][1] != expected[1][1] and not torch.equal(expected[1][0], grad(fax)(X + 1, Y))
    for (gradient, *travelled), (expected_gradient, *expected_bytes) in zip(simulated["coded"], expected, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)
        assert travelled == expected_bytes


@pytest.mark.needs("flwr", "ray")
def test_errors_name_the_nodes(simulated):
    nodes, failing = simulated["nodes"], simulated["failing"]
    assert any(f"node {node}, code" in str(failing) for node in nodes), failing
    assert "needs of a client y: float64[2]" in str(failing)
    assert "node 77 of Flower failed in exchange 0 of 3 clients; node 77, not sent" in str(simulated["missing"])
    assert isinstance(simulated["few"], DeadlineExceeded)
    assert "3 nodes of Flower are connected after 0.2 s, expected 4" in str(simulated["few"])
    assert isinstance(simulated["many"], InvalidArgument)
    assert "3 nodes of Flower for 2 clients" in str(simulated["many"])


LATE, FAILS, UNREACHABLE, UNKNOWN, EMPTY = "late", "fails", "unreachable", "unknown", "empty"


class Grid:
    """Nodes in this process, with the interface of Flower's grid.

    Args:
        num: of nodes, whose ids are 100, 101 and so on; each has a row of test_dropouts.
        lost: by node, from which exchange on it answers no more, and how.
    """

    def __init__(self, num, lost):
        from flwr.app import Context, RecordDict

        self.app = flower.client_app(lambda context: {"y": test_dropouts.ROWS[context.node_config["partition-id"]]})
        self.contexts = {100 + i: Context(1, 100 + i, {"partition-id": i}, RecordDict(), {}) for i in range(num)}
        self.lost, self.asked, self.replies = lost, [], {}

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        exchange, ids = len(self.asked), []
        self.asked.append([message.metadata.dst_node_id for message in messages])
        for message in messages:
            node = message.metadata.dst_node_id
            name = message.metadata.__dict__["_message_id"] = f"{node} in {exchange}"
            since, how = self.lost.get(node, (exchange + 1, None))
            reply = self._reply(message, node, how if exchange >= since else None)
            ids.append(None if reply is UNKNOWN else name)
            if reply is not None and reply is not UNKNOWN:
                self.replies[name] = reply
        return ids

    def pull_messages(self, ids):
        return [self.replies.pop(one) for one in ids if one in self.replies]

    def _reply(self, message, node, how):
        from flwr.app import Error, Message, RecordDict

        if how is None:
            return self.app(message, self.contexts[node])
        if how is FAILS:
            return Message(Error(2, "ValueError"), reply_to=message)
        if how is EMPTY:
            return Message(RecordDict(), reply_to=message)
        if how is UNREACHABLE:
            reply = Message(Error(5, "Node Unavailable"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # The SuperLink answers for it.
            return reply
        return UNKNOWN if how is UNKNOWN else None


@pytest.fixture
def lost_by(monkeypatch):
    """Makes a platform that loses nodes: ``gone`` has of each client the exchange and how."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):  # of the process of a ServerApp, without which it sends nothing
        monkeypatch.setattr(TaskIdentity, name, 1)

    def platform(gone, timeout=0.05):
        grid = Grid(test_dropouts.NUM_CLIENTS, {100 + client: how for client, how in gone.items()})
        return grid, flower.FlowerPlatform(grid, test_dropouts.NUM_CLIENTS, timeout=timeout)

    return platform


@pytest.mark.needs("flwr", "Crypto")
@pytest.mark.parametrize("ways", [(LATE, FAILS), (UNREACHABLE, UNKNOWN)], ids=str)
@pytest.mark.parametrize("exchange", range(test_dropouts.SECOND_REVEALED + 1))
def test_nodes_drop_out_at_every_point(lost_by, exchange, ways):
    grid, platform = lost_by({1: (exchange, ways[0]), 3: (exchange, ways[1])})
    run = {"threshold": test_dropouts.THRESHOLD, "x": test_dropouts.X}
    found = federated.run_on(platform, test_dropouts.GRAPH, **run)
    gone = {1: exchange, 3: exchange}
    rounds = (test_dropouts.left(gone, one) for one in (test_dropouts.FIRST, test_dropouts.SECOND))
    torch.testing.assert_close(found, test_dropouts.in_a_loop(*rounds), atol=1e-6, rtol=1e-6)
    left = [100, 102, 104, 105, 106]
    assert grid.asked == [sorted([*left, 101, 103])] * (exchange + 1) + [left] * (
        test_dropouts.SECOND_REVEALED - exchange
    )
    grid.lost.clear()
    total, _ = federated.run_on(platform, test_dropouts.GRAPH, **run)  # all are asked again
    torch.testing.assert_close(total, test_dropouts.in_a_loop(range(7), [0])[0], atol=1e-6, rtol=1e-6)


@pytest.mark.needs("flwr", "Crypto")
@pytest.mark.parametrize(
    "how, error, reason",
    [
        (LATE, DeadlineExceeded, "node 101 of Flower did not reply {}, within 0.05 s"),
        (FAILS, BaguaError, "the client on node 101 of Flower failed {}; node 101, code 2: ValueError"),
        (UNREACHABLE, BaguaError, "the client on node 101 of Flower failed {}; node 101, code 5: Node Unavailable"),
        (UNKNOWN, BaguaError, "the client on node 101 of Flower failed {}; node 101, not sent"),
        (
            EMPTY,
            BaguaError,
            "the client on node 101 of Flower failed {}; node 101, a reply that client_app does not make",
        ),
    ],
)
def test_a_run_that_needs_the_node_ends_with_an_error_that_names_it(lost_by, how, error, reason):
    _, platform = lost_by({1: (1, how)})
    with pytest.raises(error) as caught:
        federated.run_on(platform, test_dropouts.GRAPH, x=test_dropouts.X)
    assert reason.format("in exchange 1 of 7 clients") in str(caught.value)
    _, platform = lost_by({0: (0, LATE), 6: (1, FAILS), 1: (2, how)})
    with pytest.raises(error) as caught:
        federated.run_on(platform, test_dropouts.GRAPH, threshold=5, x=test_dropouts.X)
    where = "in exchange 2 of 7 clients, of which 5 are needed and 5 were left"
    assert reason.format(where) in str(caught.value)


@pytest.mark.needs("flwr", "Crypto")
def test_what_cannot_be_had_is_not_waited_for(lost_by):
    """Where too few can still reply the timeout, of a year, does not matter."""
    _, platform = lost_by({1: (0, LATE), 2: (0, FAILS)}, timeout=3e7)
    with pytest.raises(BaguaError, match="node 102 of Flower failed"):
        federated.run_on(platform, test_dropouts.GRAPH, x=test_dropouts.X)
    _, platform = lost_by({0: (0, FAILS), 1: (0, UNREACHABLE), 2: (0, UNKNOWN), 4: (0, LATE)}, timeout=3e7)
    with pytest.raises(BaguaError, match="5 are needed and 7 were left"):
        federated.run_on(platform, test_dropouts.GRAPH, threshold=5, x=test_dropouts.X)


@pytest.mark.needs("flwr")
def test_nodes_answer_in_the_clear_only_if_they_say_so(lost_by):
    _, platform = lost_by({})
    with pytest.raises(InvalidArgument, match="make it by Client.in_the_clear.* or by in_the_clear=True on Flower"):
        federated.run_on(platform, test_dropouts.GRAPH, coding=federated.Coded("bf16"), x=test_dropouts.X)


def test_without_flwr_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(InvalidArgument, match=r"need the package flwr .*pip install 'bagua\[flower\]'"):
        flower.client_app(lambda context: {})
