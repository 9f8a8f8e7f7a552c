"""Ranks in errors: the core counts within a group, and who reads an error counts the ranks of the job.

Beside the data path: where an error of a group leaves for the program, `rank` and `ranks` become those of the job,
after which logs and launchers are named, and the message says what its own numbers mean. Where the program hands an
error back to a group, it is the group's again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bagua.errors import BaguaError

_Error = TypeVar("_Error", bound=BaguaError)
_SHOWN = 16


class JobRanks:
    """The ranks of one group.

    Args:
        group_name: for messages.
        ranks: of the job, by rank of the group.
    """

    __slots__ = ("_group_name", "_is_all", "ranks")

    def __init__(self, group_name: str, ranks: Sequence[int]) -> None:
        self.ranks, self._group_name = list(ranks), group_name
        self._is_all = self.ranks == list(range(len(self.ranks)))

    def told(self, error: _Error) -> _Error:
        """For the program: an error that counts within the group, by ranks of the job; any other as it is."""
        if self._is_all or error.in_group is not None:
            return error
        shown = ", ".join(map(str, self.ranks[:_SHOWN])) + (", ..." if self.ranks[_SHOWN:] else "")
        which = "" if error.rank is None else f"; its rank {error.rank} is rank {self.ranks[error.rank]}"
        told = type(error)(
            f"{error} (ranks count within the group '{self._group_name}', of ranks {shown} of the job{which})",
            rank=None if error.rank is None else self.ranks[error.rank],
            operation=error.operation,
            bucket=error.bucket,
            ranks=tuple(map(self.ranks.__getitem__, error.ranks)),
        )
        told.in_group = error
        told.__cause__ = error.__cause__
        return told.with_traceback(error.__traceback__)


def in_group(error: BaguaError) -> BaguaError:
    """As the group that it is of counts."""
    return error if error.in_group is None else error.in_group
