"""The ways in which a world of ranks can fail, and the choice of the first cause among several failures."""

from __future__ import annotations

import signal
from typing import NamedTuple, NoReturn


class RankDied(RuntimeError):
    """A rank ended without an exception: killed by a signal, crashed, or os._exit."""

    def __init__(self, rank: int, exit_code: int | None, details: str = "") -> None:
        self.rank = rank
        self.exit_code = exit_code
        how = "did not end" if exit_code is None else f"ended with exit code {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"was killed by {signal_name(-exit_code)}"
        super().__init__(f"rank {rank} {how}" + (f": {details.strip()}" if details.strip() else ""))

    def __reduce__(self) -> tuple[type[RankDied], tuple[int, int | None, str]]:
        return RankDied, (self.rank, self.exit_code, "")


class RankError(RuntimeError):
    """A rank raised an exception that cannot be pickled; its traceback is the cause."""


class WorldTimeout(TimeoutError):
    """Some ranks did not finish in time; the message holds their stacks."""


class RankTraceback(Exception):
    """The cause of a re-raised exception: the rank's traceback, and the failures of other ranks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


class Failure(NamedTuple):
    """A failure of one rank; `at` is on the monotonic clock, which all processes of a host share."""

    at: float
    rank: int
    error: BaseException | None  # None where it could not be pickled
    text: str | None  # traceback


def raise_first(failures: list[Failure], num_ranks: int, stuck: str) -> NoReturn:
    """Raises the first cause. A death comes before any exception, because exceptions of other ranks follow from it."""
    first, *others = sorted(failures, key=lambda failure: (not isinstance(failure.error, RankDied), failure.at))
    text = f"rank {first.rank} of {num_ranks}:\n{first.text}" if first.text else ""
    for other in others:
        text += f"\nafter it, rank {other.rank}: {_last_line(other)}"
    if stuck:
        text += f"\n\nranks that did not finish meanwhile:\n{stuck}"
    error = first.error or RankError(f"rank {first.rank}: {_last_line(first)}")
    raise error from (RankTraceback(text) if text else None)


def signal_name(number: int) -> str:
    """Returns the name of a signal, e.g. "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(failure: Failure) -> str:
    if failure.text is None:
        return str(failure.error)
    exceptions = [line for line in failure.text.splitlines() if line and not line.startswith(" ")]
    return exceptions[-1] if exceptions else "no message"
