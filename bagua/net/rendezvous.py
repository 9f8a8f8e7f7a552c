"""How ranks find each other and check that they fit together: the store, the table of ranks and the job's key.

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
import hashlib
import hmac
import ipaddress
import json
import os
import queue
import re
import secrets
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist

from bagua.config import LaunchEnvironment
from bagua.errors import DeadlineExceeded, InvalidArgument, RemoteError, TransportError
from bagua.net.auth import Credentials, derive, stretch
from bagua.net.exhausted import exhausted_error, start_thread
from bagua.net.stall_watch import StallCount

__all__ = [
    "PROTOCOL",
    "RankRecord",
    "exchange_records",
    "give_up",
    "host_identity",
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
# Of what others can write to the store.
_MAX_RECORD_BYTES, _MAX_PROOF_BYTES, _MAX_FAULT_CHARACTERS = 8192, 256, 2000
_KEYS_PER_CALL = 64

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class RankRecord:
    """What one rank tells the others about itself at start."""

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
        """As it is published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, text: bytes, rank: int) -> RankRecord:
        """What a rank has published, or somebody in its name.

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
        TransportError: another program uses the port, or nobody listens there or answers within the timeout.
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
    try:
        store = _call_within(make, timeout.total_seconds() + _STORE_GRACE_SECONDS, rank=launch.rank)
    except TransportError:
        raise
    except (RuntimeError, ValueError, OSError) as error:
        if is_server and "EADDRINUSE" in str(error):
            raise TransportError(
                f"MASTER_PORT {launch.master_port} on {launch.master_addr} is in use by another program; choose a free "
                "port, or let the launcher choose one (`bagua run` and `torchrun --standalone` do)"
            ) from error
        role = "open the store" if is_server else "reach rank 0's store"
        raise TransportError(
            f"cannot {role} at {where} (MASTER_ADDR:MASTER_PORT) within {timeout.total_seconds():g} s: {error}; "
            "check that rank 0 is running and that the address is reachable from this host"
        ) from error
    # A restarted worker must not read what the attempt before it wrote.
    return dist.PrefixStore(f"bagua/attempt{launch.restart_count}", store)


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
            rendezvous = _RendezvousStore(prefixed, launch.rank, launch.world_size, left)
            rendezvous.get("rank/0", _ABSENT, 0)
            return store
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _call_within(
    call: Callable[[], Answer], seconds: float, stalls: StallCount | None = None, rank: int | None = None
) -> Answer:
    """What `call` returns, or TimeoutError. Time in which this process did not run does not count.

    It runs on a thread of its own, because torch waits forever for a server that was stopped, or for another program
    that accepts the connection and never answers. Such a thread ends when that server does, or with this process.
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
        raise TimeoutError(
            "no answer: rank 0 or the launcher's agent hangs, or another program listens there"
        ) from None
    except TransportError:  # there can be no thread
        raise
    except BaseException as interrupt:
        # Ctrl-C, of which the start of a thread may make a RuntimeError. A process that ends while a thread of it is in
        # torch's store aborts; most stores answer soon. Without a thread there is no answer.
        is_of_start = isinstance(interrupt.__context__, KeyboardInterrupt)
        if is_of_start or not isinstance(interrupt, RuntimeError):
            with contextlib.suppress(queue.Empty):
                ended.get(timeout=_LAST_ANSWER_SECONDS)
        if is_of_start:
            raise KeyboardInterrupt from None
        raise
    if error is not None:
        raise error
    return answer


def _get_within(ended: queue.SimpleQueue[Answer], seconds: float, stalls: StallCount) -> Answer:
    """What comes, or queue.Empty; at a stall's end it may be about to."""
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

    Raises:
        TransportError: the store does not answer, or has ended.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta):
        self._store, self._rank, self._world_size = store, rank, world_size
        self._timeout_s = timeout.total_seconds()
        self._begin = time.monotonic()
        self._stalls = StallCount(_STALL_SECONDS, _PIECE_SECONDS)  # of this process; what follows is of the store
        self._last_answer, self._stalls_at_answer_s, self._store_stalled_s = self._begin, 0.0, 0.0

    def _call(self, call: Callable[[], Answer]) -> Answer:
        deadline = self._begin + self._timeout_s + _STORE_GRACE_SECONDS + self._stalls.total_s
        left_s = deadline - time.monotonic()
        try:
            answer = _call_within(call, max(left_s, _POLL_SECONDS), self._stalls, self._rank)
        except TimeoutError as error:
            raise TransportError(
                f"the store of the rendezvous has not answered for {time.monotonic() - self._last_answer:.3g} s, of "
                f"the {self._timeout_s:g} s that the rendezvous may take: the process that serves it (rank 0, or the "
                "launcher's agent) has stopped or cannot be reached; nothing is known of the other ranks"
            ) from error
        except RuntimeError as error:  # torch's DistError is one
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

    def publish_fault(self, message: str, rank: int | None) -> None:
        """Tell the ranks that are still waiting why this rank gives up, and which rank is at fault."""
        fault = f"{'-' if rank is None else rank} {message}"
        try:
            self.set("fault", fault)
        except TransportError as error:
            if error.__cause__ is not None and exhausted_error(error.__cause__, None) is not None:
                with contextlib.suppress(RuntimeError):
                    self._store.set("fault", fault)  # without a thread; it does not wait for an answer

    def get(self, key: str, late: str, rank: int) -> bytes:
        """Waits for the key, which that rank sets; `late` says what it has not done where it does not come in time."""
        pause_s = _FIRST_POLL_SECONDS
        while True:
            value, fault = self._call(lambda: self._look_for(key))
            if value is not None:
                return value
            if fault is not None:
                self._raise_fault(fault)
            # The clock runs while this process does not: that makes nobody late.
            if time.monotonic() > self._begin + self._timeout_s + self._stalls.total_s:
                self._give_up(late.format(rank), rank)
            time.sleep(pause_s)
            self._stalls.look()
            pause_s = min(2 * pause_s, _POLL_SECONDS)

    def check_fault(self) -> None:
        """Raises why another rank has given up, if one has: it may have while this one was stopped."""
        fault = self._call(lambda: self._store.get("fault") if self._store.check(["fault"]) else None)
        if fault is not None:
            self._raise_fault(fault)

    def get_all(self, kind: str, size: int, late: str) -> list[bytes]:
        """Waits for the key of this kind of each rank; many of them are read at once where they are there."""
        values: list[bytes] = []
        while len(values) < size:
            at = len(values)
            values.append(self.get(f"{kind}/{at}", late, at))
            keys = [f"{kind}/{rank}" for rank in range(at + 1, min(at + _KEYS_PER_CALL, size))]
            values += self._call(lambda keys=keys: self._store.multi_get(keys) if self._store.check(keys) else [])
        return values

    def _look_for(self, key: str) -> tuple[bytes | None, bytes | None]:
        """The value of the key, or why another rank has given up."""
        if self._store.check([key]):
            return self._store.get(key), None
        return None, self._store.get("fault") if self._store.check(["fault"]) else None

    def _raise_fault(self, fault: bytes) -> NoReturn:
        """With what publish_fault has written, or anybody else."""
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
# The agents' store outlives the ranks, and open_store tells rounds apart by the agent's own count: one whose ranks fail
# counts, one that restarts its ranks because others do does not.
_EARLIER_ROUND = (
    "; or, as the store is that of torchrun's agents, an earlier round of this job has left the claim there: agents on "
    "several hosts restart for different reasons, and count differently then (TORCHELASTIC_RESTART_COUNT is {} here); "
    "let them restart once more (--max-restarts), or start the job anew"
)


def give_up(store: dist.Store, rank: int, world_size: int, timeout: timedelta, message: str) -> None:
    """Tell the ranks that come to the rendezvous why this one does not."""
    _RendezvousStore(store, rank, world_size, timeout).publish_fault(message, rank)


def exchange_records(
    store: dist.Store,
    mine: RankRecord,
    auth_token: str | None,
    timeout: timedelta,
    launch: LaunchEnvironment | None = None,
) -> tuple[list[RankRecord], Credentials]:
    """Publish this rank's record, return everybody's (by rank) and what this rank authenticates connections with.

    Args:
        launch: what the launcher has told this process, for messages.

    Raises:
        InvalidArgument: on every rank alike, naming the first difference with both sides.
        DeadlineExceeded: naming the rank that did not come within the timeout.
        RemoteError: another rank gave up first.
        TransportError: the store has ended, or does not answer, or somebody else has written to it.
    """
    rendezvous = _RendezvousStore(store, mine.rank, mine.world_size, timeout)
    try:
        num_claims = rendezvous.add(f"claim/{mine.rank}", 1)
    except TransportError as error:
        rendezvous.publish_fault(str(error), error.rank)
        raise
    if num_claims != 1:
        message = f"two processes claim to be rank {mine.rank}; give each process its own RANK; or {_FORGED}"
        if launch is not None and launch.use_agent_store:
            message += _EARLIER_ROUND.format(launch.restart_count)
        rendezvous.publish_fault(message, mine.rank)
        raise InvalidArgument(message, rank=mine.rank)
    mine = replace(mine, auth="a token" if auth_token else "no token", nonce=secrets.token_hex(16))
    if mine.rank == 0 and not auth_token:
        rendezvous.set("secret", secrets.token_hex(32))
    try:
        records, rows = _exchange(rendezvous, mine)
        name = rendezvous_name(rows)
        # What is in the store as the secret may be anything, of any length.
        key = stretch(auth_token, name) if auth_token else derive(rendezvous.get("secret", _UNPROVED, 0), name)
        _prove(rendezvous, mine, name, key)
        for record in records:
            _compare(records[0], record, _COMPARED)
        rendezvous.check_fault()
    except (InvalidArgument, TransportError) as error:
        rendezvous.publish_fault(str(error), error.rank)
        raise
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
            # Where it is rank 0's that differs from this rank's, it is this rank's that differs from rank 0's.
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
    """What may be anybody's, for a terminal or a log."""
    characters = text[: 4 * _MAX_FAULT_CHARACTERS].decode(errors="replace")[:_MAX_FAULT_CHARACTERS]
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in characters)
