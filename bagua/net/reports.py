"""Why a group has failed, told to ranks that have no link to this one when it closes the group.

Beside the data path. Linked ranks hear of a failure over the link, in the core; one that comes to the group later asks
when it waits. But a rank that closes a failed group may be about to exit, and nobody could ask it then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bagua import _C
from bagua.errors import BaguaError, RemoteError
from bagua.net.auth import Credentials
from bagua.net.connector import notify
from bagua.net.rendezvous import RankRecord

__all__ = ["cause_of", "describe", "remote_error", "report", "targets"]

logger = logging.getLogger("bagua")

_REPORT_SECONDS = 0.3  # for all of them together; a rank that is listening takes it at once
_MAX_REPORTS = 32
# So that it fits the first message of a connection, however JSON escapes the characters.
_MAX_TEXT, _MAX_RANKS = 1000, 64


def cause_of(core: _C.Group) -> BaguaError | None:
    """The first cause of a group's failure."""
    try:
        core.check()
    except BaguaError as error:
        return error
    return None


def describe(error: BaguaError) -> dict:
    """A cause as it travels."""
    text = str(error)
    text = text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
    return {
        "kind": type(error).__name__,
        "text": text,
        "rank": error.rank,
        "ranks": error.ranks[:_MAX_RANKS],
        "operation": error.operation,
    }


def remote_error(cause: dict, group_peer: int) -> BaguaError:
    """The first cause, as another rank's failure. A rank that only passes it on is not named, nor one that has found a
    connection cut or has waited in vain, and named nobody; Communicator::listen has the same rules."""
    text, rank, ranks, kind = cause["text"], cause["rank"], tuple(cause["ranks"]), cause["kind"]
    if kind != "RemoteError":
        text = f"rank {group_peer} reported: {text}"
        if rank is None and kind not in ("DeadlineExceeded", "TransportError"):
            rank = group_peer
            ranks = (rank,)
    return RemoteError(text, rank=rank, operation=cause["operation"], ranks=ranks)


def report(records: Sequence[RankRecord], credentials: Credentials, about: dict) -> None:
    """Tell ranks, or of many those at distances of powers of two, which tell others when they close the group.

    One that cannot be reached at once finds out by asking, or from another rank.
    """
    try:
        missed = notify(records, credentials, about, _REPORT_SECONDS)
    except OSError as error:  # such as no descriptor left: the cause of the failure matters more than this
        logger.warning("other ranks could not be notified why a group failed: %s", error)
    else:
        logger.debug("%d of %d ranks could not be notified why a group failed", missed, len(records))


def targets(group_rank: int, size: int) -> list[int]:
    """Ranks of a group to which this one of its ranks reports."""
    distances = range(1, size) if size <= _MAX_REPORTS else [1 << k for k in range((size - 1).bit_length())]
    return sorted({(group_rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {group_rank})
