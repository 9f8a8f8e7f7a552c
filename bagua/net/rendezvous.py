"""How ranks find each other and check that they fit together: the store, the table of ranks and the job secret.

Every rank publishes one record in torch's store (its address, version, world size, a proof that it knows the token)
and reads everybody's. All ranks compare all records with rank 0's, so that all of them raise the same difference.
Connections are made later, on first use (links.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch.distributed as dist

from bagua.config import LaunchEnvironment
from bagua.errors import DeadlineExceeded, InvalidArgument, RemoteError, TransportError

__all__ = ["PROTOCOL", "RankRecord", "exchange_records", "host_identity", "open_store", "reopen_store"]

# Raised whenever bytes on a wire or in a ring change their meaning.
PROTOCOL = 5

_POLL_SECONDS = 0.05
_FIRST_POLL_SECONDS = 0.002  # ranks that are started together arrive within milliseconds
# On top of the timeout, so that torch's own message can come first.
_STORE_GRACE_SECONDS = 0.5
# The error of a failed rendezvous mentions that this rank, or the store, made no progress for longer than this.
_STALL_SECONDS = 1.0

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
    token_proof: str


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
        store = _call_within(make, timeout.total_seconds() + _STORE_GRACE_SECONDS)
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
            _RendezvousStore(dist.PrefixStore(init, store), timedelta(seconds=left_s)).get("nonce", "rank 0")
            return store
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _call_within(call: Callable[[], Answer], seconds: float) -> Answer:
    """What `call` returns, or TimeoutError.

    It runs on a thread of its own, because torch waits forever for a server that was stopped, or for another program
    that accepts the connection and never answers. Such a thread ends when that server does, or with this process.
    """
    ended: list[tuple[Answer | None, Exception | None]] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except Exception as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, name="bagua-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise TimeoutError("no answer: rank 0 or the launcher's agent hangs, or another program listens there")
    answer, error = ended[0]
    if error is not None:
        raise error
    return answer


class _RendezvousStore:
    """The store of one rendezvous. Every call ends by the rendezvous' deadline, or a moment later.

    Raises:
        TransportError: the store does not answer, or has ended.
    """

    def __init__(self, store: dist.Store, timeout: timedelta):
        self._store, self._timeout_s = store, timeout.total_seconds()
        self._begin = time.monotonic()
        self._last_answer, self._stalled_s = self._begin, 0.0

    def _call(self, call: Callable[[], Answer]) -> Answer:
        left_s = self._begin + self._timeout_s + _STORE_GRACE_SECONDS - time.monotonic()
        try:
            answer = _call_within(call, max(left_s, _POLL_SECONDS))
        except TimeoutError as error:
            raise TransportError(
                f"the store of the rendezvous has not answered for {time.monotonic() - self._last_answer:.3g} s, of "
                f"the {self._timeout_s:g} s that the rendezvous may take: the process that serves it (rank 0, or the "
                "launcher's agent) has stopped or cannot be reached; nothing is known of the other ranks"
            ) from error
        except RuntimeError as error:  # torch's DistError is one
            raise TransportError(
                "the store has ended: rank 0 (or the launcher) exited or gave up during the rendezvous, see its log "
                f"({error})",
                rank=0,
            ) from error
        now = time.monotonic()
        self._stalled_s, self._last_answer = max(self._stalled_s, now - self._last_answer), now
        return answer

    def add(self, key: str, amount: int) -> int:
        return self._call(lambda: self._store.add(key, amount))

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._store.set(key, value))

    def publish_fault(self, message: str) -> None:
        """Tell the ranks that are still waiting why this rank gives up."""
        with contextlib.suppress(TransportError):
            self.set("fault", message)

    def get(self, key: str, who: str) -> bytes:
        """Waits for the key, which `who` sets."""
        pause_s = _FIRST_POLL_SECONDS
        while True:
            value, fault = self._call(lambda: self._look_for(key))
            if value is not None:
                return value
            if fault is not None:
                raise RemoteError(f"another rank gave up during the rendezvous: {fault.decode()}")
            if time.monotonic() > self._begin + self._timeout_s:
                self._give_up(who)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_SECONDS)

    def _look_for(self, key: str) -> tuple[bytes | None, bytes | None]:
        """The value of the key, or why another rank has given up."""
        if self._store.check([key]):
            return self._store.get(key), None
        return None, self._store.get("fault") if self._store.check(["fault"]) else None

    def _give_up(self, who: str) -> NoReturn:
        message = (
            f"{who} did not come to the rendezvous within {self._timeout_s:g} s; check that it was started, that its "
            "log shows no error, and that all ranks have the same WORLD_SIZE and MASTER_ADDR"
        )
        if self._stalled_s > _STALL_SECONDS:  # the others may have given up for this very reason
            message += (
                f"; but this rank, or the store, made no progress for {self._stalled_s:.3g} s, which may be the cause"
            )
        self.publish_fault(message)  # a rank that comes later need not wait in vain
        raise DeadlineExceeded(message)


def exchange_records(
    store: dist.Store, mine: RankRecord, auth_token: str | None, timeout: timedelta
) -> tuple[list[RankRecord], bytes]:
    """Publish this rank's record, return everybody's (by rank) and the job secret.

    Raises:
        InvalidArgument: on every rank alike, naming the first difference with both sides.
        DeadlineExceeded: naming the ranks that did not come within the timeout.
        RemoteError: another rank gave up first.
        TransportError: the store has ended, or does not answer.
    """
    rendezvous = _RendezvousStore(store, timeout)
    if rendezvous.add(f"claim/{mine.rank}", 1) != 1:
        message = f"two processes claim to be rank {mine.rank}; give each process its own RANK"
        rendezvous.publish_fault(message)
        raise InvalidArgument(message, rank=mine.rank)
    if mine.rank == 0:
        rendezvous.set("nonce", secrets.token_hex(16) + ":" + ("" if auth_token else secrets.token_hex(32)))
    nonce, _, generated = rendezvous.get("nonce", "rank 0").decode().partition(":")
    # A token that people chose is stretched; a generated one is random, and only those who can read the store know it.
    if auth_token and not generated:
        secret = hashlib.pbkdf2_hmac("sha256", auth_token.encode(), nonce.encode(), 100_000)
    else:
        secret = bytes.fromhex(generated) if generated else b""
        secret += auth_token.encode() if auth_token else b""
    proof = hmac.new(secret, b"bagua token proof", hashlib.sha256).hexdigest()
    mine = RankRecord(**{**asdict(mine), "token_proof": proof})
    rendezvous.set(f"rank/{mine.rank}", json.dumps(asdict(mine)))
    first = _read_record(rendezvous, 0)
    _compare(rendezvous, first, mine)
    records = [first]
    for rank in range(1, mine.world_size):
        records.append(_read_record(rendezvous, rank))
        _compare(rendezvous, first, records[-1])
    return records, secret


def _read_record(rendezvous: _RendezvousStore, rank: int) -> RankRecord:
    return RankRecord(**json.loads(rendezvous.get(f"rank/{rank}", f"rank {rank}")))


_COMPARED = (
    ("world_size", "world_size", "start all ranks with the same WORLD_SIZE"),
    ("protocol", "wire protocol", "install the same version of bagua everywhere"),
    ("version", "bagua version", "install the same version of bagua everywhere"),
    ("backend", "backend", "pass the same backend= on all ranks"),
    ("thresholds", "thresholds", "set the same BAGUA_THRESHOLDS on all ranks"),
    ("token_proof", "auth_token", "pass the same auth_token= (or BAGUA_AUTH_TOKEN) on all ranks"),
)


def _compare(rendezvous: _RendezvousStore, first: RankRecord, other: RankRecord) -> None:
    for field, name, remedy in _COMPARED:
        ours, theirs = getattr(first, field), getattr(other, field)
        if ours == theirs:
            continue
        sides = f"rank 0 has {ours!r}, rank {other.rank} has {theirs!r}"
        if field == "token_proof":
            sides = f"rank {other.rank}'s token is not rank 0's"
        message = f"the ranks disagree about {name}: {sides}; {remedy}"
        rendezvous.publish_fault(message)
        raise InvalidArgument(message, rank=other.rank)
