"""Failures among ranks that have not connected yet: whom they name, and how the reason reaches them."""

import itertools
import signal
import socket
import threading
import time

import pytest
import torch

import bagua
from bagua.net.auth import Credentials
from bagua.net.connector import notify
from bagua.net.listener import Listener
from bagua.net.rendezvous import RankRecord
from bagua.testing import kill
from tests.distributed.worlds import fast_in, in_worlds, shm, tcp
from tests.faults.scenarios import (
    LONG_S,
    NOTICED_S,
    check_patience,
    note_time,
    noted_time,
    process_group,
    spawn_in,
    watch,
)
from tests.meeting import meet

pytestmark = pytest.mark.timed

TIMEOUT_S = 0.5


def come_late(rank, world_size):
    """The others give up and leave before rank 2 says its first word."""
    with process_group() as group:
        meet()
        group.set_timeout(TIMEOUT_S)
        if rank == 2:
            meet()
            return watch(bagua.barrier)
        seen = watch(bagua.barrier)
        meet()
        return seen


@in_worlds([tcp(3)], slow=[shm(3)])
def test_a_rank_that_comes_when_the_others_have_left(world):
    results = spawn_in(world, come_late)
    for rank, seen in enumerate(results):
        assert seen.rank == 2, (rank, seen)
        assert "rank 2 has not called it" in seen.message and "barrier #1 of group 'world'" in seen.message, seen
    assert results[2].at - results[2].began < TIMEOUT_S, "it learns what the others found, and waits for nobody"
    check_patience(results[:2], TIMEOUT_S)


def destroy_pending(rank, world_size):
    """Rank 0 is not there any more when rank 1 calls; rank 2 may come before or after."""
    bagua.init_process_group(timeout=LONG_S)
    meet()
    if rank == 0:
        work = bagua.all_reduce(torch.ones(1000), async_op=True)
        time.sleep(0.2)  # so that it may have begun
        bagua.destroy_process_group()
        meet()
        with pytest.raises(bagua.Aborted, match="rank 0 destroyed the group 'world' with 1 operation pending"):
            work.wait()
        return None
    if rank == 2:
        seen = watch(lambda: bagua.all_reduce(torch.ones(1000)))
        meet()
        return seen
    meet()
    return watch(bagua.barrier)


@in_worlds([tcp(3)])
def test_a_rank_that_destroys_before_anybody_came(world):
    for seen in spawn_in(world, destroy_pending)[1:]:
        assert seen.rank == 0 and "rank 0 destroyed the group 'world' with 1 operation pending" in seen.message, seen
        assert seen.at - seen.began < NOTICED_S, seen


def subgroup_fails(rank, world_size):
    """Rank 0 gives a subgroup up and goes on; rank 2 comes to it later, and learns why there is nobody."""
    with process_group() as world:
        if rank == 0:
            part = world.subgroup("part", [0, 2], 0.3)
            with pytest.raises(bagua.DeadlineExceeded, match="rank 1 has not made the group") as caught:
                part.barrier().wait()
            assert caught.value.rank == 2
            part.close()
        meet()
        if rank == 2:
            part = world.subgroup("part", [0, 2], LONG_S)
            begin = time.monotonic()
            with pytest.raises(bagua.RemoteError, match="rank 0 reported: barrier #1 .* rank 1 has not made the group"):
                part.barrier().wait()
            assert time.monotonic() - begin < NOTICED_S
        meet()
        if rank != 1:
            again = world.subgroup("part, again", [0, 2], LONG_S)
            x = torch.ones(3)
            again.all_reduce(x).wait()
            assert x.tolist() == [2, 2, 2]
        meet()


@in_worlds([tcp(3)], slow=[shm(3)])
def test_a_subgroup_that_failed_before_a_member_came(world):
    spawn_in(world, subgroup_fails)


def wait_for_who_has_no_group(rank, world_size):
    """0 waits for 1, which waits for 2, which is there and has not made the group."""
    with process_group() as world:
        if rank == 2:
            meet()
            return None
        part = world.subgroup("part", [0, 1, 2], LONG_S if rank else 2 * TIMEOUT_S)
        begin = time.monotonic()
        with pytest.raises(bagua.BaguaError) as caught:
            part.recv(torch.ones(3), rank + 1).wait()
        spent = time.monotonic() - begin
        part.close()
        meet()
        return caught.value.rank, str(caught.value), spent


@in_worlds([tcp(3)], slow=[shm(3)])
def test_a_chain_that_ends_with_who_has_not_made_the_group(world):
    for named, message, spent in spawn_in(world, wait_for_who_has_no_group)[:2]:
        assert named == 2 and "rank 1 waits for rank 2; rank 2 has not made the group" in message, message
        assert f"within {2 * TIMEOUT_S:g} s" in message and "answer" not in message, message
        assert spent < 4 * TIMEOUT_S, spent


def wait_for_who_is_elsewhere(rank, world_size):
    """Rank 1 is in a collective of the world: it has not made the one group yet, and has destroyed the other."""
    with process_group() as world:

        def told(name):
            meet()
            with pytest.raises(bagua.DeadlineExceeded) as caught:
                world.subgroup(name, [0, 1], TIMEOUT_S).barrier().wait()
            world.barrier().wait()
            return caught.value.rank, str(caught.value)

        if rank == 0:
            return told("unmade"), told("destroyed")
        meet()
        world.barrier().wait()
        world.subgroup("destroyed", [0, 1], TIMEOUT_S).close()
        meet()
        world.barrier().wait()
        return None


@in_worlds([tcp(2)], slow=[shm(2)])
def test_a_rank_elsewhere_that_has_no_such_group(world):
    (unmade, why_unmade), (destroyed, why_destroyed) = spawn_in(world, wait_for_who_is_elsewhere)[0]
    assert unmade == destroyed == 1
    ends = "rank 1 has not made the group 'world/unmade', and is in barrier #1 of group 'world' now; all ranks call"
    assert ends in why_unmade, why_unmade
    ends = "rank 1 has destroyed the group 'world/destroyed', and is in barrier #2 of group 'world' now; destroy a"
    assert ends in why_destroyed, why_destroyed


def receive_in_vain(rank, world_size):
    with process_group() as group:
        meet()
        group.set_timeout(TIMEOUT_S)
        seen = None if rank else watch(lambda: bagua.recv(torch.ones(3), 1))
        meet()
        return seen


@in_worlds([tcp(2)], slow=[shm(2)])
def test_a_late_message_names_the_time_that_was_allowed(world):
    seen = spawn_in(world, receive_in_vain)[0]
    assert seen.rank == 1 and f"did not end within {TIMEOUT_S:g} s: rank 1 has not called it" in seen.message, seen


# ---- a low rank waits for a higher one, which would have to connect


def wait_for_the_highest(rank, world_size, how, timeout_s, before_s, path):
    """Rank 2 dies before it has connected to anybody; rank 1 waits for nobody."""
    with process_group() as group:
        meet()
        group.set_timeout(timeout_s)
        if rank == 2:
            time.sleep(before_s)
            note_time(path)
            kill()
        if rank == 1:
            return None
        x = torch.ones(3)
        call = {"recv": bagua.recv, "send": bagua.send, "broadcast": bagua.broadcast}[how]
        return watch(lambda: call(x, 2))


def check_the_death(world, how, timeout_s, before_s, tmp_path):
    path = str(tmp_path / "died")
    arguments = (how, timeout_s, before_s, path)
    seen = spawn_in(world, wait_for_the_highest, *arguments, expect_exit={2: signal.SIGKILL})[0]
    assert seen.rank == 2 and seen.kind == "TransportError", seen
    # Before they were linked, or after.
    assert "no longer listens" in seen.message or "rank 2 closed its connection without leaving" in seen.message, seen
    assert seen.at - noted_time(path) < timeout_s / 2, seen


@fast_in(
    "world, how",
    [(shm(3), "recv")],
    list(itertools.product([tcp(3), shm(3)], ["recv", "send", "broadcast"])),
)
def test_a_rank_that_dies_before_it_connects(world, how, tmp_path):
    check_the_death(world, how, LONG_S, 0, tmp_path)


@pytest.mark.slow("test_a_rank_that_dies_before_it_connects")
@pytest.mark.parametrize("how", ["broadcast", "recv"])
def test_a_rank_that_dies_after_it_was_asked(how, tmp_path):
    """It was asked every half second; if the intervals went on to double, the next time would be after 7.5 s."""
    check_the_death(tcp(3), how, 8.0, 3.6, tmp_path)


def fail_with_another(rank, world_size, waits_in, fails_in, path):
    """Rank 2 gives up waiting for rank 1, and lives on; rank 0, which is not connected to it, waits for rank 2.

    Nobody leaves before rank 0 has seen it: not the end of a process is to tell.
    """
    calls = {"recv": bagua.recv, "broadcast": bagua.broadcast}
    bagua.init_process_group(timeout=LONG_S)
    meet()
    if rank == 0:
        seen = watch(lambda: calls[waits_in](torch.ones(3), 2))
        meet()
        return seen.rank, seen.message, seen.at - noted_time(path)
    told = None
    if rank == 2:
        bagua.get_default_group().set_timeout(0.2)  # it has failed when rank 0 asks for the first time
        with pytest.raises(bagua.DeadlineExceeded, match="rank 1") as caught:
            calls[fails_in](torch.ones(3), 1)
        assert caught.value.rank == 1
        told = str(caught.value)
        note_time(path)
    meet()
    return told


@fast_in(
    "world, waits_in, fails_in",
    [(shm(3), "broadcast", "recv"), (tcp(3), "recv", "broadcast")],
    [
        (world, *calls)
        for world in (tcp(3), shm(3))
        for calls in (("recv", "recv"), ("broadcast", "recv"), ("recv", "broadcast"))
    ],
)
def test_who_is_waited_for_in_vain_tells_whose_fault_it_is(world, waits_in, fails_in, tmp_path):
    (culprit, message, seconds), _, told = spawn_in(
        world, fail_with_another, waits_in, fails_in, str(tmp_path / "failed")
    )
    assert culprit == 1 and message == f"rank 2 reported: {told}", message
    assert seconds < NOTICED_S


# ---- reports


def record_of(listener):
    address, port = listener.getsockname()
    fields = dict.fromkeys(RankRecord.__dataclass_fields__, "")
    return RankRecord(**{**fields, "rank": 0, "address": address, "port": port})


def credentials(rank, key=b"key"):
    return Credentials(key, rank, 2)


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0), backlog=8) as listener:
        yield listener


def test_a_rank_that_does_not_answer_keeps_no_report_from_the_others(listener):
    """One that is stopped, one that has ended and one that knows another secret stand before one that listens."""
    told = []
    arrived = threading.Event()

    def take(sock, about, descriptors):
        sock.close()
        told.append(about)
        arrived.set()

    with (
        socket.create_server(("127.0.0.1", 0)) as stopped,
        socket.create_server(("127.0.0.1", 0)) as ended,
        socket.create_server(("127.0.0.1", 0)) as foreign,
    ):
        records = [record_of(sock) for sock in (stopped, ended, foreign, listener)]
        ended.close()
        acceptors = [
            Listener([foreign], credentials(0, b"another"), take, pytest.fail, pytest.fail),
            Listener([listener], credentials(0), take, pytest.fail, pytest.fail),
        ]
        longest = {
            "purpose": "report",
            "groups": ["world", "world/p2p"],
            "from": 1,
            "cause": {"text": 1000 * "\N{GRINNING FACE}"},
        }
        begin = time.monotonic()
        assert notify(records, credentials(1), longest, TIMEOUT_S) == 3
        assert time.monotonic() - begin < 2 * TIMEOUT_S
        assert arrived.wait(LONG_S) and told == [longest | {"to": 0}]
        for acceptor in acceptors:
            acceptor.close()
