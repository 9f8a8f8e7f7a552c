"""Links and channels that cannot be made: who needs them hears it at once and by name, and nothing is left behind.

Ranks are two endpoints of this process.
"""

import concurrent.futures
import contextlib
import dataclasses
import errno
import itertools
import os
import socket
import sys
import threading
import time
from datetime import timedelta

import pytest

from bagua import _C, config
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import BaguaError, RemoteError, TransportError
from bagua.net import connector, dialer, links, listener, rendezvous, reports
from bagua.net.auth import Credentials
from bagua.net.interfaces import InterfaceAddress
from tests.meeting import wait_until

pytestmark = pytest.mark.timed

LONG = timedelta(seconds=30)
AT_ONCE_S = 5.0  # of a loaded machine; no deadline has passed
SHM, TCP = {}, {"BAGUA_SHARED_MEMORY": "0"}


class Rank:
    """An endpoint of a job of two ranks, and the group of both on it."""

    def __init__(self, env):
        self.endpoint = links.Endpoint(config.settings(env), InterfaceAddress("lo", "127.0.0.1"))
        self.group = None
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.endpoint.close)

    def record(self, rank):
        names = "127.0.0.1", self.endpoint.port, self.endpoint.unix_name
        return rendezvous.RankRecord(rank, 2, "1", 1, "native", "", "host", 0, *names, os.getpid())

    def make_group(self):
        rank = self.endpoint.credentials.rank
        self.group = ProcessGroup(self.endpoint, "world", range(2), rank, LONG)
        self._closing.callback(self.group.close)

    def barrier(self):
        """Returns what it raises, and after how many seconds; None where it succeeds. A rank that fails leaves."""
        begin = time.monotonic()
        try:
            self.group.barrier().wait()
        except BaguaError as error:
            seconds = time.monotonic() - begin
            self.close()
            return error, seconds

    def close(self):
        self._closing.pop_all().close()


@contextlib.contextmanager
def two_ranks(env, with_groups=True):
    ranks = [Rank(env) for _ in range(2)]
    try:
        records = [rank.record(number) for number, rank in enumerate(ranks)]
        for number, rank in enumerate(ranks):
            rank.endpoint.start(records, Credentials(b"a key of this test", number, 2), LONG.total_seconds())
            if with_groups:
                rank.make_group()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def barrier(ranks):
    """Returns what it raises on each of them."""
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        return list(threads.map(Rank.barrier, ranks))


def none_left(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.fixture
def no_reports(monkeypatch):
    """Nobody waits until others have taken one."""
    monkeypatch.setattr(reports, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(reports, "_BEGINNING_SECONDS", 0)


@pytest.mark.parametrize("end", ["dialer", "acceptor"])
def test_where_descriptors_end_that_is_said_at_once(end, monkeypatch, no_reports):
    with two_ranks(SHM) as ranks:
        opens = {"dialer": (connector, "_new_socket"), "acceptor": (socket.socket, "accept")}
        monkeypatch.setattr(*opens[end], none_left)
        for rank, (error, seconds) in enumerate(barrier(ranks)):
            assert error.rank == rank and "raise `ulimit -n`" in str(error) and seconds < AT_ONCE_S, (error, seconds)


def test_where_threads_end_that_is_said_at_once(monkeypatch, no_reports):
    start = threading.Thread.start

    def refuse(thread):
        if not thread.name.startswith("bagua-dial-"):
            return start(thread)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with two_ranks(SHM) as ranks:
        failures = barrier(ranks)
    for rank, (error, seconds) in enumerate(failures):
        own = error.rank == rank and type(error) is TransportError  # or the other one has reported its own before
        assert own or (type(error) is RemoteError and error.rank == 1 - rank), failures
        assert "raise `ulimit -u`" in str(error) and seconds < AT_ONCE_S, failures


def fail_and_leave(rank):
    rank.group.poison(TransportError("this rank has no memory left", rank=1))
    rank.close()


def test_a_report_waits_for_its_group():
    """A rank fails and leaves before the other one has made the group: its failure is heard all the same."""
    with two_ranks(TCP, with_groups=False) as (early, late):
        late.make_group()
        fail_and_leave(late)
        wait_until(lambda: early.endpoint._early._reports, "the report has come")
        early.make_group()
        error, seconds = early.barrier()
    assert type(error) is RemoteError and error.rank == 1 and "rank 1 reported: this rank has no memory" in str(error)
    assert seconds < AT_ONCE_S


def test_a_report_waits_for_a_rank_that_has_yet_to_listen(monkeypatch):
    monkeypatch.setattr(reports, "_BEGINNING_SECONDS", LONG.total_seconds())
    ranks = [Rank(TCP) for _ in range(2)]
    records = [rank.record(number) for number, rank in enumerate(ranks)]

    def start(number):
        ranks[number].endpoint.start(records, Credentials(b"a key of this test", number, 2), LONG.total_seconds())

    start(1)
    ranks[1].make_group()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        left = threads.submit(fail_and_leave, ranks[1])
        time.sleep(0.5)  # longer than a report takes later
        start(0)
        left.result()
    ranks[0].make_group()
    error, _ = ranks[0].barrier()
    assert type(error) is RemoteError and error.rank == 1, error


@pytest.mark.parametrize(
    "cause", [{"kind": 1}, None, {"kind": "A", "text": 1, "rank": "x", "ranks": [], "operation": 3}]
)
def test_a_report_that_is_none_ends_no_group_that_begins(cause):
    with two_ranks(TCP, with_groups=False) as ranks:
        key = ranks[0].endpoint._key("world", [0, 1])
        ranks[0].endpoint._early.add(key, cause, 1)
        for rank in ranks:
            rank.make_group()
        assert barrier(ranks) == [None, None]


def test_reports_on_groups_that_never_come_are_bounded():
    early = reports.EarlyReports()
    for number in range(1000):
        early.add(f"group {number}", {"kind": "A"}, 1)
    assert early.take("group 999") == ({"kind": "A"}, 1) and early.take("group 999") is None
    assert early.take("group 0") is None and len(early._reports) < 1000


def test_a_group_that_a_connection_has_failed_while_it_was_made_raises_that(monkeypatch):
    """Its peers have heard of the connection, and not of what came after it on this rank."""
    first, second = (TransportError(f"this rank has no {what} left", rank=1) for what in ("memory", "threads"))
    open_core, opened = links.Endpoint.open_core, []

    def fail(endpoint, *args):
        if opened:
            opened[0].poison(first)
            raise second
        opened.append(open_core(endpoint, *args))
        return opened[0]

    with two_ranks(TCP, with_groups=False) as (other, failing):
        other.make_group()
        monkeypatch.setattr(links.Endpoint, "open_core", fail)
        with pytest.raises(TransportError, match="no memory left") as raised:
            failing.make_group()
        assert raised.value.rank == 1
        error, _ = other.barrier()
    assert type(error) is RemoteError and error.rank == 1 and "no memory left" in str(error)


def test_who_does_not_prove_itself_holds_no_descriptor_that_a_rank_needs(monkeypatch):
    monkeypatch.setattr(listener, "_RANKS_HANDSHAKE_SECONDS", 0.05)
    accept = socket.socket.accept
    with two_ranks(TCP) as ranks:
        attacked, unauthenticated = ranks[0].endpoint._sockets, ranks[0].endpoint._listener._unauthenticated
        monkeypatch.setattr(
            socket.socket, "accept", lambda sock: none_left() if sock in attacked and unauthenticated else accept(sock)
        )
        with socket.create_connection(("127.0.0.1", ranks[0].endpoint.port)) as silent:
            wait_until(lambda: unauthenticated, "the last descriptor is taken")
            begin = time.monotonic()
            assert barrier(ranks) == [None, None] and time.monotonic() - begin < AT_ONCE_S
            assert silent.recv(1) == b""


@pytest.mark.parametrize("env", [SHM, TCP], ids=["shm", "tcp"])
@pytest.mark.parametrize("peer_of_failing", [0, 1], ids=["dialer", "acceptor"])
def test_a_channel_that_one_end_cannot_have_fails_both(env, peer_of_failing, monkeypatch):
    """The other end believes by then that it is there."""
    name = "attach_shm" if env is SHM else "attach_tcp"
    attach = getattr(_C.Group, name)

    def fail(core, peer, *rest):
        if peer == peer_of_failing:
            raise TransportError("no memory is left")
        attach(core, peer, *rest)

    monkeypatch.setattr(_C.Group, name, fail)
    with two_ranks(env) as ranks:
        for error, seconds in barrier(ranks):
            assert "no memory is left" in str(error) and seconds < AT_ONCE_S, (error, seconds)


def interrupted_at(point, call):
    """Calls it with an interrupt where Python looks for one for the point-th time; whether it came to that.

    Python looks where a function begins, and after one in C; also at the end of each turn of a loop, of which there are
    none here that do nothing else.
    """
    left = point

    def look(frame, event, argument):
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def test_an_interrupt_while_a_connection_is_asked_for_holds_nobody_up(monkeypatch):
    """Wherever it comes, the lock is free, and the threads can end."""

    def running():
        return [thread.name for thread in threading.enumerate() if thread.is_alive()]

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    lock = threading.RLock()
    for point in itertools.count():
        dialing = dialer.Dialer(
            {}, lock, threading.Condition(lock), lambda peer: False, pytest.fail, pytest.fail, 1.0, lambda: 0.0
        )
        dialing.records = [None]
        was_interrupted = interrupted_at(point, lambda dialing=dialing: dialing.want("key", 0))
        closing = threading.Thread(target=dialing.close, daemon=True)
        closing.start()
        closing.join(AT_ONCE_S)
        assert not closing.is_alive(), f"interrupted at point {point}"
        if not was_interrupted:
            break
    assert point > 20
    wait_until(lambda: "bagua-dial-0" not in running(), "the threads end")
    assert raised == []


@pytest.mark.parametrize("failing", ["world", "world/p2p"])
def test_a_group_that_cannot_be_made_leaves_nothing(failing, monkeypatch):
    make = _C.Group

    def fail(name, *rest):
        if name == failing:
            raise TransportError("no memory is left")
        return make(name, *rest)

    with two_ranks(SHM, with_groups=False) as ranks:
        with monkeypatch.context() as patched:
            patched.setattr(_C, "Group", fail)
            for rank in ranks:
                with pytest.raises(TransportError, match="no memory is left"):
                    rank.make_group()
        assert ranks[0].endpoint._groups == {}, "its other core is closed"
        if failing == "world":  # it counts for nothing, though the other rank has made its own
            ranks[1].make_group()
            ranks[0].make_group()
            assert ranks[0].group._cores.collectives.key.endswith("|1")
            assert barrier(ranks) == [None, None]


def watched_for_ms(sock):
    """After how long a host that acknowledges nothing is an error of the socket; 0: never while nothing is sent."""
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and sock.getsockopt(
        socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT
    )


def test_a_host_that_dies_in_the_handshake_is_named(monkeypatch):
    watched = []

    def die(sock, count, attempt):
        watched.append(watched_for_ms(sock))
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(connector, "_receive", die)
    with two_ranks(TCP | {"BAGUA_HEARTBEAT_TIMEOUT": "7"}) as ranks:
        for error, seconds in barrier(ranks):
            assert "the connection between rank" in str(error) and "timed out" in str(error), error
            assert seconds < AT_ONCE_S
    assert {*watched} == {7000}


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("leaves", [False, True], ids=["late", "left"])
@pytest.mark.parametrize("env", [SHM, TCP], ids=["shm", "tcp"])
def test_a_channel_whose_group_never_comes_is_let_go(env, leaves, monkeypatch, caplog):
    """Its group was not made in time, or its dialer has left."""
    monkeypatch.setattr(listener, "_TIDY_SECONDS", 0.02)
    count = 20
    with two_ranks(env, with_groups=False) as (rank, peer), contextlib.ExitStack() as channels:
        attempt = connector.Attempt(lambda: None, 10.0)
        if leaves:
            peer.endpoint._dial_link(0, attempt)
        before, waiting = num_descriptors(), rank.endpoint._incoming
        for number in range(count):
            about = peer.endpoint._about(f"nobody's {number}|0|1", 0, "a channel", 0, 1)
            over_unix = env is SHM
            address = "\0" + rank.endpoint.unix_name if over_unix else ("127.0.0.1", rank.endpoint.port)
            family = socket.AF_UNIX if over_unix else socket.AF_INET
            sock = connector._authenticated(family, address, peer.endpoint.credentials, about, attempt)
            channels.enter_context(sock)
            if over_unix:
                socket.send_fds(sock, [b"F"], [0, 1])
        wait_until(lambda: len(waiting) == count, "they have come")
        assert num_descriptors() == before + count * (4 if over_unix else 2)
        if leaves:
            peer.endpoint._process.close()
        else:
            monkeypatch.setattr(rank.endpoint, "_incoming_s", 0.01)  # which is over by now
        wait_until(
            lambda: not waiting and num_descriptors() <= before + count, "they are let go, but for their dialer's"
        )
        wait_until(lambda: leaves or "not made here within 0.01 s" in caplog.text, "that is told")
        assert ("closed " in caplog.text) != leaves


@contextlib.contextmanager
def listening(takes_more):
    """A host's address; one that takes no more answers nothing to a request, as one that is gone."""
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server, contextlib.ExitStack() as calls:
        for _ in range(0 if takes_more else 2):
            calls.enter_context(socket.create_connection(server.getsockname()))
        yield server.getsockname()


class Notes:
    """A core that writes down what it is told of peers."""

    def __init__(self):
        self.names_peer = []

    def note_unreachable(self, peer, what, names_peer):
        self.names_peer.append(names_peer)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_host_that_took_a_connection_is_called_again_where_it_is_asked_about(is_there):
    with two_ranks(TCP, with_groups=False) as (rank, _), listening(is_there) as (address, port):
        record = dataclasses.replace(rank.record(0), address=address, port=port)
        state = dialer._PeerState(record, 10.0, lambda: 0.0)
        notes = Notes()
        missing = [dialer.RegisteredGroup("key", notes, [0, 1], 1)]
        attempt = connector.Attempt(lambda: None, 10.0, is_connected=True)
        state.note(attempt, missing, 0)
        assert notes.names_peer == [True], "it is there, and its process does not answer"
        state.note(attempt, missing, 0, is_asked=True)
        assert notes.names_peer == [True, False], "not known any more"
        for _ in range(5):
            time.sleep(0.01)
            state.note(attempt, missing, 0)
        assert notes.names_peer[-1] is is_there
        state.end_probe()


def test_a_group_that_asks_again_calls_the_host_again(monkeypatch):
    """Dials, as Liveness does where others ask about a peer that it has no link to."""
    asked = threading.Event()

    class Probe(connector.HostProbe):
        def __init__(self, record):
            super().__init__(record)
            asked.set()

    monkeypatch.setattr(dialer, "HostProbe", Probe)
    with socket.create_server(("127.0.0.1", 0)) as stopped, two_ranks(TCP) as ranks:
        # It takes connections and says nothing.
        ranks[0].endpoint.records[1] = dataclasses.replace(ranks[1].record(1), port=stopped.getsockname()[1])
        core, own = ranks[0].group._cores.collectives, ranks[0].endpoint._dialer
        own.want(core.key, 1)
        assert not asked.wait(0.2), "nobody has asked"
        own.want(core.key, 1)
        assert asked.wait(AT_ONCE_S)


def test_no_receiver_that_is_slow_ends_a_connection(monkeypatch):
    """Does what the watch of the handshake would."""
    watched = []

    def attach(self, *args):
        with socket.socket(fileno=os.dup(args[-1][0] if isinstance(args[-1], list) else args[-1])) as sock:
            watched.append(watched_for_ms(sock))
        originals[type(self)](self, *args)

    originals = {_C.Process: _C.Process.attach, _C.Group: _C.Group.attach_tcp}
    monkeypatch.setattr(_C.Process, "attach", attach)
    monkeypatch.setattr(_C.Group, "attach_tcp", attach)
    with two_ranks(TCP) as ranks:
        assert barrier(ranks) == [None, None]
    assert watched == [0] * 4
