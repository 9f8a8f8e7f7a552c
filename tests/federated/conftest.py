"""Warm ranks by their number."""

import pytest

from bagua.testing import Pool


@pytest.fixture(scope="session")
def pools(pool2, pool4):
    with Pool(3) as pool3:
        yield {2: pool2, 3: pool3, 4: pool4}
