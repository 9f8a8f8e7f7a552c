"""A program on Flower in deployment: a SuperLink and SuperNodes that are processes of this machine, on loopback.

The same program runs in this process, on isolated clients and on ranks with a client each: the same bits everywhere.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bagua.testing import free_port
from tests.federated import fedavg, flower_app

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 500
PROJECT = """
[project]
name = "bagua-rounds"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "bagua"
[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
"""
APP = """
from tests.federated import fedavg, flower_app
server = flower_app.server({folder!r})
client = flower_app.client()
"""
CONFIG = """
[superlink]
default = "here"
[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""


def command(name, *arguments):
    return [str(Path(sys.executable).parent / name), *map(str, arguments)]


@contextlib.contextmanager
def processes(environment, folder):
    """Starts commands in sessions of their own, and ends them; yields how, and the processes by name."""
    started = {}

    def start(name, *arguments):
        with open(folder / f"{name}.log", "wb") as log:
            started[name] = subprocess.Popen(
                arguments, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        return started[name]

    try:
        yield start, started
    finally:
        for process in started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def left_in(sessions):
    """Returns the commands of processes that are alive in these sessions."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            state, _, _, session, *_ = (process / "stat").read_text().rpartition(")")[2].split()
            if int(session) in sessions and state != "Z":
                found.append((process / "cmdline").read_text())
    return found


def run(folder):
    """Returns what the app's server found, with all clients and without the one that was killed, and the sessions."""
    ports = [free_port() for _ in range(1 + fedavg.NUM_CLIENTS)]
    for name, text in {
        "app/pyproject.toml": PROJECT,
        "app/app.py": APP.format(folder=str(folder)),
        "home/config.toml": CONFIG.format(port=ports[0]),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    environment = os.environ | {
        "FLWR_HOME": str(folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    deadline = time.monotonic() + DEADLINE_SECONDS

    def wait_for(is_there, *needed):
        while not is_there():
            ended = [process.args[0] for process in needed if process.poll() is not None]
            logs = {log.name: log.read_text(errors="replace")[-3000:] for log in folder.glob("*.log")}
            assert not ended and time.monotonic() < deadline, "\n".join([f"ended: {ended}", *map(str, logs.items())])
            time.sleep(0.2)

    with processes(environment, folder) as (start, started):
        link = start(
            "superlink",
            *command("flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", ports[0]),
            "--disable-runtime-dependency-installation",
        )
        for client, port in enumerate(ports[1:]):
            to = ("--insecure", "--superlink", f"127.0.0.1:{ports[0]}", "--host", "127.0.0.1", "--port", port)
            node = start(f"node{client}", *command("flower-supernode", *to, "--node-config", f"partition-id={client}"))
            if client == flower_app.KILLED:
                (folder / "killed").write_text(str(node.pid))
        wait_for(lambda: "startup complete" in (folder / "superlink.log").read_text(), link)
        start("run", *command("flwr", "run", folder / "app", "here", "--stream"))
        wait_for((folder / "found").exists, link)
        assert left_in({link.pid})
    return torch.load(folder / "found"), {process.pid for process in started.values()}


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("deployment"))


def test_ranks_give_the_bits_of_isolated_clients(pool4):
    """And the program in one process; with these, other frameworks are compared."""
    total = fedavg.on_isolated_clients()
    fedavg.check_against_a_loop(total, range(fedavg.NUM_CLIENTS))
    fedavg.check_same_bits(fedavg.program(fedavg.MODEL, fedavg.INPUTS, fedavg.ANSWERS), total)
    for of_rank in pool4.run(fedavg.on_a_rank):
        fedavg.check_same_bits(of_rank, total)


@pytest.mark.timed
@pytest.mark.slow("test_ranks_give_the_bits_of_isolated_clients")
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.needs("flwr", "Crypto")
def test_a_deployment_gives_the_same_bits_and_bytes(deployed):
    (of_all, _), _ = deployed
    fedavg.check_same_bits(of_all["total"], fedavg.on_isolated_clients())
    fedavg.check_cost(of_all)


@pytest.mark.timed
@pytest.mark.slow("test_nodes_drop_out_for_the_rest_of_a_run")
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
@pytest.mark.needs("flwr", "Crypto")
def test_a_run_survives_a_supernode_that_is_killed(deployed):
    (_, without_one), sessions = deployed
    fedavg.check_against_a_loop(without_one["total"], {0, 1, 2, 3} - {flower_app.KILLED})
    assert [len(one) for one in without_one["up"]] == [4] * flower_app.KILLED_BEFORE + [3, 3]
    # Flower has missed its heartbeats, long before the exchange's timeout.
    assert max(without_one["seconds"]) < flower_app.TIMEOUT_SECONDS
    deadline = time.monotonic() + 10
    while (left := left_in(sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
