"""bagua.net.stall_watch: a process that did not run for long knows it, and names itself for what it has missed."""

import contextlib
import ctypes
import os
import queue
import subprocess
import time
from datetime import timedelta

import pytest

import bagua
from bagua.net import rendezvous
from bagua.net.stall_watch import StallCount, StallWatch
from bagua.testing import spawn
from tests.meeting import wait_until

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


class HoldingStore:
    """Nobody's key is there when it is asked first; then it holds the interpreter up, in which this rank waits."""

    def __init__(self, held_s, later):
        self.held_s, self.later, self.written = held_s, later, {}

    def check(self, keys):
        held_s, self.held_s = self.held_s, None
        if held_s is not None:
            hold_interpreter(held_s)
            return False
        return self.later(keys)

    def get(self, key):
        return b"a record"

    def set(self, key, value):
        self.written[key] = value


def fail(keys):
    raise RuntimeError("connection reset")


def test_the_time_of_a_stall_makes_nobody_late_in_the_rendezvous(monkeypatch):
    for name, seconds in {"_PIECE_SECONDS": 0.02, "_POLL_SECONDS": 0.01, "_STALL_SECONDS": 0.06}.items():
        monkeypatch.setattr(rendezvous, name, seconds)

    def meet(held_s, later, timeout_s=None):
        store = HoldingStore(held_s, later)
        begin = time.monotonic()
        try:
            timeout = timedelta(seconds=timeout_s or 0.7 * held_s)
            return rendezvous._RendezvousStore(store, 3, 4, timeout).get("rank/1", rendezvous._ABSENT, 1)
        except bagua.BaguaError as error:
            return error, time.monotonic() - begin, store.written.get("fault")

    assert meet(0.12, lambda keys: "rank/1" in keys) == b"a record", "of a rank that comes when this one runs again"
    error, seconds, fault = meet(0.08, lambda keys: False)
    # The time of a stall but for one piece of it, and all of the timeout.
    assert error.rank == 1 and seconds > 0.06 + 0.055 and "but rank 3 itself did not run for 0." in str(error), error
    assert fault == f"1 {error}"
    error, _, _ = meet(0.08, fail)
    assert error.rank == 3 and "rank 3 did not run for 0." in str(error), "rank 0 had left"
    error, _, _ = meet(0.08, fail, timeout_s=30.0)
    assert error.rank is None and "rank 3 did not run for 0." in str(error), "nobody knows why rank 0 has left so early"


def meet_after_a_stop(rank, world_size, path):
    """Rank 1 is stopped for longer than its rendezvous may take; rank 2 comes when it goes on."""
    pid = os.getpid()
    commands = f"sleep 0.5; kill -STOP {pid}; sleep 2; kill -CONT {pid}; sleep 0.3; touch {path}"
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(subprocess.Popen(["sh", "-c", commands]))
        if rank == 2:
            wait_until(lambda: os.path.exists(path), "it goes on")
        bagua.init_process_group(timeout=1.5 if rank == 1 else 30.0)
        bagua.destroy_process_group()


class _HeldUp:
    """A queue to which nothing comes, and while one waits for it the interpreter is held up."""

    def __init__(self):
        self.num_waits = 0

    def get(self, timeout):
        self.num_waits += 1
        hold_interpreter(LIMIT_S)
        raise queue.Empty


def test_stalls_without_end_make_no_wait_endless():
    ended, piece_s = _HeldUp(), LIMIT_S / 4
    with pytest.raises(queue.Empty):
        rendezvous._get_within(ended, 4 * piece_s, StallCount(LIMIT_S / 2, piece_s))
    assert 2 <= ended.num_waits <= 6  # a piece of each counts


@pytest.mark.slow("test_the_time_of_a_stall_makes_nobody_late_in_the_rendezvous")
def test_a_rank_that_was_stopped_in_the_rendezvous_waits_for_the_others(tmp_path):
    spawn(meet_after_a_stop, 3, args=(str(tmp_path / "goes-on"),))
