"""The rendezvous, in which ranks find each other and check that they fit together: store, records, the job's key.

Every rank publishes one record in torch's store (its address, version, world size, a random nonce) and reads
everybody's. The digest of all of them names the rendezvous; the token, stretched with it, is the key, and with that
each rank proves in the store what it has read. Only when every rank's proof is right is anything of a record used:
whoever can write to the store can end the job with an error, but not bring a rank to another address, and what an
earlier rendezvous left there fits no other one. Without a token the key is a random one in the store.

All ranks compare all records with rank 0's, so that all of them raise the same difference. Connections are made later,
on first use (links.py).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import math
import os
import queue
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist

from bagua.config import LaunchEnvironment
from bagua.errors import BaguaError, DeadlineExceeded, InvalidArgument, RemoteError, TransportError
from bagua.net.auth import Credentials, derive, stretch
from bagua.net.exhausted import exhausted_error, start_thread
from bagua.net.stall_watch import StallCount

__all__ = [
    "PROTOCOL",
    "Meeting",
    "RankRecord",
    "exchange_records",
    "host_identity",
    "meeting",
    "open_store",
    "rendezvous_name",
    "reopen_store",
]

# Raised whenever bytes on a wire or in a ring change their meaning.
PROTOCOL = 8

_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 0.002  # ranks that are started together arrive within milliseconds
# On top of the timeout, so that torch's own message can come first.
_STORE_GRACE_SECONDS = 0.5
# How long Ctrl-C waits for the store's answer.
_LAST_ANSWER_SECONDS = 1.0
# In pieces of these this rank waits for the store; a piece that takes longer than a stall means that it did not run.
_PIECE_SECONDS = 0.1
# The error of a failed rendezvous mentions that this rank did not run, or the store not answer, for longer than this.
_STALL_SECONDS = 1.0
# These limit what others can write to the store.
_MAX_RECORD_BYTES, _MAX_PROOF_BYTES, _MAX_FAULT_CHARACTERS = 8192, 256, 2000
_KEYS_PER_CALL = 64
# MASTER_ADDR may be a name that is registered only once rank 0 runs.
_RESOLVE_SECONDS = 60.0
_CONNECT_SECONDS = 2.0  # for one address; a lost packet is sent again within one
# A fault that is older than this rank's claim may be that of an earlier round, which another rank then closes.
_EARLIER_FAULT_SECONDS = 10.0

Answer = TypeVar("Answer")


class _NoAnswerError(Exception):
    """The store has not answered in time."""


class _StoreFailedError(Exception):
    """The store has raised; its exception is the cause."""


class _ClosedRoundError(Exception):
    """Another rank has found that the round is one of an earlier start of the job."""


@dataclass(frozen=True)
class RankRecord:
    """The description of itself that a rank publishes at start."""

    rank: int
    world_size: int
    version: str
    protocol: int
    backend: str
    thresholds: str  # of the selector; equal on all ranks, so that all choose the same algorithms without a message
    host: str  # equal for ranks that can share memory
    node_rank: int
    address: str  # of the TCP listener; IPv4 or IPv6, never truncated
    port: int
    unix_name: str  # of the abstract Unix socket, "" where shared memory is off
    pid: int
    heartbeat_timeout_ms: int = 10_000
    auth: str = ""  # how connections are authenticated: "a token", or "no token"
    nonce: str = ""  # random, so that no two rendezvous have the same records

    def to_json(self) -> bytes:
        """Returns the record as it is published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes, rank: int) -> RankRecord:
        """Parses a record that a rank has published, or an attacker in its name.

        Raises:
            TransportError: it is no record of that rank.
        """
        try:
            if len(text) > _MAX_RECORD_BYTES:
                raise ValueError(f"{len(text)} bytes, expected at most {_MAX_RECORD_BYTES}")
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError(f"a {type(found).__name__}, expected names and values")
            protocol = found.get("protocol")
            if type(protocol) is int and protocol != PROTOCOL:  # of another version: nothing else is known of it
                return cls(rank, 0, "", protocol, "", "", "", 0, "", 0, "", 0)
            expected = {"int": int, "str": str}
            for field in fields(cls):
                value = found.get(field.name)
                if type(value) is not expected[str(field.type)]:
                    raise ValueError(f"{field.name} is {value!r}, expected a value of type {field.type}")
            record = cls(**found)
            if record.rank != rank:
                raise ValueError(f"it is rank {record.rank}'s")
            if not 0 < record.port < 1 << 16:
                raise ValueError(f"port is {record.port}")
            ipaddress.ip_address(record.address)
        except (ValueError, TypeError, RecursionError) as error:
            raise TransportError(
                f"what the store has as the record of rank {rank} is none: {str(error)[:200]}; {_FORGED}", rank=rank
            ) from None
        return record


def host_identity(node_rank: int) -> str:
    """Equal on two ranks exactly when they can share memory: same boot, same network namespace, same torchrun node."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot_id = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot_id}/{namespace}/{node_rank}"


def open_store(launch: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    """torch's TCPStore at MASTER_ADDR:MASTER_PORT, shared with torch.distributed whichever comes first.

    Raises:
        TransportError: another program uses the port, or no process listens there or answers within the timeout.
    """
    is_server = launch.rank == 0 and not launch.use_agent_store

    def make() -> dist.Store:
        store = dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_server,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        store.check(["bagua"])  # older torch connects to anything that listens; this needs an answer
        return store

    where = f"{launch.master_addr}:{launch.master_port}"
    begin = time.monotonic()
    if not is_server:
        _reach(launch, timeout.total_seconds())
    left_s = max(timeout.total_seconds() - (time.monotonic() - begin), _POLL_SECONDS)
    try:
        store = _call_within(make, left_s + _STORE_GRACE_SECONDS, rank=launch.rank)
    except _NoAnswerError as error:
        raise _unreachable(launch, timeout.total_seconds(), str(error)) from None
    except _StoreFailedError as failure:
        if is_server and "EADDRINUSE" in str(failure):
            raise TransportError(
                f"MASTER_PORT {launch.master_port} on {launch.master_addr} is in use by another program; choose a free "
                "port, or let the launcher choose one (`bagua run` and `torchrun --standalone` do)"
            ) from failure.__cause__
        if is_server:
            raise TransportError(
                f"cannot open the store at {where} (MASTER_ADDR:MASTER_PORT): {failure}; give an address of rank 0's "
                "host"
            ) from failure.__cause__
        raise _unreachable(launch, timeout.total_seconds(), str(failure)) from failure.__cause__
    # The agents' store outlives a round of the job, which RendezvousRank.claim tells from others. Another one may still
    # be served by a rank 0 that is about to end.
    return dist.PrefixStore("bagua" if launch.use_agent_store else f"bagua/attempt{launch.restart_count}", store)


def _reach(launch: LaunchEnvironment, timeout_s: float) -> None:
    """Returns when a program accepts connections at MASTER_ADDR:MASTER_PORT.

    torch would say of any failure that there was no answer, and its thread, which cannot be ended, may abort the
    process.

    Raises:
        TransportError: none does within the timeout, or the name has no address; the message says which.
    """
    begin, pause_s = time.monotonic(), _FIRST_POLL_SECONDS
    while True:
        why = _failed_connection(launch, timeout_s)
        waited_s = time.monotonic() - begin
        if why is None:
            return
        limit_s = min(timeout_s, _RESOLVE_SECONDS) if why.startswith(_UNRESOLVED) else timeout_s
        if waited_s > limit_s:
            raise _unreachable(launch, limit_s, why)
        time.sleep(min(pause_s, max(timeout_s - waited_s, 0.0)))
        pause_s = min(2 * pause_s, _POLL_SECONDS)


_UNRESOLVED = "the name does not resolve"


def _failed_connection(launch: LaunchEnvironment, timeout_s: float) -> str | None:
    """The reason why MASTER_ADDR:MASTER_PORT takes no connection; None if it takes one."""
    try:
        found = _call_within(
            lambda: socket.getaddrinfo(launch.master_addr, launch.master_port, type=socket.SOCK_STREAM),
            timeout_s,
            rank=launch.rank,
        )
    except _NoAnswerError:
        return f"{_UNRESOLVED}: the name server does not answer"
    except _StoreFailedError as failure:
        return f"{_UNRESOLVED}: {failure}"
    why = ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as sock:
                sock.settimeout(min(timeout_s, _CONNECT_SECONDS))
                sock.connect(address)
                return None
        except OSError as error:
            reasons = {
                errno.ECONNREFUSED: "no program listens there: rank 0 has not started, or has ended",
                errno.ENETUNREACH: "this host has no route to it",
                errno.EHOSTUNREACH: "this host has no route to it",
            }
            if isinstance(error, TimeoutError):
                reason = "no answer to the request for a connection: the host is down, or a firewall is in the way"
            else:
                reason = reasons.get(error.errno or 0, str(error))
            why = why or reason
    return why


def _unreachable(launch: LaunchEnvironment, seconds: float, why: str) -> TransportError:
    return TransportError(
        f"cannot reach rank 0's store at {launch.master_addr}:{launch.master_port} (MASTER_ADDR:MASTER_PORT) within "
        f"{seconds:g} s: {why}; check that rank 0 is running and that the address is reachable from this host"
    )


def reopen_store(launch: LaunchEnvironment, init: str, timeout: timedelta) -> dist.Store:
    """open_store on a rank other than 0 that was in a group before: rank 0, which serves the store, may still be in it.

    The old store ends when rank 0 leaves that group; this waits for the new one, which starts when rank 0 comes to this
    rendezvous.

    Args:
        init: the prefix in the store of this rendezvous.

    Raises:
        TransportError, RemoteError, DeadlineExceeded: as of open_store and exchange_records.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        left_s = max(deadline - time.monotonic(), _POLL_SECONDS)
        try:
            store = open_store(launch, timedelta(seconds=left_s))
            prefixed, left = dist.PrefixStore(init, store), timedelta(seconds=left_s)
            _RendezvousStore(prefixed, launch.rank, launch.world_size, left).get("rank/0", _ABSENT, 0)
            return store
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _call_within(
    call: Callable[[], Answer], seconds: float, stalls: StallCount | None = None, rank: int | None = None
) -> Answer:
    """Returns the answer of `call`. Time in which this process did not run does not count.

    It runs on a thread of its own, because torch waits forever for a server that was stopped, or for another program
    that accepts the connection and never answers. Such a thread ends when that server does, or with this process. What
    a signal handler raises on this thread comes out as it is.

    Raises:
        _NoAnswerError: there is none within the time.
        _StoreFailedError: from what `call` raised.
        TransportError: this process can have no more threads.
    """
    # Not Thread.join: an interrupted one takes the thread for ended.
    ended: queue.SimpleQueue[tuple[Answer | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put((call(), None))
        except Exception as error:
            ended.put((None, error))

    try:
        start_thread(threading.Thread(target=run, name="bagua-store", daemon=True), rank)
        answer, error = _get_within(ended, seconds, stalls or StallCount(_STALL_SECONDS, _PIECE_SECONDS))
    except queue.Empty:
        raise _NoAnswerError(
            "no answer: rank 0 or the launcher's agent hangs, or another program listens there"
        ) from None
    except TransportError:  # there can be no thread
        raise
    except BaseException as interrupt:
        # Ctrl-C, of which the start of a thread may make a RuntimeError, or an exception of a signal handler. A process
        # that ends while a thread of it is in torch's store aborts; most stores answer soon.
        with contextlib.suppress(queue.Empty):
            ended.get(timeout=_LAST_ANSWER_SECONDS)
        if isinstance(interrupt.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if error is not None:
        raise _StoreFailedError(str(error)) from error
    return answer


def _get_within(ended: queue.SimpleQueue[Answer], seconds: float, stalls: StallCount) -> Answer:
    """Returns the next entry, or raises queue.Empty; it may be about to come at the end of a stall."""
    deadline, before_s = time.monotonic() + seconds, stalls.total_s
    while True:
        left_s = deadline + stalls.total_s - before_s - time.monotonic()
        try:
            return ended.get(timeout=min(max(left_s, 0.0), _PIECE_SECONDS))
        except queue.Empty:
            if left_s <= 0:
                raise
        finally:
            stalls.look()


class _RendezvousStore:
    """The store of one rendezvous. Every call ends by the rendezvous' deadline, or a moment later, as far as this
    process runs.

    A store that outlives the ranks, such as that of torchrun's agents, holds the keys of earlier rounds of the job,
    whose ranks have ended; agents count them differently (TORCHELASTIC_RESTART_COUNT). A rank whose claim is taken
    closes that round, and all ranks go to the next one.

    Args:
        outlives_ranks: whether the store may hold earlier rounds.

    Raises:
        TransportError: the store does not answer, or has ended.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta, outlives_ranks: bool = False):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._all_rounds, self._round, self._outlives_ranks = store, 0, outlives_ranks
        self._earlier_fault: bytes | None = None  # one that was there before this rank's claim
        self._claimed_at = 0.0
        self.has_published = False  # this rank's record, after which it is no longer alone with its mistakes
        self._timeout_s = timeout.total_seconds()
        self._begin = time.monotonic()
        self._stalls = StallCount(_STALL_SECONDS, _PIECE_SECONDS)  # of this process; what follows is of the store
        self._last_answer, self._stalls_at_answer_s, self._store_stalled_s = self._begin, 0.0, 0.0

    def _call(self, call: Callable[[], Answer], most_s: float = math.inf) -> Answer:
        deadline = self._begin + self._timeout_s + _STORE_GRACE_SECONDS + self._stalls.total_s
        left_s = deadline - time.monotonic()
        try:
            answer = _call_within(call, min(max(left_s, _POLL_SECONDS), most_s), self._stalls, self._rank)
        except _NoAnswerError as error:
            raise TransportError(
                f"the store of the rendezvous has not answered for {time.monotonic() - self._last_answer:.3g} s, of "
                f"the {self._timeout_s:g} s that the rendezvous may take: the process that serves it (rank 0, or the "
                "launcher's agent) has stopped or cannot be reached; nothing is known of the other ranks"
            ) from error
        except _StoreFailedError as failure:
            error = failure.__cause__
            stalled_s = self._stalls.total_s - self._stalls_at_answer_s
            if stalled_s > 0:
                # Rank 0 gives up when the time is over; its time may have begun earlier, but it may as well have died.
                is_over = time.monotonic() > self._begin + self._timeout_s
                why = "its time is over" if is_over else "it exited, or had waited too long for this rank; see its log"
                raise TransportError(
                    f"rank {self._rank} did not run for {stalled_s:.3g} s (its process was stopped, or its interpreter "
                    f"was held up), in which rank 0 (or the launcher) has ended the store of the rendezvous: {why} "
                    f"({error})",
                    rank=self._rank if is_over else None,
                ) from error
            raise TransportError(
                "the store has ended: rank 0 (or the launcher) exited or gave up during the rendezvous, see its log "
                f"({error})",
                rank=0,
            ) from error
        now = time.monotonic()
        stalled_s = now - self._last_answer - (self._stalls.total_s - self._stalls_at_answer_s)
        self._store_stalled_s, self._last_answer = max(self._store_stalled_s, stalled_s), now
        self._stalls_at_answer_s = self._stalls.total_s
        return answer

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str | bytes) -> None:
        self._call(lambda: self._store.set(key, value))

    def claim(self) -> None:
        """Claims this process's rank, in the first round that no earlier process of that rank has claimed.

        Raises:
            InvalidArgument: another process has the rank.
        """
        while True:
            num_claims = self.add(f"claim/{self._rank}", 1)
            if num_claims == 1:
                self._claimed_at = time.monotonic()
                self._earlier_fault = self._fault() if self._outlives_ranks else None
                return
            if not self._outlives_ranks:
                raise self._claimed_twice()
            self.set("closed", str(self._rank))
            self._go_to_next_round()

    def leave_closed_round(self) -> None:
        """Claims the rank in a later round.

        Raises:
            InvalidArgument: another process with this rank has closed the round, though this one was there first.
        """
        closer = self._call(lambda: self._store.get("closed"))
        self._go_to_next_round()
        if closer == str(self._rank).encode():
            raise self._claimed_twice()
        self.claim()

    def _go_to_next_round(self) -> None:
        self._round += 1
        self._store = dist.PrefixStore(f"round{self._round}", self._all_rounds)

    def _claimed_twice(self) -> InvalidArgument:
        message = f"two processes claim to be rank {self._rank}; give each process its own RANK; or {_FORGED}"
        return InvalidArgument(message, rank=self._rank)

    def publish_fault(self, message: str, rank: int | None, most_s: float = math.inf) -> None:
        """Tells the ranks that are still waiting why this rank gives up, and which rank is at fault."""
        fault = f"{'-' if rank is None else rank} {message}"
        try:
            self._call(lambda: self._store.set("fault", fault), most_s)
        except TransportError as error:
            if error.__cause__ is not None and exhausted_error(error.__cause__, None) is not None:
                with contextlib.suppress(RuntimeError):
                    self._store.set("fault", fault)  # without a thread; it does not wait for an answer

    def get(self, key: str, late: str, rank: int) -> bytes:
        """Waits for the key, which that rank sets; `late` says what it has not done where it does not come in time."""
        pause_s = _FIRST_POLL_SECONDS
        while True:
            value, fault, is_closed = self._call(lambda: self._look_for(key))
            if is_closed:
                raise _ClosedRoundError
            if value is not None:
                return value
            if fault is not None and self._is_of_this_round(fault):
                self._raise_fault(fault)
            # The clock runs while this process does not: that makes no rank late.
            if time.monotonic() > self._begin + self._timeout_s + self._stalls.total_s:
                self._give_up(late.format(rank), rank)
            time.sleep(pause_s)
            self._stalls.look()
            pause_s = min(2 * pause_s, _POLL_SECONDS)

    def check_fault(self) -> None:
        """Raises why another rank has given up, if one has: it may have while this one was stopped."""
        fault = self._fault()
        if fault is not None and fault != self._earlier_fault:
            self._raise_fault(fault)

    def _fault(self) -> bytes | None:
        return self._call(lambda: self._store.get("fault") if self._store.check(["fault"]) else None)

    def _is_of_this_round(self, fault: bytes) -> bool:
        return fault != self._earlier_fault or time.monotonic() > self._claimed_at + _EARLIER_FAULT_SECONDS

    def get_all(self, kind: str, size: int, late: str) -> list[bytes]:
        """Waits for the key of this kind of each rank; many of them are read at once where they are there."""
        values: list[bytes] = []
        while len(values) < size:
            at = len(values)
            values.append(self.get(f"{kind}/{at}", late, at))
            keys = [f"{kind}/{rank}" for rank in range(at + 1, min(at + _KEYS_PER_CALL, size))]
            values += self._call(lambda keys=keys: self._store.multi_get(keys) if self._store.check(keys) else [])
        return values

    def _look_for(self, key: str) -> tuple[bytes | None, bytes | None, bool]:
        """The value of the key, or why another rank has given up; and whether the round is closed."""
        if self._outlives_ranks and self._store.check(["closed"]):
            return None, None, True
        if self._store.check([key]):
            return self._store.get(key), None, False
        return None, self._store.get("fault") if self._store.check(["fault"]) else None, False

    def _raise_fault(self, fault: bytes) -> NoReturn:
        """Raises what publish_fault, or another writer, has written."""
        named = re.match(rb"(\d{1,7}|-) ", fault)
        rank = int(named[1]) if named and named[1] != b"-" else self._world_size
        message = _readable(fault[named.end() :] if named else fault)
        raise RemoteError(
            f"another rank gave up during the rendezvous: {message}", rank=rank if rank < self._world_size else None
        )

    def _give_up(self, late: str, rank: int) -> NoReturn:
        message = (
            f"{late} within {self._timeout_s:g} s; check that it was started, that its "
            "log shows no error, and that all ranks have the same WORLD_SIZE and MASTER_ADDR"
        )
        # The others may have given up for this very reason.
        if self._stalls.total_s > 0:
            message += (
                f"; but rank {self._rank} itself did not run for {self._stalls.total_s:.3g} s before (its process was "
                "stopped, or its interpreter was held up), which may be the cause"
            )
        elif self._store_stalled_s > _STALL_SECONDS:
            message += f"; but the store did not answer for {self._store_stalled_s:.3g} s, which may be the cause"
        self.publish_fault(message, rank)  # a rank that comes later need not wait in vain
        raise DeadlineExceeded(message, rank=rank)


_ABSENT, _UNPROVED = "rank {} did not come to the rendezvous", "rank {} came to the rendezvous and did not complete it"
# The end of messages where that may be the reason.
_FORGED = "another program, or somebody who can reach the store, has written to it"


class Meeting:
    """This rank's part in a rendezvous, from its claim on; made by ``meeting``."""

    def __init__(self, store: _RendezvousStore):
        self._store = store

    def exchange(self, mine: RankRecord, auth_token: str | None) -> tuple[list[RankRecord], Credentials]:
        """Publishes this rank's record; returns those of all ranks, and the credentials for connections.

        Raises:
            InvalidArgument: on every rank alike, naming the first difference with both sides.
            DeadlineExceeded: naming the rank that did not come within the timeout.
            RemoteError: another rank gave up first.
            TransportError: the store has ended, or does not answer, or another program has written to it.
        """
        while True:
            try:
                return _exchange_in_round(self._store, mine, auth_token)
            except _ClosedRoundError:
                self._store.leave_closed_round()


@contextlib.contextmanager
def meeting(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, outlives_ranks: bool = False
) -> Iterator[Meeting]:
    """Claims `rank`; whatever the block raises is reported to the ranks that are waiting, or come later.

    Args:
        outlives_ranks: whether the store is one that a launcher keeps when it starts the ranks again.

    Raises:
        InvalidArgument: another process has claimed the rank.
        TransportError: the store has ended, or does not answer.
    """
    mine = _RendezvousStore(store, rank, world_size, timeout, outlives_ranks)
    try:
        mine.claim()
        yield Meeting(mine)
    except (RemoteError, DeadlineExceeded):  # which the other rank, or the wait itself, has reported
        raise
    except BaguaError as error:
        at_fault = error.rank if error.rank is not None or mine.has_published else rank
        mine.publish_fault(str(error) if error.rank is not None else f"rank {rank}: {error}", at_fault)
        raise
    except BaseException as error:
        text = f"rank {rank} was interrupted by {type(error).__name__}{': ' if str(error) else ''}{error}"
        mine.publish_fault(text, rank, _LAST_ANSWER_SECONDS)
        raise


def exchange_records(
    store: dist.Store, mine: RankRecord, auth_token: str | None, timeout: timedelta
) -> tuple[list[RankRecord], Credentials]:
    """``Meeting.exchange`` of a rank that has nothing to do between its claim and its record."""
    with meeting(store, mine.rank, mine.world_size, timeout) as met:
        return met.exchange(mine, auth_token)


def _exchange_in_round(
    rendezvous: _RendezvousStore, mine: RankRecord, auth_token: str | None
) -> tuple[list[RankRecord], Credentials]:
    mine = replace(mine, auth="a token" if auth_token else "no token", nonce=secrets.token_hex(16))
    if mine.rank == 0 and not auth_token:
        rendezvous.set("secret", secrets.token_hex(32))
    records, rows = _exchange(rendezvous, mine)
    name = rendezvous_name(rows)
    # The secret in the store may be anything, of any length.
    key = stretch(auth_token, name) if auth_token else derive(rendezvous.get("secret", _UNPROVED, 0), name)
    _prove(rendezvous, mine, name, key)
    for record in records:
        _compare(records[0], record, _COMPARED)
    rendezvous.check_fault()
    rendezvous.set(f"done/{mine.rank}", b"")
    if mine.rank == 0:  # which may serve the store, and end it as soon as it leaves
        rendezvous.get_all("done", mine.world_size, _UNPROVED)
    return records, Credentials(derive(key, b"connections"), mine.rank, mine.world_size)


def rendezvous_name(rows: Sequence[bytes]) -> bytes:
    """The digest, 32 bytes, of all ranks' records as they are published: it tells this rendezvous from every other."""
    digest = hashlib.sha256(b"bagua rendezvous" + struct.pack("<I", PROTOCOL))
    for row in rows:
        digest.update(struct.pack("<I", len(row)) + row)
    return digest.digest()


def _exchange(rendezvous: _RendezvousStore, mine: RankRecord) -> tuple[list[RankRecord], list[bytes]]:
    """All ranks' records, and what they were read from."""
    written = mine.to_json()
    rendezvous.set(f"rank/{mine.rank}", written)
    rendezvous.has_published = True
    # Before the others, because nothing shows how many there are.
    first = RankRecord.parse(rendezvous.get("rank/0", _ABSENT, 0), 0)
    _compare(first, mine, _COMPARED_FIRST)
    rows = rendezvous.get_all("rank", mine.world_size, _ABSENT)
    if rows[mine.rank] != written:
        raise TransportError(f"the store has another record of rank {mine.rank} than it has published: {_FORGED}")
    records = [RankRecord.parse(row, rank) for rank, row in enumerate(rows)]
    for record in records:
        _compare(first, record, _COMPARED_FIRST)
    return records, rows


def _prove(rendezvous: _RendezvousStore, mine: RankRecord, name: bytes, key: bytes) -> None:
    """Tell the others what this rank has read, by `name`, and check that they have read the same."""

    def proof(rank: int) -> bytes:
        return derive(key, b"record" + struct.pack("<I", rank)).hex().encode()

    rendezvous.set(f"proof/{mine.rank}", name.hex().encode() + b" " + proof(mine.rank))
    for rank, row in enumerate(rendezvous.get_all("proof", mine.world_size, _UNPROVED)):
        read, _, proved = row[:_MAX_PROOF_BYTES].partition(b" ")
        if read != name.hex().encode():
            raise TransportError(
                f"rank {rank} has read other records in the store than rank {mine.rank}: {_FORGED}", rank=rank
            )
        if not hmac.compare_digest(proved, proof(rank)):
            # If rank 0's differs from this rank's, this rank is the one that differs from rank 0.
            other = rank or mine.rank
            raise InvalidArgument(
                f"the ranks disagree about auth_token: rank {other}'s token is not rank 0's; pass the same auth_token= "
                f"(or BAGUA_AUTH_TOKEN) on all ranks; or {_FORGED}",
                rank=other,
            )


# Without these nothing else can be compared.
_COMPARED_FIRST = (
    ("protocol", "wire protocol", "install the same version of bagua everywhere"),
    ("world_size", "world_size", "start all ranks with the same WORLD_SIZE"),
    ("auth", "auth_token", "pass the same auth_token= (or BAGUA_AUTH_TOKEN) on all ranks"),
)
# When all records are known to be the ranks' own.
_COMPARED = (
    ("version", "bagua version", "install the same version of bagua everywhere"),
    ("backend", "backend", "pass the same backend= (or BAGUA_BACKEND) on all ranks"),
    ("thresholds", "thresholds", "set the same BAGUA_THRESHOLDS on all ranks"),
    ("heartbeat_timeout_ms", "heartbeat timeout, in ms", "set the same BAGUA_HEARTBEAT_TIMEOUT on all ranks"),
)


def _compare(first: RankRecord, other: RankRecord, compared: Sequence[tuple[str, str, str]]) -> None:
    for field, name, remedy in compared:
        ours, theirs = getattr(first, field), getattr(other, field)
        if ours != theirs:
            raise InvalidArgument(
                f"the ranks disagree about {name}: rank 0 has {ours!r}, rank {other.rank} has {theirs!r}; {remedy}",
                rank=other.rank,
            )


def _readable(text: bytes) -> str:
    """Returns untrusted text in a form for a terminal or a log."""
    characters = text[: 4 * _MAX_FAULT_CHARACTERS].decode(errors="replace")[:_MAX_FAULT_CHARACTERS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in characters)
