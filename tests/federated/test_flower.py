"""Programs in Flower's own simulation, where clients are other processes; the oracle is the program in one process."""

from __future__ import annotations

import pytest
import torch
from torch.func import grad, hessian

from bagua import federated
from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument
from bagua.federated import flower
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
        absent = flower.FlowerPlatform(grid, [*platform.nodes[:2], 77], timeout=10)
        keep("missing", federated.run_on, absent, federated.trace(fax, X, Y), x=X)
        keep("few", flower.FlowerPlatform, grid, 4, timeout=0.2)
        keep("many", flower.FlowerPlatform, grid, 2)

    run_simulation(server, flower.client_app(data_of), 3)
    return happened


RUNS = {"value": fax, "gradient": grad(fax), "gradient of weighted": grad(weighted), "Hessian": hessian(fax)}


@pytest.mark.needs("flwr", "ray")
@pytest.mark.parametrize("name", RUNS)
def test_flower_gives_what_the_program_gives(simulated, name):
    if isinstance(simulated[name], Exception):
        raise simulated[name]
    torch.testing.assert_close(simulated[name], RUNS[name](X, Y), rtol=1e-6, atol=9 * CODING.tolerance(3))


@pytest.mark.needs("flwr", "ray")
def test_errors_name_the_nodes(simulated):
    nodes, failing = simulated["nodes"], simulated["failing"]
    assert any(f"node {node}, code" in str(failing) for node in nodes), failing
    assert "needs of a client y: float64[2]" in str(failing)
    assert isinstance(simulated["missing"], DeadlineExceeded)
    assert "node 77 of Flower did not reply in exchange 0 of 3" in str(simulated["missing"])
    assert isinstance(simulated["few"], DeadlineExceeded)
    assert "3 nodes of Flower are connected after 0.2 s, expected 4" in str(simulated["few"])
    assert isinstance(simulated["many"], InvalidArgument)
    assert "3 nodes of Flower for 2 clients" in str(simulated["many"])


def test_without_flwr_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "flwr", None)
    with pytest.raises(InvalidArgument, match=r"need the package flwr .*pip install 'bagua\[flower\]'"):
        flower.client_app(lambda context: {})
