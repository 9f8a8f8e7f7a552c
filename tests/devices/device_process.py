"""Tests that use the emulated torch device run in a process of their own: a loaded device is its accelerator for good."""

import pytest
import torch

import tests.emulated_device as emulated
from bagua.testing import Pool


@pytest.fixture(scope="session")
def process():
    """The process that has the device."""
    reason = emulated.unavailable()
    if reason is not None:
        pytest.skip(reason)
    emulated.build()  # not in the rank, whose functions have less time
    with Pool(1) as pool:
        yield pool


def on_the_device(body):
    """The test runs in the process that has the device, from a state without errors, delays and limits of others."""

    def test(process):
        process.run(_run, args=(body,))

    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return test


def _run(rank, world_size, body):
    emulated.load()
    emulated.set_delay(emulated.DEFAULT_DELAY)
    torch.manual_seed(0)
    try:
        body()
    finally:
        emulated.limit_memory(None)
        emulated.reset_errors()
        torch.accelerator.set_stream(torch.Stream(0, 0, _device_type()))
        torch.accelerator.set_device_index(0)


def _device_type():
    return torch.accelerator.current_stream().device_type
