"""The process that has the emulated torch device."""

import pytest

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
