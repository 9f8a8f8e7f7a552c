"""Exchanges of Python values in which a value that cannot be sent or read is the same error on every rank.

Beside the data path: ProcessGroup's methods for objects and plain data. A rank that cannot turn its value into bytes
still takes part and sends the reason; a rank that cannot turn bytes into the value reports it in one more exchange. So
no rank waits for another, and the group can be used afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from bagua.distributed.job_ranks import JobRanks
from bagua.errors import InvalidArgument

__all__ = ["Format", "all_gather", "broadcast"]

_VALUE, _REASON = b"v", b"r"


class _Group(Protocol):
    """The part of ProcessGroup that moves the bytes."""

    rank: int
    job_ranks: JobRanks

    def broadcast_bytes(self, payload: bytes | None, src: int) -> bytes: ...

    def all_gather_bytes(self, payload: bytes) -> list[bytes]: ...


class Format:
    """The way of values to bytes and back.

    Args:
        dumps, loads: to bytes and back.
        can_loads_fail: True if ``loads`` may raise for bytes that ``dumps`` has made; then all ranks report its errors.
    """

    def __init__(self, dumps: Callable[[Any], bytes], loads: Callable[[bytes], Any], can_loads_fail: bool):
        self.dumps, self.loads, self.can_loads_fail = dumps, loads, can_loads_fail


def broadcast(group: _Group, value: object, src: int, form: Format) -> Any:
    """The value of rank `src`, on all ranks.

    Raises:
        InvalidArgument: on all ranks, where it cannot be sent, or cannot be read on one of them.
    """
    message, failure = _packed(value, form) if group.rank == src else (None, None)
    message = group.broadcast_bytes(message, src)
    _check_sent(group, message, src, failure)
    return _read(group, {src: message} if group.rank != src else {}, form).get(src, value)


def all_gather(group: _Group, value: object, form: Format) -> list[Any]:
    """The values of all ranks, by rank. Raises InvalidArgument as ``broadcast`` does."""
    message, failure = _packed(value, form)
    messages = group.all_gather_bytes(message)
    for rank, message in enumerate(messages):
        _check_sent(group, message, rank, failure)
    return [*_read(group, dict(enumerate(messages)), form).values()]


def _packed(value: object, form: Format) -> tuple[bytes, Exception | None]:
    """The message, and the exception that kept this rank from sending the value."""
    head = type(value).__name__.encode(errors="replace") + b"\n"
    try:
        return _VALUE + head + form.dumps(value), None
    except Exception as error:
        return _REASON + head + _reason(error).encode(errors="replace"), error


def _check_sent(group: _Group, message: bytes, rank: int, failure: Exception | None) -> None:
    if message[:1] == _REASON:
        kind, _, reason = message[1:].decode().partition("\n")
        text = f"rank {rank} cannot send its {kind}: {reason}; pass an object that every rank can send and read"
        raise group.job_ranks.told(InvalidArgument(text, rank=rank)) from failure


def _read(group: _Group, messages: dict[int, bytes], form: Format) -> dict[int, Any]:
    values: dict[int, Any] = {}
    report, failure = "", None
    for rank, message in messages.items():
        kind, _, content = message[1:].partition(b"\n")
        try:
            values[rank] = form.loads(content)
        except Exception as error:
            if not form.can_loads_fail:
                raise
            report, failure = (
                f"rank {group.rank} cannot read the {kind.decode()} of rank {rank}: {_reason(error)}",
                error,
            )
            break
    reports = group.all_gather_bytes(report.encode(errors="replace")) if form.can_loads_fail else []
    for rank, report in enumerate(reports):
        if report:
            text = f"{report.decode()}; pass an object that every rank can send and read"
            raise group.job_ranks.told(InvalidArgument(text, rank=rank)) from failure
    return values


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
