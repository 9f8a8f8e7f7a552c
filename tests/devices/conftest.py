"""The process that has the emulated torch device."""

import pytest


@pytest.fixture(scope="session")
def process(alone_on_devices):
    return alone_on_devices
