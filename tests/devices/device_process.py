"""Runs the body of a test in a process with devices, which stay the process's accelerator until it ends."""

import torch

import tests.emulated_device as emulated
from tests import accelerator


def on_each_device(body):
    """Runs the test once for each kind of device, without errors, delays and limits left by others."""

    def test(alone_on_devices):
        alone_on_devices.run(run_there, args=(body,))

    return _named_like(body, test)


def on_the_emulated_device(body):
    """Runs the test on the emulated device only."""

    def test(alone_on_emulated):
        alone_on_emulated.run(run_there, args=(body,))

    return _named_like(body, test)


def _named_like(body, test):
    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return test


def run_there(rank, world_size, body):
    """On the rank: `body()`."""
    torch.manual_seed(0)
    if not accelerator.is_emulated():
        body()
        return
    emulated.set_delay(emulated.DEFAULT_DELAY)
    try:
        body()
    finally:
        emulated.limit_memory(None)
        emulated.reset_errors()
        torch.accelerator.set_stream(torch.Stream(0, 0, _device_type()))
        torch.accelerator.set_device_index(0)


def _device_type():
    return torch.accelerator.current_stream().device_type
