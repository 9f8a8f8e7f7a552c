"""Ranks that disagree, come twice or do not come: every rank is told what it is, and in time."""

import logging
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
import torch.distributed as dist

import bagua
from bagua import _C, config
from bagua.distributed import bootstrap
from bagua.net import rendezvous
from bagua.net.interfaces import interface_addresses
from bagua.testing import free_port, spawn
from tests.distributed.worlds import fast_in, in_turns

pytestmark = pytest.mark.timed

TIMEOUT_S = 0.5
LONG_S = 60.0
# A rank that comes after another has given up believes it after this time, in place of ten seconds.
EARLIER_S = 0.5
QUICKLY_S = LONG_S / 3  # it is the disagreement that was noticed, no deadline that has passed
TOKENS = ["5kZ0pW-qk2VQyXn3sE7cUw", "9aLr_T4hBf6mJd1vGi8oNx"]


def attempt(rank, world_size, changes, timeout):
    """init_process_group after this rank's changes: None, or the class, message and seconds of its failure."""
    mine = changes.get(rank, {})
    if mine.get("absent"):
        return None
    os.environ.update(mine.get("env", {}))
    if "version" in mine:
        _C.__version__ = mine["version"]
    if "protocol" in mine:
        rendezvous.PROTOCOL = mine["protocol"]
    rendezvous._EARLIER_FAULT_SECONDS = EARLIER_S
    begin = time.monotonic()
    try:
        bagua.init_process_group(timeout=timeout, **mine.get("arguments", {}))
    except bagua.BaguaError as error:
        assert not bagua.is_initialized()
        assert error.rank == mine.get("names", error.rank)
        return type(error).__name__, str(error), time.monotonic() - begin
    bagua.destroy_process_group()
    return None


def failures_of(world_size, changes, timeout=LONG_S, env=None):
    """By rank. All must fail within `timeout` and what a store gets on top; what takes twice as long has failed."""
    results = spawn(attempt, world_size, args=(changes, timeout), env=env)
    for rank, result in enumerate(results):
        if changes.get(rank, {}).get("absent"):
            continue
        assert result is not None, f"rank {rank} did not notice"
        assert result[2] < 2 * (timeout + rendezvous._STORE_GRACE_SECONDS), f"rank {rank} took {result[2]:.1f} s"
    return results


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"env": {"WORLD_SIZE": "4"}}, "about world_size: rank 0 has 3, rank 2 has 4; start all ranks with the same"),
        ({"version": "9.9"}, f"about bagua version: rank 0 has '{_C.__version__}', rank 2 has '9.9'; install the same"),
        (
            {"protocol": rendezvous.PROTOCOL - 1},
            f"about wire protocol: rank 0 has {rendezvous.PROTOCOL}, rank 2 has {rendezvous.PROTOCOL - 1}; install the",
        ),
        ({"arguments": {"backend": "native"}}, "about backend: rank 0 has 'auto', rank 2 has 'native'; pass the same"),
        (
            {"env": {"BAGUA_THRESHOLDS": "direct_bytes=7"}},
            "about thresholds: rank 0 has 'the defaults', rank 2 has 'direct_bytes=7'; set the same BAGUA_THRESHOLDS",
        ),
        (
            {"env": {"BAGUA_HEARTBEAT_TIMEOUT": "3"}},
            "about heartbeat timeout, in ms: rank 0 has 10000, rank 2 has 3000; set the same BAGUA_HEARTBEAT_TIMEOUT",
        ),
        (
            {"arguments": {"auth_token": TOKENS[0]}},
            "about auth_token: rank 0 has 'no token', rank 2 has 'a token'; pass the same",
        ),
    ],
    ids=["world_size", "version", "protocol", "backend", "thresholds", "heartbeats", "token"],
)
def test_ranks_that_disagree(change, message):
    for kind, text, seconds in failures_of(3, {2: change}):
        assert f"the ranks disagree {message}" in text
        assert kind in ("InvalidArgument", "RemoteError")
        assert seconds < QUICKLY_S


@pytest.mark.slow("test_ranks_that_disagree")
def test_ranks_that_disagree_in_the_store_of_rank_0():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    for _, text, seconds in failures_of(3, {2: {"version": "9.9"}}, env=env):
        assert "the ranks disagree about bagua version" in text and seconds < QUICKLY_S


def test_tokens_that_differ():
    tokens = [TOKENS[0], TOKENS[0], TOKENS[1]]
    changes = {rank: {"arguments": {"auth_token": token}} for rank, token in enumerate(tokens)}
    for _, text, seconds in failures_of(3, changes):
        assert "the ranks disagree about auth_token: rank 2's token is not rank 0's; pass the same" in text
        assert not any(token in text for token in TOKENS), "a token is never printed"
        assert seconds < QUICKLY_S


def test_the_same_token_from_argument_environment_and_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKENS[0] + "\n")
    file.chmod(0o600)
    changes = {
        0: {"arguments": {"auth_token": TOKENS[0]}},
        1: {"env": {"BAGUA_AUTH_TOKEN": TOKENS[0]}},
        2: {"env": {"BAGUA_AUTH_TOKEN_FILE": str(file)}},
    }
    assert spawn(attempt, 3, args=(changes, 30.0)) == [None] * 3


def test_several_hosts_without_a_token_are_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(bootstrap, "_has_warned", False)
    on_host = {name: rendezvous.RankRecord(0, 2, *[""] * 4, "", 0, name, 1, "", 1) for name in ("127.0.0.1", "::1")}
    bootstrap._warn_without_token(list(on_host.values()))
    assert not caplog.records
    beyond = [on_host["::1"], replace(on_host["::1"], address="fe80::1%eth0")]
    for _ in range(3):
        bootstrap._warn_without_token(beyond)
    (warning,) = caplog.messages
    assert "whoever reaches the store" in warning and "make a token with `bagua token" in warning


def warnings_of_a_job(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    for _ in range(2):
        bagua.init_process_group(timeout=LONG_S)
        bagua.destroy_process_group()
    return [line for line in lines if "this job has no token" in line]


# The first that other hosts could reach; a container may have none.
BEYOND = [it.address for it in interface_addresses() if not it.address.startswith(("127.", "::1", "fe80"))][:1]


@pytest.mark.skipif(not BEYOND, reason="this host has no interface but the loopback one")
def test_who_is_warned():
    beyond = {"BAGUA_SOCKET_IFNAME": BEYOND[0]} if BEYOND else {}
    assert [*map(len, spawn(warnings_of_a_job, 2, env=beyond))] == [1, 0]
    assert spawn(warnings_of_a_job, 2, env=beyond | {"BAGUA_AUTH_TOKEN": TOKENS[0]}) == [[], []]


@pytest.mark.parametrize("holder", ["rank 0", "the agent"])
def test_two_processes_with_the_same_rank(holder):
    own_store = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    results = failures_of(3, {2: {"env": {"RANK": "1"}}}, env=own_store if holder == "rank 0" else None)
    for kind, text, seconds in results:
        assert "two processes claim to be rank 1; give each process its own RANK" in text
        assert kind in ("InvalidArgument", "RemoteError")
        assert seconds < QUICKLY_S


def record(rank, world_size):
    fields = ("1.0", rendezvous.PROTOCOL, "native", "the defaults", f"host {rank}", rank)
    return rendezvous.RankRecord(rank, world_size, *fields, f"10.0.0.{rank + 1}", 4000 + rank, "", 7)


# By round: the ranks that had claimed it when all processes of it ended, and whether one of them had given up.
EARLIER_ROUNDS = {
    "none": [],
    "all": [((0, 1, 2), False)],
    "all, several times": [((0, 1, 2), False), ((0, 1, 2), True), ((0, 1, 2), False)],
    "rank 2 died early": [((0, 1), False)],
    "rank 2 died early, and rank 0 gave up": [((0, 1), True), ((0,), True)],
}


@in_turns("earlier, last", EARLIER_ROUNDS, [0, 2])
def test_ranks_meet_in_a_round_of_their_own(earlier, last):
    """The store of torchrun's agents holds what the processes before a restart have left there."""
    store = dist.HashStore()
    for number, (ranks, has_failed) in enumerate(EARLIER_ROUNDS[earlier]):
        of_round = dist.PrefixStore(f"round{number}", store) if number else store
        for rank in ranks:
            of_round.add(f"claim/{rank}", 1)
            of_round.set(f"rank/{rank}", replace(record(rank, 3), auth="no token", nonce="0" * 32).to_json())
        if has_failed:
            of_round.set("fault", "2 rank 2 did not come to the rendezvous")

    def meet(rank):
        time.sleep(0.3 * (rank == last))
        with rendezvous.meeting(store, rank, 3, timedelta(seconds=5), outlives_ranks=True) as met:
            return met.exchange(record(rank, 3), None)[1].key

    begin = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        assert len({*pool.map(meet, range(3))}) == 1
    assert time.monotonic() - begin < 3


def test_an_earlier_failure_is_believed_after_a_while(monkeypatch):
    """It may be of an earlier start, which another rank would close meanwhile; here none does."""
    monkeypatch.setattr(rendezvous, "_EARLIER_FAULT_SECONDS", EARLIER_S)
    store = dist.HashStore()
    store.set("fault", "1 rank 1: a mistake")
    begin = time.monotonic()
    with pytest.raises(bagua.errors.RemoteError, match=r"gave up during the rendezvous: rank 1: a mistake") as raised:
        with rendezvous.meeting(store, 0, 2, timedelta(seconds=LONG_S), outlives_ranks=True) as met:
            met.exchange(record(0, 2), None)
    assert raised.value.rank == 1 and EARLIER_S <= time.monotonic() - begin < QUICKLY_S


def comes_to_a_later_round(rank, world_size):
    """Rank 1's agent restarts it for rank 0's failure, and has not counted that; the store has both ranks' claims."""
    launch = config.launch_environment()
    earlier = dist.PrefixStore("bagua/init1", rendezvous.open_store(launch, timedelta(seconds=30)))
    earlier.add(f"claim/{rank}", 1)
    if rank == 0:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return attempt(rank, world_size, {}, LONG_S)


def test_agents_that_count_their_restarts_differently():
    assert spawn(comes_to_a_later_round, 2) == [None, None]


MISTAKES = {
    "interface": ({"BAGUA_SOCKET_IFNAME": "nope0"}, "rank 1: interface 'nope0' has no address on this host"),
    "number": ({"BAGUA_TCP_STREAMS": "many"}, "rank 1: BAGUA_TCP_STREAMS='many' is not an integer"),
    "name": ({"BAGUA_TCP_STREAM": "2"}, "rank 1: BAGUA_TCP_STREAM is not a setting of bagua"),
    "thresholds": ({"BAGUA_THRESHOLDS": "nope=1"}, "rank 1: BAGUA_THRESHOLDS names 'nope'"),
    "congestion": ({"BAGUA_TCP_CONGESTION": "nope"}, "rank 1: .*nope"),
}


@pytest.mark.parametrize(
    ("holder", "mistakes"), [("rank 0", ["number"]), ("the agent", MISTAKES)], ids=["rank 0", "the agent"]
)
def test_a_mistake_in_a_rank_s_own_settings_is_told_to_all(holder, mistakes):
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())} if holder == "rank 0" else {}
    for changes, message in map(MISTAKES.get, mistakes):
        results = failures_of(3, {rank: {"names": 1} for rank in (0, 2)} | {1: {"env": changes}}, env=env)
        assert [kind for kind, _, _ in results] == ["RemoteError", "InvalidArgument", "RemoteError"]
        for rank in (0, 2):
            assert re.search(f"another rank gave up during the rendezvous: {message}", results[rank][1])
        assert max(seconds for _, _, seconds in results) < QUICKLY_S


class WatchdogError(RuntimeError):
    pass


def is_interrupted(rank, world_size, kind):
    """Rank 1's signal handler raises while it waits for rank 2, which does not come."""

    def handler(number, frame):
        raise kind("watchdog")

    if rank == 2:
        return None
    if rank == 1:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        bagua.init_process_group(timeout=LONG_S)
    except BaseException as error:
        return type(error), str(error), getattr(error, "rank", None)


@fast_in("kind", [TimeoutError, KeyboardInterrupt], [WatchdogError])
def test_a_rank_that_is_interrupted_tells_the_others(kind):
    begin = time.monotonic()
    other, interrupted, _ = spawn(is_interrupted, 3, args=[kind])
    assert interrupted == (kind, "watchdog", None)
    text = f"another rank gave up during the rendezvous: rank 1 was interrupted by {kind.__name__}: watchdog"
    assert other == (bagua.errors.RemoteError, text, 1)
    assert time.monotonic() - begin < QUICKLY_S


def leaves_at_once(rank, world_size):
    for _ in range(5):
        bagua.init_process_group(timeout=LONG_S)
        bagua.destroy_process_group()


def test_rank_0_keeps_the_store_until_all_have_met():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    spawn(leaves_at_once, 3, env=env)


UNREACHABLE = {
    "refused": ("127.0.0.1", "no program listens there: rank 0 has not started, or has ended"),
    "unknown": ("no-such-host.invalid", "the name does not resolve"),
    "no route": ("fe80::1%lo", "this host has no route to it"),
}


@pytest.mark.parametrize("case", UNREACHABLE)
def test_an_address_of_rank_0_that_cannot_be_reached(case):
    address, why = UNREACHABLE[case]
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    launch = config.launch_environment(environ=environ)
    with pytest.raises(bagua.errors.TransportError, match=rf"cannot reach rank 0's store .* within 0.5 s: {why}"):
        rendezvous.open_store(launch, timedelta(seconds=TIMEOUT_S))


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_that_does_not_come(missing):
    changes = {rank: {"names": missing, "absent": rank == missing} for rank in range(3)}
    results = failures_of(3, changes, timeout=TIMEOUT_S)
    for rank, result in enumerate(results):
        if rank != missing:
            assert result[0] in ("DeadlineExceeded", "RemoteError")
            assert f"rank {missing} did not come to the rendezvous within {TIMEOUT_S:g} s" in result[1]
    assert max(result[2] for result in results if result) >= TIMEOUT_S, "somebody has waited so long"


def test_a_bad_setting_is_refused_before_anything_is_opened():
    for kind, text, seconds in failures_of(2, {}, env={"BAGUA_SOCKET_IFNAM": "lo"}):
        assert kind == "InvalidArgument" and "BAGUA_SOCKET_IFNAM is not a setting of bagua" in text
        assert seconds < QUICKLY_S
    for kind, text, _ in failures_of(2, {}, env={"BAGUA_SOCKET_IFNAME": "nope0"}):
        assert kind == "InvalidArgument" and "interface 'nope0' has no address on this host; there are lo (127" in text
    for kind, text, _ in failures_of(1, {}, env={"BAGUA_THRESHOLDS": "ring_bytes=1"}):
        assert kind == "InvalidArgument" and "names 'ring_bytes'; the thresholds are broadcast_tree_bytes, " in text
    for kind, text, _ in failures_of(1, {0: {"arguments": {"auth_token": "a secret"}}}):
        assert kind == "InvalidArgument" and "too easy to guess" in text and "make one with `bagua token`" in text
    for kind, text, _ in failures_of(1, {0: {"arguments": {"backend": "mpi"}}}):
        assert kind == "InvalidArgument" and "backend 'mpi' is unknown; the backends are auto, native" in text


def test_a_port_in_use_by_another_program():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
        first, second = failures_of(2, {}, timeout=TIMEOUT_S, env=env)
    assert first[0] == "TransportError"
    assert f"MASTER_PORT {port} on 127.0.0.1 is in use by another program; choose a free port" in first[1]
    assert second[0] == "TransportError" and f"cannot reach rank 0's store at 127.0.0.1:{port}" in second[1]


def test_nobody_at_the_masters_address():
    port = free_port()
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(port)}
    _, second = failures_of(2, {0: {"absent": True}}, timeout=TIMEOUT_S, env=env)
    assert second[0] == "TransportError"
    address = f"127.0.0.1:{port} (MASTER_ADDR:MASTER_PORT)"
    assert f"cannot reach rank 0's store at {address} within {TIMEOUT_S:g} s" in second[1]
    assert "check that rank 0 is running and that the address is reachable" in second[1]


def gives_up(rank, world_size):
    """Rank 0 holds the store and ends in the middle of the rendezvous."""
    if rank == 0:
        store = rendezvous.open_store(config.launch_environment(), timedelta(seconds=30))
        dist.PrefixStore("bagua/init1", store).wait(["claim/1"])
        os._exit(0)
    return attempt(rank, world_size, {}, 30.0)


def test_a_store_that_goes_away():
    env = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}
    _, result = spawn(gives_up, 2, env=env, expect_exit={0: 0})
    assert result[0] == "TransportError" and "the store has ended: rank 0 (or the launcher) exited" in result[1]
    assert result[2] < 30.0 / 3
