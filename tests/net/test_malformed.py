"""Connections that know the secret and say what makes no sense, since they are broken: the job does not notice."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import time
import types

import pytest
import torch

import bagua
from bagua.errors import InternalError
from bagua.net import auth, connector

WELL_FORMED = {
    "purpose": "channel",
    "group": "g",
    "from": 1,
    "to": 0,
    "channel": "c",
    "index": 0,
    "streams": 2,
    "ring_bytes": 1 << 20,
    "tag": 0,
}
WRONG = {
    "group": [1, None, ["g"], {}],
    "from": ["1", 1.0, True, None, -1, 2, 10**30, [1]],
    "channel": [1, None, ["c"]],
    "purpose": [1, None, ["channel"], "word"],
    "index": [-1, 3, 10**30, None, "0", [0]],
    "streams": [-1, 65, 10**30, None, "2"],
    "ring_bytes": [0, -1, 1 << 40, None, "4096"],
    "tag": [-1, 10**30, None, "0"],
}
MALFORMED = [WELL_FORMED | {name: value} for name, values in WRONG.items() for value in values]
MALFORMED += [{key: value for key, value in WELL_FORMED.items() if key != name} for name in WRONG]
MALFORMED += [WELL_FORMED | {"to": to} for to in (1, -1, "0", True, None, [0])]
ENDS = {"from": 1, "to": 0}
MALFORMED += [{}, [], None, 1, "text", [WELL_FORMED], ENDS, ENDS | {"purpose": "report"}]
MALFORMED += [{"purpose": "link", "from": other, "to": 0} for other in (9, None, "1", -1)]
MALFORMED += [ENDS | {"purpose": "report", "groups": groups, "cause": {"kind": 1}} for groups in (["world"], 5, [[]])]
NOT_JSON = [b" ", b"{", b"\xff\xfe", b"[" * 16_000, b"9" * 16_000, json.dumps(WELL_FORMED).encode() + b"}"]


class Raw(bytes):
    """Instead of the text that json.dumps returns."""

    def encode(self):
        return self


def say(family, address, credentials, about):
    """Proves itself, says what it is, and waits for the end of the connection."""
    sent = types.SimpleNamespace(dumps=lambda it: Raw(it) if isinstance(it, bytes) else json.dumps(it))
    original, auth.json = auth.json, sent
    try:
        # Over the Unix socket the last one is kept for a group that is not there yet.
        end = time.monotonic() + (10 if family == socket.AF_INET else 1)

        def still_wanted():
            if time.monotonic() > end:
                raise TimeoutError

        attempt = connector.Attempt(still_wanted, 10.0)
        # It may close the connection before it proves itself, or before it has read all.
        with contextlib.suppress(ConnectionError, TimeoutError):
            with connector._authenticated(family, address, credentials, about, attempt) as sock:
                if family == socket.AF_UNIX and isinstance(about, dict):
                    read, write = os.pipe()
                    socket.send_fds(sock, [b"F"], [read, write])  # of no memory at all
                    os.close(read)
                    os.close(write)
                connector._wait(sock, connector.select.POLLIN, attempt)
                while sock.recv(1000):
                    connector._wait(sock, connector.select.POLLIN, attempt)
    finally:
        auth.json = original


def _descriptors():
    """What this process has open, without the numbers."""
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of listdir itself
            kinds.append(os.readlink(f"/proc/self/fd/{fd}").split("[")[0])
    return sorted(kinds)


def check_malformed(rank, world_size):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    bagua.init_process_group(timeout=20.0)
    endpoint, x = bagua.distributed.world._world.endpoint, torch.ones(3)
    bagua.all_reduce(x)
    descriptors = _descriptors()
    try:
        if rank == 1:
            record = endpoint.records[0]
            # The next group's key: what is wrong must not wait there for it.
            key = f"group1:0,1|{hashlib.sha256(b'[0, 1]').hexdigest()[:16]}|1"
            named = [{**it, "group": key} if isinstance(it, dict) and it.get("group") == "g" else it
                     for it in MALFORMED]  # fmt: skip
            for about in named + NOT_JSON:
                say(socket.AF_INET, (record.address, record.port), endpoint.credentials, about)
            for about in [*named[:3], WELL_FORMED | {"group": key}, []]:
                say(socket.AF_UNIX, "\0" + record.unix_name, endpoint.credentials, about)
        bagua.all_reduce(x)
        group = bagua.new_group()  # which rank 1 dials
        assert rank == 0 or group._cores.collectives.key == key
        bagua.all_reduce(x, group=group)
        assert x.tolist() == [8.0] * 3
        bagua.destroy_process_group(group)
        assert endpoint._incoming == {}
        deadline = time.monotonic() + 10
        while len(_descriptors()) > len(descriptors) and time.monotonic() < deadline:
            time.sleep(0.05)  # until the thread has seen the last ends
        assert len(_descriptors()) <= len(descriptors), (_descriptors(), descriptors)
    finally:
        bagua.destroy_process_group()
        logging.getLogger("bagua").removeHandler(handler)
    return lines


@pytest.mark.timed
def test_malformed_but_authenticated(pool2):
    lines, _ = pool2.run(check_malformed)
    assert any("expected 0..1" in line for line in lines), lines
    assert any("shared memory that is not sealed" in line for line in lines), lines


def check_broken(rank, world_size):
    """The thread of rank 0 breaks: a mistake of bagua's own."""
    bagua.init_process_group(timeout=20.0)
    bagua.all_reduce(torch.ones(3))
    begin = time.monotonic()
    if rank == 0:
        listener = bagua.distributed.world._world.endpoint._listener
        listener._accept_connections = None
    bagua.barrier()
    with pytest.raises(bagua.BaguaError, match="no longer accepts connections, because of TypeError") as caught:
        for _ in range(2):
            bagua.all_reduce(torch.ones(3), group=bagua.new_group())
    assert isinstance(caught.value, InternalError) == (rank == 0)
    seconds = time.monotonic() - begin
    bagua.destroy_process_group()
    return seconds


@pytest.mark.timed
def test_a_thread_that_ends_fails_the_groups(pool2):
    assert max(pool2.run(check_broken)) < 10
