"""Every registered algorithm: some hundred steps leave memory and handles as they were after the first ones."""

from __future__ import annotations

import os
import threading

import pytest
import torch

import bagua
from tests.conformance.training import make_optimizer, process_group
from tests.conformance.variants import ONE_OF_EACH, described
from tests.distributed.worlds import SAME_TEST

_FIRST, _LAST = 200, 700
# The memory allocator may take so much for itself. A leak of a single object per step is more.
_BYTES_PER_STEP = 250


def _private_bytes():
    """Resident, without what processes share: the rings between ranks of a host have a fixed size, and fill once."""
    with open("/proc/self/statm") as file:
        _, resident, shared, *_ = map(int, file.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _train(rank, world_size, variant):
    with process_group():
        algorithm, options = variant
        if algorithm == "async_averaging":
            options = {"sync_interval": 0.0}
        model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 8))
        optimizer = make_optimizer(algorithm, model, lr=1e-4)
        bagua.with_bagua(model, optimizer, algorithm=algorithm, bucket_bytes=40_000, **options)
        x = torch.randn(2, 64)
        seen = []

        def train():
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for rounds in bagua.get_default_group().subgroups:  # whose first one comes when it comes, and takes memory once
            while not len(rounds.events(parts=True)) > len(rounds.events(parts=False)) > 0:
                train()
        for step in range(_LAST + 1):
            train()
            if step in (_FIRST, _LAST):
                seen.append((_private_bytes(), len(os.listdir("/proc/self/fd")), threading.active_count()))
        model.bagua.remove()
        return seen


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(variant, id=described(variant), marks=() if variant[0] == "bytegrad" else SAME_TEST)
        for variant in ONE_OF_EACH
    ],
)
def test_steps_leave_nothing(pool2, variant):
    for early, late in pool2.run(_train, args=(variant,)):
        per_step = (late[0] - early[0]) / (_LAST - _FIRST)
        assert per_step < _BYTES_PER_STEP, f"{per_step:.0f} bytes more with every step"
        assert late[1] <= early[1] and late[2] == early[2]  # descriptors, threads
