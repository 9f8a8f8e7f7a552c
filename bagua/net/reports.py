"""The reports of a group's failure to ranks that have no link to this one when it closes the group.

Beside the data path. Linked ranks hear of a failure over the link, in the core; one that comes to the group later asks
when it waits. But a rank that closes a failed group may be about to exit, and could not be asked then. So the report
waits where the group is yet to be made.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from bagua import _C
from bagua.errors import BaguaError, RemoteError
from bagua.net.auth import Credentials
from bagua.net.connector import notify
from bagua.net.rendezvous import RankRecord

__all__ = ["EarlyReports", "cause_of", "describe", "remote_error", "report", "targets"]

logger = logging.getLogger("bagua")

_REPORT_SECONDS = 0.3  # for all of them together; a rank that is listening takes it at once
_BEGINNING_SECONDS = 1.0  # after the rendezvous; until then a rank on a loaded host may not serve its listener yet
_MAX_REPORTS = 32
_MAX_EARLY = 256
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
    connection cut or has waited in vain, and named no rank; Communicator::listen has the same rules."""
    text, rank, ranks, kind = cause["text"], cause["rank"], tuple(cause["ranks"]), cause["kind"]
    if kind != "RemoteError":
        text = f"rank {group_peer} reported: {text}"
        if rank is None and kind not in ("DeadlineExceeded", "TransportError"):
            rank = group_peer
            ranks = (rank,)
    return RemoteError(text, rank=rank, operation=cause["operation"], ranks=ranks)


def report(records: Sequence[RankRecord], credentials: Credentials, about: dict, started_s: float) -> None:
    """Tell ranks, or of many those at distances of powers of two, which tell others when they close the group.

    One that cannot be reached at once finds out by asking, or from another rank.

    Args:
        started_s: for how long this rank has been past the rendezvous.
    """
    try:
        missed = notify(records, credentials, about, max(_REPORT_SECONDS, _BEGINNING_SECONDS - started_s))
    except OSError as error:  # such as no descriptor left: the cause of the failure matters more than this
        logger.warning("other ranks could not be notified why a group failed: %s", error)
    else:
        logger.debug("%d of %d ranks could not be notified why a group failed", missed, len(records))


class EarlyReports:
    """The last of those that came before their group was made here, or after it was closed: no key comes again."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, tuple[dict, int]] = OrderedDict()

    def add(self, key: str, cause: dict, teller: int) -> None:
        """Keeps a report of the rank `teller` (global) on the group."""
        self._reports.setdefault(key, (cause, teller))
        if len(self._reports) > _MAX_EARLY:
            self._reports.popitem(last=False)

    def take(self, key: str) -> tuple[dict, int] | None:
        """The first of the group, which begins here."""
        return self._reports.pop(key, None)


def targets(group_rank: int, size: int) -> list[int]:
    """Ranks of a group to which this one of its ranks reports."""
    distances = range(1, size) if size <= _MAX_REPORTS else [1 << k for k in range((size - 1).bit_length())]
    return sorted({(group_rank + sign * distance) % size for distance in distances for sign in (1, -1)} - {group_rank})
