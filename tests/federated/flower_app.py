"""A Flower app of the tests: rounds of FedAvg, whose server notes what it got and what travelled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from bagua.federated import flower
from tests.federated import fedavg

TIMEOUT_SECONDS = 300
KILLED, KILLED_BEFORE = 2, 2  # the client, and the exchange in which it would send its masked values


def server(folder):
    """Runs a round, then one in which a SuperNode is killed, whose process group is in the folder."""

    def kill(number):
        if number == KILLED_BEFORE:
            os.killpg(int(Path(folder, "killed").read_text()), signal.SIGKILL)

    def serve(platform):
        found = fedavg.run_on(platform), fedavg.run_on(platform, kill, threshold=fedavg.THRESHOLD)
        torch.save(found, Path(folder, "unfinished"))
        Path(folder, "unfinished").rename(Path(folder, "found"))

    return flower.server_app(serve, fedavg.NUM_CLIENTS, timeout=TIMEOUT_SECONDS)


def client():
    return flower.client_app(lambda context: fedavg.data_of(context.node_config["partition-id"]), fedavg.FUNCTIONS)
