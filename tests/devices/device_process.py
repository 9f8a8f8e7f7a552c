"""Runs tests in the process that has the emulated torch device: it is a process's accelerator for good."""

import torch

import tests.emulated_device as emulated


def on_the_device(body):
    """The test runs in the process that has the device, from a state without errors, delays and limits of others."""

    def test(process):
        process.run(run_there, args=(body,))

    test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
    return test


def run_there(rank, world_size, body):
    """On the rank: `body()`."""
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
