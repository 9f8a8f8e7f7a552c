"""Warm ranks which no other folder uses: importing bagua.torch_api adds names to torch.nn.Module for good."""

import pytest

from bagua.testing import Pool


@pytest.fixture(scope="package")
def pool2():
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="package")
def pool3():
    with Pool(3) as pool:
        yield pool


@pytest.fixture(scope="package")
def pool_of_two_nodes():
    with Pool(4, nodes=2) as pool:
        yield pool
