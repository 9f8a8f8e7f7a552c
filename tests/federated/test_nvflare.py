"""Programs on NVFlare: in its simulator, whose clients are processes, and on a controller in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bagua import federated
from bagua.errors import Aborted, BaguaError, DeadlineExceeded
from tests.federated import fedavg
from tests.federated.programs import test_dropouts

pytestmark = pytest.mark.needs("nvflare", "Crypto")
ROOT = Path(__file__).parents[2]
LATE, FAILS = "late", "fails"
DEADLINE_SECONDS = 500


class Job:
    """A controller's side of a job, whose clients are in this process.

    Args:
        lost: by client, from which exchange on it gives no result, and how.
    """

    def __init__(self, lost, **options):
        from bagua.federated import nvflare

        class Site(nvflare.ClientExecutor):
            def data_of(self, fl_ctx):
                return {"y": test_dropouts.ROWS[self.client]}

        self.sites = {f"site-{client}": Site() for client in range(test_dropouts.NUM_CLIENTS)}
        for client, site in enumerate(self.sites.values()):
            site.client = client
        self.lost, self.asked, self.is_cancelled = {f"site-{client}": how for client, how in lost.items()}, [], False
        self.abort_signal = SimpleNamespace(triggered=False)
        context = SimpleNamespace(get_engine=lambda: self)
        self.platform = nvflare.NVFlarePlatform(self, context, self.abort_signal, 7, timeout=0.3, **options)

    def get_clients(self):
        return [SimpleNamespace(name=name) for name in self.sites]

    def cancel_task(self, task):
        self.is_cancelled = True

    def broadcast_and_wait(self, task, fl_ctx, targets, min_responses, abort_signal):
        from nvflare.apis.client import Client
        from nvflare.apis.controller_spec import ClientTask
        from nvflare.apis.fl_context import FLContext
        from nvflare.apis.shareable import Shareable

        assert (task.timeout, min_responses) == (1, len(targets))
        exchange, self.is_cancelled = len(self.asked), False
        self.asked.append(targets)
        for name in targets:
            since, how = self.lost.get(name, (exchange + 1, None))
            if exchange < since or how is FAILS:
                request = Shareable(task.data if exchange < since else {"bytes": b"none"})
                client_task = ClientTask(Client(name, name), task)
                client_task.result = self.sites[name].execute(task.name, request, FLContext(), abort_signal)
                task.result_received_cb(client_task, fl_ctx)
            if self.is_cancelled:
                return


@pytest.mark.parametrize("exchange", range(test_dropouts.SECOND_REVEALED + 1))
def test_clients_drop_out_at_every_point(exchange):
    job = Job({1: (exchange, LATE), 3: (exchange, FAILS)})
    found = federated.run_on(job.platform, test_dropouts.GRAPH, threshold=test_dropouts.THRESHOLD, x=test_dropouts.X)
    gone = {1: exchange, 3: exchange}
    rounds = (test_dropouts.left(gone, one) for one in (test_dropouts.FIRST, test_dropouts.SECOND))
    torch.testing.assert_close(found, test_dropouts.in_a_loop(*rounds), atol=1e-6, rtol=1e-6)
    everyone = list(job.sites)
    left = [name for name in everyone if name not in ("site-1", "site-3")]
    assert job.asked == [everyone] * (exchange + 1) + [left] * (test_dropouts.SECOND_REVEALED - exchange)


def test_a_run_that_needs_all_clients_ends_with_an_error_that_names_them():
    job = Job({2: (0, FAILS), 5: (0, FAILS)})
    with pytest.raises(
        BaguaError, match="node site-2 of NVFlare failed in exchange 0 of 7 .*4 bytes that are no message"
    ):
        federated.run_on(job.platform, test_dropouts.GRAPH, x=test_dropouts.X)
    assert job.is_cancelled
    job = Job({2: (1, LATE), 5: (1, LATE)})
    with pytest.raises(DeadlineExceeded, match=r"node site-2, site-5 of NVFlare did not reply in exchange 1 .* 0.3 s"):
        federated.run_on(job.platform, test_dropouts.GRAPH, x=test_dropouts.X)
    job = Job({})
    job.abort_signal.triggered = True
    with pytest.raises(Aborted, match="NVFlare ends the job, in exchange 0"):
        federated.run_on(job.platform, test_dropouts.GRAPH, x=test_dropouts.X)


def test_other_errors_are_said_by_their_types_only():
    job = Job({})
    job.sites["site-4"].data_of = lambda fl_ctx: {"y": [][3]}
    with pytest.raises(BaguaError, match="node site-4, EXECUTION_EXCEPTION: IndexError$"):
        federated.run_on(job.platform, test_dropouts.GRAPH, x=test_dropouts.X)


def test_a_result_that_no_executor_of_ours_makes_names_its_client():
    from nvflare.apis.shareable import Shareable

    job = Job({})
    job.sites["site-4"].execute = lambda *_: Shareable({})
    with pytest.raises(BaguaError, match="node site-4, OK: see its log"):
        federated.run_on(job.platform, test_dropouts.GRAPH, x=test_dropouts.X)


def test_clients_answer_in_the_clear_only_if_they_say_so():
    coding = federated.Coded("fp16")
    job = Job({})
    with pytest.raises(BaguaError, match="node site-0, EXECUTION_EXCEPTION: .* make it by Client.in_the_clear"):
        federated.run_on(job.platform, test_dropouts.GRAPH, coding=coding, x=test_dropouts.X)
    job = Job({})
    for site in job.sites.values():
        site.in_the_clear = True
    total, _ = federated.run_on(job.platform, test_dropouts.GRAPH, coding=coding, x=test_dropouts.X)
    torch.testing.assert_close(total, test_dropouts.in_a_loop(range(7), [0])[0], atol=0.1, rtol=0.01)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    """What the job's server found."""
    folder = tmp_path_factory.mktemp("nvflare")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.federated.nvflare_app", str(folder)]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
    try:
        process.wait(DEADLINE_SECONDS)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    assert (folder / "found").exists(), (folder / "log").read_text(errors="replace")[-5000:]
    return torch.load(folder / "found")


@pytest.mark.slow("test_nodes_drop_out_for_the_rest_of_a_run")
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_the_simulator_gives_the_bits_and_bytes_of_other_places(simulated):
    of_all, _, _ = simulated
    fedavg.check_same_bits(of_all["total"], fedavg.on_isolated_clients())
    fedavg.check_cost(of_all)


@pytest.mark.slow("test_nodes_drop_out_for_the_rest_of_a_run")
@pytest.mark.timeout(DEADLINE_SECONDS + 60)
def test_a_client_of_the_simulator_fails(simulated):
    _, without_one, error = simulated
    fedavg.check_against_a_loop(without_one["total"], [0, 1, 3])
    assert [len(one) for one in without_one["up"]] == [4, 4, 3, 3]
    assert "the client on node site-3 of NVFlare failed in exchange 6 of 4 clients; node site-3, EXECUTION" in error
    assert "bytes that are no message of run_on" in error
