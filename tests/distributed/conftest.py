"""Warm ranks for every kind of world, shared by the tests of this folder."""

import pytest

from tests.distributed.worlds import Pools


@pytest.fixture(scope="session")
def pools():
    pools = Pools()
    yield pools
    pools.close()
