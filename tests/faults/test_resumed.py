"""A rank that is stopped in the middle of an operation and goes on when it has failed elsewhere harms nobody."""

import os
import threading
import time

import pytest

import bagua
from bagua.testing import Pool, cont, stop
from tests.faults.scenarios import process_group
from tests.meeting import meet, wait_until

NUMEL = 8_000_000
OPERATION_S = 2.0


def write_after_the_failure(rank, world_size, folder):
    """Rank 1 stops while it writes sums into rank 0's tensor; what rank 0 has there later is its own."""
    with process_group(OPERATION_S):
        tensor = bagua.empty(NUMEL)
        tensor.fill_(1.0)
        bagua.all_reduce(tensor)
        meet()
        if rank == 1:
            (folder / "pid").write_text(str(os.getpid()))
            threading.Timer(0.01, stop).start()  # while this thread is in an operation, nearly always
        with pytest.raises(bagua.BaguaError):
            while True:
                bagua.all_reduce(tensor)
        if rank == 0:
            tensor.fill_(7.0)
            (folder / "failed").touch()
            wait_until((folder / "resumed").exists, "rank 1 goes on")
            time.sleep(0.2)  # and comes to the end of what it was doing
            assert (tensor == 7).all()


# Stopped elsewhere each time.
@pytest.mark.timed
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(turn, marks=pytest.mark.slow("the same test, once")) for turn in range(1, 5))]
)
def test_a_rank_that_goes_on_writes_into_no_survivors_tensor(turn, tmp_path):
    with Pool(2) as pool:
        running = pool.start(write_after_the_failure, args=[tmp_path], env={"BAGUA_HEARTBEAT_TIMEOUT": "1"})
        wait_until((tmp_path / "failed").exists, "rank 0's operation fails")
        cont(int((tmp_path / "pid").read_text()))
        (tmp_path / "resumed").touch()
        running.result()
