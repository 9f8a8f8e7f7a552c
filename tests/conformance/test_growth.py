"""Every registered algorithm: a thousand steps leave memory and handles as they were."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import bagua
from tests.conformance.training import make_optimizer, process_group
from tests.conformance.variants import VARIANTS, described


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _train(rank, world_size, variant):
    with process_group():
        algorithm, options = variant
        if algorithm == "async":
            options = {"sync_interval": 0.0}
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        optimizer = make_optimizer(algorithm, model, lr=1e-4)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=40_000, **options)
        x = torch.randn(2, 64)
        seen = []
        for step in range(1000):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step in (299, 999):
                seen.append((_resident_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        model.bagua.remove()
        return seen


# The last variant of each algorithm, which keeps most.
@pytest.mark.parametrize("variant", dict(VARIANTS).items(), ids=described)
def test_a_thousand_steps(pool2, variant):
    for early, late in pool2.run(_train, args=(variant,)):
        assert late[0] - early[0] < 3 * 2**20, f"{late[0] - early[0]} bytes more"
        assert late[1] <= early[1] and late[2] == early[2]  # descriptors, threads
