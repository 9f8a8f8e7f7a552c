"""A job of NVFlare for the tests: rounds of FedAvg, whose server notes what it got and what travelled.

python -m tests.federated.nvflare_app FOLDER    # in NVFlare's simulator
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from bagua.errors import BaguaError
from bagua.federated import nvflare
from tests.federated import fedavg

TIMEOUT_SECONDS = 300
FAILS, FAILS_IN = "site-3", 4  # the client, and its first exchange in which it fails: that of masked values, after two
# exchanges of the first round and two of the second.


class Server(nvflare.ServerController):
    def __init__(self, folder, clients, timeout):
        super().__init__(clients, timeout)
        self.folder = folder

    def run(self, platform):
        found = [fedavg.run_on(platform), fedavg.run_on(platform, threshold=fedavg.THRESHOLD)]
        try:
            fedavg.run_on(platform)
        except BaguaError as error:
            found.append(str(error))
        torch.save(found, Path(self.folder, "found"))


class Site(nvflare.ClientExecutor):
    functions = fedavg.FUNCTIONS
    num_answers = 0

    def data_of(self, fl_ctx):
        return fedavg.data_of(int(fl_ctx.get_identity_name().rpartition("-")[2]) - 1)

    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        self.num_answers += 1
        if fl_ctx.get_identity_name() == FAILS and self.num_answers > FAILS_IN:
            shareable["bytes"] = shareable["bytes"][:-1]
        return super().execute(task_name, shareable, fl_ctx, abort_signal)


if __name__ == "__main__":
    from nvflare.job_config.api import FedJob

    from tests.federated import nvflare_app  # under the name by which a job's processes find the classes

    folder = sys.argv[1]
    job = FedJob(name="fedavg", min_clients=fedavg.NUM_CLIENTS)
    job.to_server(nvflare_app.Server(folder, fedavg.NUM_CLIENTS, TIMEOUT_SECONDS))
    job.to_clients(nvflare_app.Site())
    job.simulator_run(f"{folder}/workspace", n_clients=fedavg.NUM_CLIENTS, threads=fedavg.NUM_CLIENTS)
