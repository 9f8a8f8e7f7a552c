"""Points at which ranks wait for one another without bagua, in the store of the test's own process.

A collective, a barrier too, ends on one rank while others are still in it: what dies, stops or fails there right
after it may yet fail them in that call. After `meet` nobody is in a call any more.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import TCPStore

_LIMIT = timedelta(seconds=60)


def meet() -> None:
    """Returns when every rank has called it as often as this one."""
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_LIMIT)
    world_size = int(os.environ["WORLD_SIZE"])
    # Nobody comes to a meeting before all have come to the one before, so the count tells which one this is.
    count = store.add("tests/meet", 1)
    key = f"tests/meet/{(count - 1) // world_size}"
    if count % world_size == 0:
        store.set(key, "")
    store.wait([key])


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns when the condition is true, however long the machine takes for it.

    Raises:
        AssertionError: it never becomes true.
    """
    deadline = time.monotonic() + _LIMIT.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)
