"""init and destroy: again and again, beside torch.distributed in either order, over IPv6, with stores of the user."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import bagua
from bagua import config, testing
from bagua.net import rendezvous
from bagua.testing import free_port, spawn
from tests.distributed.worlds import SAME_TEST, fast_in
from tests.meeting import wait_until


def test_an_interrupt_waits_for_the_store_to_answer():
    """A thread that is in it when the process ends makes torch abort."""
    answered = []

    def call():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        answered.append(True)

    with pytest.raises(KeyboardInterrupt):
        rendezvous._call_within(call, 30.0)
    assert answered


RANK_0_HOLDS = {"TORCHELASTIC_USE_AGENT_STORE": "False"}


def total(rank):
    x = torch.tensor([10.0**rank])
    bagua.all_reduce(x)
    return x.item()


def init_again_and_again(rank, world_size):
    counts = []
    for _ in range(12):
        bagua.init_process_group(timeout=30.0)
        assert total(rank) == 11
        bagua.destroy_process_group()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    return counts


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="shm"),
        pytest.param({"BAGUA_SHARED_MEMORY": "0"}, id="tcp", marks=SAME_TEST),
        pytest.param({"BAGUA_BACKEND": "torch"}, id="torch"),
    ],
)
def test_init_again_and_again_in_one_process(env):
    for counts in spawn(init_again_and_again, 2, env=env):
        # A store's connection may be closed a moment later.
        assert max(counts[4:]) <= (counts[3][0] + 1, counts[3][1]), f"descriptors, threads: {counts}"


def beside_torch(rank, world_size, order):
    """`order` names what to start; everything works together, and what is left works after the other has ended."""
    x = torch.ones(3)
    starts = {"bagua": lambda: bagua.init_process_group(timeout=30.0), "torch": lambda: dist.init_process_group("gloo")}
    for name in order:
        starts[name]()
    assert total(rank) == 11
    dist.all_reduce(x)
    assert (x == world_size).all()
    if order[0] == "torch":
        dist.destroy_process_group()
        assert total(rank) == 11
        bagua.destroy_process_group()
    else:
        bagua.destroy_process_group()
        dist.all_reduce(x)
        assert (x == world_size**2).all()
        dist.destroy_process_group()
    bagua.init_process_group(timeout=30.0)
    assert total(rank) == 11
    bagua.destroy_process_group()


@fast_in(
    "first, second, holder",
    [("torch", "bagua", "agent"), ("bagua", "torch", "rank 0")],
    [("torch", "bagua", "rank 0"), ("bagua", "torch", "agent")],
)
def test_beside_torch_distributed_on_the_same_port(first, second, holder):
    env = RANK_0_HOLDS | {"MASTER_PORT": str(free_port())} if holder == "rank 0" else {}
    spawn(beside_torch, 2, args=((first, second),), env=env)


_ASKED_S = 0.5


def leave_a_group(rank):
    """Rank 1 at once, rank 0, which holds the store, when rank 1 is in the next rendezvous."""
    bagua.init_process_group(timeout=30.0)
    assert total(rank) == 11
    if rank == 0:
        time.sleep(0.2)
    bagua.destroy_process_group()


def meets_again(rank, world_size):
    leave_a_group(rank)
    if rank == 0:
        time.sleep(0.2)
    bagua.init_process_group(timeout=30.0)
    assert total(rank) == 11


@pytest.mark.timed
def test_a_rank_that_is_back_before_rank_0_has_left():
    spawn(meets_again, 2, env=RANK_0_HOLDS | {"MASTER_PORT": str(free_port())})


def comes_back_alone(rank, world_size):
    """Without rank 0: how that ends for rank 1, and after how many seconds."""
    leave_a_group(rank)
    if rank == 0:
        return None
    begin = time.monotonic()
    with pytest.raises(bagua.errors.TransportError) as caught:
        bagua.init_process_group(timeout=_ASKED_S)
    return str(caught.value), time.monotonic() - begin


@pytest.mark.timed
def test_a_rank_that_is_back_and_rank_0_does_not_come():
    port = free_port()
    _, (message, seconds) = spawn(comes_back_alone, 2, env=RANK_0_HOLDS | {"MASTER_PORT": str(port)})
    assert f"cannot reach rank 0's store at 127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)" in message
    assert _ASKED_S / 2 < seconds < 4 * _ASKED_S


def with_a_store(rank, world_size, path):
    store = dist.FileStore(path, world_size)  # one for both: the last rank to drop its own removes the file
    for _ in range(2):
        bagua.init_process_group(store=store, rank=rank, world_size=world_size, timeout=30.0)
        assert total(rank) == 11
        bagua.destroy_process_group()


def test_a_store_of_the_user_needs_no_environment(tmp_path):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

    def run(rank, world_size):
        for name in names:
            os.environ.pop(name, None)
        with_a_store(rank, world_size, str(tmp_path / "store"))

    spawn(run, 2)


def listeners_of_this_process():
    """(address, port) in hex, of the TCP sockets that this process listens on."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add((name, fields[1].split(":")[0]))
    return found


def where_it_listens(rank, world_size):
    bagua.init_process_group(timeout=30.0)
    assert total(rank) == 11
    found = listeners_of_this_process()
    bagua.destroy_process_group()
    assert not listeners_of_this_process()
    return found


def test_on_one_host_only_the_loopback_interface_listens():
    assert spawn(where_it_listens, 2) == [{("tcp", "0100007F")}] * 2


def has_ipv6():
    return os.path.exists("/proc/net/if_inet6") and " lo\n" in open("/proc/net/if_inet6").read()


@pytest.mark.skipif(not has_ipv6(), reason="this host's loopback interface has no IPv6 address")
def test_ipv6():
    env = {"BAGUA_SOCKET_IFNAME": "::1", "BAGUA_SHARED_MEMORY": "0"}
    assert spawn(where_it_listens, 2, env=env) == [{("tcp6", "00000000000000000000000001000000")}] * 2


def ends_without_destroy(rank, world_size):
    bagua.init_process_group(timeout=30.0)
    x = torch.ones(2)
    bagua.all_reduce(x)
    group = bagua.get_default_group()  # a reference that lives as long as the interpreter
    globals()["kept"] = (group, bagua.all_reduce(x, async_op=True), bagua.empty(1000))
    kept[1].wait()  # noqa: F821


@fast_in("backend", ["native"], ["torch"])
def test_a_program_may_end_without_destroy(backend):
    spawn(ends_without_destroy, 2, env={"BAGUA_BACKEND": backend})


def meets_a_rank_that_is_stopped(rank, world_size, folder):
    """How the rendezvous ends for the others, and after how many seconds; rank 0 serves the store and is stopped."""
    stopped = f"{folder}/pid"
    if rank == 0:
        store = rendezvous.open_store(config.launch_environment(), timedelta(seconds=60))
        assert not store.check(["a key"])
        with open(f"{stopped}.part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{stopped}.part", stopped)
        testing.stop()
        return None
    while not os.path.exists(stopped):
        time.sleep(0.01)
    pid = int(Path(stopped).read_text())
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    begin = time.monotonic()
    try:
        bagua.init_process_group(timeout=_ASKED_S)
    except bagua.BaguaError as error:
        heard = type(error).__name__, error.rank, str(error), time.monotonic() - begin
    through = Path(folder, "through")
    if rank == 1:
        through.touch()
        return heard
    wait_until(through.exists, "rank 1 is through, too")
    testing.kill(pid)
    return heard


@pytest.mark.timed
def test_rank_0_is_stopped_before_the_rendezvous(tmp_path):
    env = RANK_0_HOLDS | {"MASTER_PORT": str(free_port())}
    results = spawn(meets_a_rank_that_is_stopped, 3, args=(str(tmp_path),), env=env, expect_exit={0: signal.SIGKILL})
    for kind, rank, message, seconds in results[1:]:
        assert (kind, rank) == ("TransportError", None)
        assert "cannot reach rank 0's store" in message and "rank 0 or the launcher's agent hangs" in message
        assert seconds < 4 * _ASKED_S  # twice what is promised


def stops_its_agent(rank, world_size):
    """The store is served by another process, as the launcher's agent does, which stops while a rank is awaited."""
    store = rendezvous.open_store(config.launch_environment(), timedelta(seconds=60))
    if rank == 0:
        store.set("agent", str(os.getpid()))
        threading.Event().wait()
    timer = threading.Timer(0.2, testing.stop, [int(store.get("agent"))])
    timer.start()
    begin = time.monotonic()
    mine = rendezvous.RankRecord(rank, world_size, "1", 1, "native", "", "host", 0, "::1", 1, "", os.getpid())
    with pytest.raises(bagua.TransportError) as caught:
        rendezvous.exchange_records(store, mine, None, timedelta(seconds=_ASKED_S))
    seconds = time.monotonic() - begin
    timer.join()
    return caught.value.rank, str(caught.value), seconds


@pytest.mark.timed
def test_the_agent_is_stopped_in_the_rendezvous():
    env = RANK_0_HOLDS | {"MASTER_PORT": str(free_port())}
    _, (rank, message, seconds) = spawn(stops_its_agent, 2, env=env, expect_exit={0: signal.SIGSTOP})
    assert rank is None and "nothing is known of the other ranks" in message, message
    assert "the store of the rendezvous has not answered for" in message
    assert seconds < 4 * _ASKED_S
