"""Shared by all tests: warm pools of ranks, and the markers `needs` and `gpu`."""

import importlib.util
import os
import signal

import pytest

# torch's store asks for the name of each peer's address, ::ffff:127.0.0.1, which /etc/hosts does not have; where the
# answer gets lost, that takes seconds. No test needs a name server.
os.environ["RES_OPTIONS"] = "attempts:0"

# What is started in the background (`nohup make test &`) ignores Ctrl-C, and ranks would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # of those that -m has left
def pytest_collection_modifyitems(config, items):
    for item in items:
        for marker in item.iter_markers("needs"):
            missing = [name for name in marker.args if importlib.util.find_spec(name) is None]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}, which cannot be imported"))
    on_gpus = [item for item in items if item.get_closest_marker("gpu") is not None]
    if on_gpus:
        _leave_out_without_gpu(config, items, on_gpus)


def _leave_out_without_gpu(config, items, on_gpus):
    """One of them is skipped for all, with the reason and their number: a line for each would hide what else is."""
    from tests import accelerator

    if accelerator.no_gpu() is None:
        return
    first, *others = on_gpus
    first.add_marker(pytest.mark.skip(reason=f"{len(on_gpus)} tests marked gpu: {accelerator.no_gpu()}"), append=False)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=others)


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


@pytest.fixture(scope="session")
def device_pools():
    """Warm ranks by the kind of their devices and their number: a device stays a process's accelerator for good."""
    from bagua.testing import Pool
    from tests import accelerator, emulated_device

    class DevicePool(Pool):
        def start(self, fn, *, env=None, **options):
            return super().start(fn, env={**accelerator.ON_DEVICE, **(env or {})}, **options)

    pools = {}

    def ranks(kind, num_ranks):
        if kind == emulated_device.NAME:
            if emulated_device.unavailable():
                pytest.skip(f"the emulated device {emulated_device.unavailable()}")
            emulated_device.build()  # here, where no deadline runs
        pool = pools.setdefault((kind, num_ranks), DevicePool(num_ranks))
        pool.run(accelerator.load_in_rank, args=[kind])  # before anything else: they are new where a test has failed
        return pool

    yield ranks
    for pool in pools.values():
        pool.close()


# The kinds of tests/accelerator.py, which imports torch.
_on_each_kind = pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])


@_on_each_kind
def alone_on_devices(request, device_pools):
    """A process with devices: emulated ones, or GPUs."""
    return device_pools(request.param, 1)


@_on_each_kind
def pair_on_devices(request, device_pools):
    """Two of them."""
    return device_pools(request.param, 2)


@pytest.fixture
def alone_on_emulated(device_pools):
    """For what only the emulated device can show."""
    return device_pools("emulated", 1)


@pytest.fixture
def pair_on_emulated(device_pools):
    """Two of them."""
    return device_pools("emulated", 2)


@pytest.fixture(scope="session")
def pool_of_two_nodes():
    """Four, two on each of two imitated nodes; BAGUA_SOCKET_IFNAME=lo connects them."""
    from bagua.testing import Pool

    with Pool(4, nodes=2) as pool:
        yield pool
