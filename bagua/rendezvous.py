"""Who is there, and do we agree: the store, the rank table and the job secret.

Every rank publishes one record in torch's store (its version, its world size, how it is reached, a proof of the token)
and reads everybody's. All ranks compare all records with rank 0's, so that all of them raise the same difference.
Connections are made later, on first use (connections.py).
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
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from .config import LaunchEnvironment
from .errors import BaguaError, DeadlineExceeded, InvalidArgument, RemoteError, TransportError

__all__ = ["PROTOCOL", "RankRecord", "exchange_records", "host_identity", "open_store", "publish_fault", "reopen_store"]

# Raised whenever bytes on a wire or in a ring change their meaning.
PROTOCOL = 2

_POLL_SECONDS = 0.05
# Beyond the timeout, so that torch's own message can come first.
_STORE_GRACE_SECONDS = 0.5


@dataclass(frozen=True)
class RankRecord:
    """What one rank tells the others at start."""

    rank: int
    world_size: int
    version: str
    protocol: int
    backend: str
    thresholds: str  # of the selector: ranks choose algorithms without a message
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
        TransportError: the port is taken by another program, or nobody listens there within the timeout.
    """
    is_server = launch.rank == 0 and not launch.use_agent_store
    where = f"{launch.master_addr}:{launch.master_port}"
    try:
        store = _tcp_store(launch, is_server, timeout)
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
    """open_store for one of rank 0's guests that was in a group before: rank 0 may still be in it.

    When it leaves the group its store ends, and another one begins when it comes to this rendezvous, which is awaited.

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
            with _loss_told():
                _get(dist.PrefixStore(init, store), "nonce", deadline, timeout, "rank 0")
            return store
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)


def _tcp_store(launch: LaunchEnvironment, is_server: bool, timeout: timedelta) -> dist.Store:
    """On a thread of its own, because torch waits without an end for a stranger that accepts and then says nothing."""
    made: list[dist.Store | Exception] = []

    def make() -> None:
        try:
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
            made.append(store)
        except Exception as error:
            made.append(error)

    thread = threading.Thread(target=make, name="bagua-store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _STORE_GRACE_SECONDS)
    if not made:
        raise TimeoutError("no answer; another program may listen there")
    if isinstance(made[0], Exception):
        raise made[0]
    return made[0]


def publish_fault(store: dist.Store, message: str) -> None:
    """Tell the ranks that still wait in exchange_records why this rank gives up."""
    with contextlib.suppress(RuntimeError):  # the store may be gone already
        store.set("fault", message)


def exchange_records(
    store: dist.Store, mine: RankRecord, auth_token: str | None, timeout: timedelta
) -> tuple[list[RankRecord], bytes]:
    """Publish this rank's record, return everybody's (by rank) and the job secret.

    Raises:
        InvalidArgument: on every rank alike, naming the first difference with both sides.
        DeadlineExceeded: naming the ranks that did not come within the timeout.
        RemoteError: another rank gave up first.
        TransportError: the store is gone.
    """
    with _loss_told():
        return _exchange(store, mine, auth_token, timeout)


@contextlib.contextmanager
def _loss_told() -> Iterator[None]:
    try:
        yield
    except BaguaError:
        raise
    except RuntimeError as error:  # torch's DistError is one
        raise TransportError(
            f"the store is gone: rank 0 (or the launcher) ended or gave up in the rendezvous, see its log ({error})",
            rank=0,
        ) from error


def _exchange(
    store: dist.Store, mine: RankRecord, auth_token: str | None, timeout: timedelta
) -> tuple[list[RankRecord], bytes]:
    deadline = time.monotonic() + timeout.total_seconds()
    if store.add(f"claim/{mine.rank}", 1) != 1:
        message = f"two processes say that they are rank {mine.rank}; give each process its own RANK"
        publish_fault(store, message)
        raise InvalidArgument(message, rank=mine.rank)
    if mine.rank == 0:
        store.set("nonce", secrets.token_hex(16) + ":" + ("" if auth_token else secrets.token_hex(32)))
    nonce, _, generated = _get(store, "nonce", deadline, timeout, "rank 0").decode().partition(":")
    # A token of people is stretched; a generated one is known only to those who can read the store.
    if auth_token and not generated:
        secret = hashlib.pbkdf2_hmac("sha256", auth_token.encode(), nonce.encode(), 100_000)
    else:
        secret = bytes.fromhex(generated) if generated else b""
        secret += auth_token.encode() if auth_token else b""
    proof = hmac.new(secret, b"bagua token proof", hashlib.sha256).hexdigest()
    mine = RankRecord(**{**asdict(mine), "token_proof": proof})
    store.set(f"rank/{mine.rank}", json.dumps(asdict(mine)))
    first = _read_record(store, 0, deadline, timeout)
    _compare(store, first, mine)
    records = [first]
    for rank in range(1, mine.world_size):
        records.append(_read_record(store, rank, deadline, timeout))
        _compare(store, first, records[-1])
    return records, secret


def _get(store: dist.Store, key: str, deadline: float, timeout: timedelta, who: str) -> bytes:
    while not store.check([key]):
        if store.check(["fault"]):
            raise RemoteError(f"another rank gave up at start: {store.get('fault').decode()}")
        if time.monotonic() > deadline:
            message = (
                f"{who} did not come to the rendezvous within {timeout.total_seconds():g} s; check that it was "
                "started, that its log shows no error, and that all ranks have the same WORLD_SIZE and MASTER_ADDR"
            )
            publish_fault(store, message)  # who comes now need not wait in vain
            raise DeadlineExceeded(message)
        time.sleep(_POLL_SECONDS)
    return store.get(key)


def _read_record(store: dist.Store, rank: int, deadline: float, timeout: timedelta) -> RankRecord:
    return RankRecord(**json.loads(_get(store, f"rank/{rank}", deadline, timeout, f"rank {rank}")))


_COMPARED = (
    ("world_size", "world_size", "start all ranks with the same WORLD_SIZE"),
    ("protocol", "wire protocol", "install the same version of bagua everywhere"),
    ("version", "bagua version", "install the same version of bagua everywhere"),
    ("backend", "backend", "pass the same backend= on all ranks"),
    ("thresholds", "thresholds", "set the same BAGUA_THRESHOLDS on all ranks"),
    ("token_proof", "auth_token", "pass the same auth_token= (or BAGUA_AUTH_TOKEN) on all ranks"),
)


def _compare(store: dist.Store, first: RankRecord, other: RankRecord) -> None:
    for field, name, remedy in _COMPARED:
        ours, theirs = getattr(first, field), getattr(other, field)
        if ours == theirs:
            continue
        sides = f"rank 0 has {ours!r}, rank {other.rank} has {theirs!r}"
        if field == "token_proof":
            sides = f"rank {other.rank}'s token is not rank 0's"
        message = f"the ranks disagree about {name}: {sides}; {remedy}"
        publish_fault(store, message)
        raise InvalidArgument(message, rank=other.rank)
