"""bagua.net.stall_watch: a process that did not run for long knows it, and names itself when its peers have left."""

import ctypes

import pytest

import bagua
from bagua.net.stall_watch import StallWatch
from bagua.testing import spawn

pytestmark = pytest.mark.timed

LIMIT_S = 0.1


def hold_interpreter(seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_an_interpreter_that_is_held_up_is_a_stall():
    watch, patient = StallWatch(LIMIT_S), StallWatch(60.0)
    hold_interpreter(3 * LIMIT_S)
    assert watch.recent_s() > 2 * LIMIT_S and patient.recent_s() == 0
    for it in (watch, patient):
        it.close()


def come_when_the_other_has_left(rank, world_size):
    bagua.init_process_group(timeout=1.0)
    if rank == 1:
        hold_interpreter(5.0)
    with pytest.raises(bagua.BaguaError) as caught:
        bagua.barrier()
    bagua.destroy_process_group()
    return caught.value.rank, str(caught.value)


@pytest.mark.slow("test_an_interpreter_that_is_held_up_is_a_stall")
def test_a_rank_that_was_held_up_names_itself():
    (by_0, _), (by_1, message) = spawn(come_when_the_other_has_left, 2, env={"BAGUA_HEARTBEAT_TIMEOUT": "1"})
    assert by_0 == by_1 == 1 and "this rank did not run for" in message, message
