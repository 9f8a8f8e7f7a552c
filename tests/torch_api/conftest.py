"""A pool of three warm ranks, which no other folder needs."""

import pytest

from bagua.testing import Pool


@pytest.fixture(scope="package")
def pool3():
    with Pool(3) as pool:
        yield pool
