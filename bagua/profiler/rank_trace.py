"""RankTrace: reads the file of one rank's timeline, and refuses one that is damaged.

Beside the data path: file of ``model.bagua.save_timeline`` -> **RankTrace** -> report. If a person, a full disk or
another version has changed the file, the error names the field that is wrong; nothing fails later because of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua.errors import InvalidArgument
from bagua.profiler import chrome_trace

__all__ = ["DRIFT", "OPERATION_TRACKS", "MERGED", "RankTrace"]

MERGED = "bagua merged timeline 1"
OPERATION_TRACKS = (chrome_trace.OPERATIONS, chrome_trace.COORDINATION)
# Seconds per second by which the clocks of two hosts drift apart at most: the accuracy of quartz crystals.
DRIFT = 50e-6

_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e18  # 31 years in nanoseconds; false for NaN


def _is_int(value: Any) -> bool:
    return type(value) is int and _is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _or_null(check: _Check) -> _Check:
    return lambda value: value is None or check(value)


# The fields that the report reads.
_ABOUT: dict[str, _Check] = {
    **dict.fromkeys(("rank", "world_size"), _is_int),
    **dict.fromkeys(("group", "host", "boot_id", "algorithm"), _is_text),
    **dict.fromkeys(("clock", "totals"), _is_object),
    "operations_since_us": _or_null(_is_number),
    "failure": _or_null(_is_object),
}
_CLOCK = {
    **dict.fromkeys(("offset_ns", "uncertainty_ns", "measured_ns"), _or_null(_is_number)),
    "measurement": _or_null(_is_text),
}
_TOTALS = {
    "steps": _is_int,
    **dict.fromkeys(("exposed_s", "bytes_sent", "network_bytes_sent"), _is_number),
    "buckets": _or_null(_is_object),
}
_FAILURE = {
    **dict.fromkeys(("where", "error"), _is_text),
    **dict.fromkeys(("wait_ns", "end_ns"), _is_number),
    "step": _is_int,
    "rank": _or_null(_is_int),
}
_EVENT = {"name": _is_text, "pid": _is_int, "tid": _is_int, "args": _is_object, "cat": _or_null(_is_text)}
_TIMES: dict[str, dict[str, _Check]] = {  # further fields of an event, by its `ph`
    "M": {},
    "i": {"ts": _is_number},
    "X": {"ts": _is_number, "dur": _is_number},
}
_OPERATION = {"group": _is_text, "ticket": _is_int, "bytes": _is_number}
_ARGS = {chrome_trace.STEPS: {"index": _is_int}, **dict.fromkeys(OPERATION_TRACKS, _OPERATION)}  # by its `cat`


@dataclass(frozen=True)
class RankTrace:
    """The file of one rank.

    Attributes:
        path: where it was read from.
        about: its ``otherData``.
        events: in the trace-event format.
    """

    path: Path
    about: dict[str, Any]
    events: list[dict[str, Any]]

    @staticmethod
    def load(path: str | Path) -> RankTrace:
        """Reads a file of ``Timeline.save`` or ``model.bagua.save_timeline``.

        Raises:
            InvalidArgument: it is not one, or is damaged; the message says where.
        """
        try:
            content = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"{path} cannot be read as a timeline: {error}") from error
        about = content.get("otherData") if isinstance(content, dict) else None
        found = about.get("format") if isinstance(about, dict) else None
        if found == MERGED:
            raise InvalidArgument(f"{path} is a merged trace; name the files of the ranks, such as rank0.json")
        if found != chrome_trace.FORMAT:
            raise InvalidArgument(
                f"{path} is not a rank's timeline: its otherData.format is {found!r}, expected "
                f"{chrome_trace.FORMAT!r}; model.bagua.save_timeline(folder) writes one per rank"
            )
        _check_about(path, about)
        events = content.get("traceEvents")
        if not isinstance(events, list):
            raise InvalidArgument(f"{path}: traceEvents is {str(events)[:80]}; save the timeline again")
        for event in events:
            if not _is_event(event):
                raise InvalidArgument(f"{path}: {str(event)[:80]} is not a trace event; save the timeline again")
        return RankTrace(Path(path), about, events)

    @property
    def rank(self) -> int:
        """The rank in the group that trained."""
        return self.about["rank"]

    @property
    def clock(self) -> str:
        """Equal for files whose times are on one clock: of one measurement, or of one host where none was taken."""
        return self.about["clock"].get("measurement") or self.about["boot_id"]

    @property
    def uncertainty_ns(self) -> int:
        """The bound on the error of its times on rank 0's clock, when the clocks were compared."""
        return self.about["clock"].get("uncertainty_ns") or 0

    def uncertainty_at(self, time_ns: int) -> int:
        """The same at another time, to which the clocks may have drifted apart."""
        if not self.uncertainty_ns:
            return 0  # on rank 0's host
        age_ns = abs(time_ns - self.about["clock"]["measured_ns"])
        return self.uncertainty_ns + round(DRIFT * age_ns)

    @property
    def operations_since_us(self) -> float:
        """The file has every operation that began later; earlier ones may be missing."""
        since_us = self.about.get("operations_since_us")
        return -math.inf if since_us is None else since_us

    def slices(self, track: str) -> list[dict[str, Any]]:
        """The slices of one of ``chrome_trace.TRACKS``, of all groups, in order of time."""
        found = [event for event in self.events if event.get("cat") == track and event["ph"] == "X"]
        return sorted(found, key=lambda event: event["ts"])


def _check_about(path: str | Path, about: dict[str, Any]) -> None:
    def check(content: dict[str, Any], checks: dict[str, _Check], prefix: str) -> None:
        for name, is_sound in checks.items():
            if not is_sound(content.get(name)):
                value = repr(content.get(name))[:80]
                raise InvalidArgument(f"{path}: otherData.{prefix}{name} is {value}; save the timeline again")

    check(about, _ABOUT, "")
    check(about, {"rank": lambda rank: 0 <= rank < about["world_size"]}, "")
    check(about["clock"], _CLOCK, "clock.")
    if about["clock"].get("uncertainty_ns"):
        check(about["clock"], {"measured_ns": _is_number}, "clock.")
    check(about["totals"], _TOTALS, "totals.")
    if about.get("failure") is not None:
        check(about["failure"], _FAILURE, "failure.")


def _is_event(event: Any) -> bool:
    def is_sound(content: dict[str, Any], checks: dict[str, _Check]) -> bool:
        return all(check(content.get(name)) for name, check in checks.items())

    if not isinstance(event, dict) or not is_sound(event, _EVENT) or event.get("ph") not in list(_TIMES):
        return False
    return is_sound(event, _TIMES[event["ph"]]) and is_sound(event["args"], _ARGS.get(event.get("cat"), {}))
