"""Shared by all tests: warm pools of ranks, and the `needs` marker."""

import importlib.util
import os

import pytest

# torch's store asks for the name of each peer's address, ::ffff:127.0.0.1, which /etc/hosts does not have; where the
# answer gets lost, that takes seconds. No test needs a name server.
os.environ["RES_OPTIONS"] = "attempts:0"


def pytest_collection_modifyitems(items):
    for item in items:
        for marker in item.iter_markers("needs"):
            missing = [name for name in marker.args if importlib.util.find_spec(name) is None]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}, which cannot be imported"))


def pytest_itemcollected(item):
    """The process that forks ranks gets ready while the rest of the tests is collected."""
    if {"pool2", "pool4"} & set(item.fixturenames) and not item.config.option.collectonly:
        from bagua.testing import rank_process

        rank_process.prepare()


@pytest.fixture(scope="session")
def pool2():
    """Two warm ranks, shared by all tests that leave no process group and no global state behind."""
    from bagua.testing import Pool

    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4():
    """Four of them."""
    from bagua.testing import Pool

    with Pool(4) as pool:
        yield pool


def _ranks_on_devices(num_ranks):
    from bagua.testing import Pool
    from tests import emulated_device

    if emulated_device.unavailable():
        pytest.skip(f"the emulated device {emulated_device.unavailable()}")
    emulated_device.build()  # here, where no deadline runs
    with Pool(num_ranks) as pool:
        pool.run(emulated_device.load_in_rank)
        yield pool


@pytest.fixture(scope="session")
def alone_on_devices():
    """A process that may load the emulated device, which stays its accelerator for good."""
    yield from _ranks_on_devices(1)


@pytest.fixture(scope="session")
def pair_on_devices():
    """Two of them."""
    yield from _ranks_on_devices(2)


@pytest.fixture
def device_pool2(pair_on_devices):
    """The two, with the device loaded before anything else: they are new where a test has failed."""
    from tests import emulated_device

    pair_on_devices.run(emulated_device.load_in_rank)
    return pair_on_devices


@pytest.fixture(scope="session")
def pool_of_two_nodes():
    """Four, two on each of two imitated nodes; BAGUA_SOCKET_IFNAME=lo connects them."""
    from bagua.testing import Pool

    with Pool(4, nodes=2) as pool:
        yield pool
