"""Ranks in errors: the core counts within a group, and who reads an error counts the ranks of the job.

Beside the data path: where an error of a group leaves for the program, `rank` and `ranks` become those of the job,
after which logs and launchers are named, and the message says what its own numbers mean. Where the program hands an
error to a group, that one's or another's, it is counted by that group's ranks again. What has not left a group yet, as
an error that is made for its ranks, counts within the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from bagua.errors import BaguaError, RemoteError

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
        """Returns an error of this group for the program, by ranks of the job; one that has left a group as it is."""
        if error.left_group is not None:
            return error
        if self._is_all or type(error).__module__ != BaguaError.__module__:  # a class of the program's may be any
            error.left_group = (self, None)
            return error
        shown = ", ".join(map(str, self.ranks[:_SHOWN])) + (", ..." if self.ranks[_SHOWN:] else "")
        which = "" if error.rank is None else f"; its rank {error.rank} is rank {self._of_job(error.rank)}"
        translated = type(error)(
            f"{error} (ranks count within the group '{self._group_name}', of ranks {shown} of the job{which})",
            rank=None if error.rank is None else self._of_job(error.rank),
            operation=error.operation,
            bucket=error.bucket,
            ranks=tuple(map(self._of_job, error.ranks)),
        )
        translated.left_group = (self, error)
        translated.__cause__ = error.__cause__
        return translated.with_traceback(error.__traceback__)

    def own(self, error: BaguaError) -> BaguaError:
        """Returns an error by this group's ranks; other ranks are not named, nor the one that passes it on."""
        if error.left_group is None:
            return error
        of, original = error.left_group
        if of is self:
            return original or error
        ranks = tuple(self.ranks.index(rank) for rank in error.ranks if rank in self.ranks)
        kind = _kind_of(error) if error.rank in self.ranks else RemoteError
        return kind(
            f"in group '{of._group_name}': {error}",
            rank=self.ranks.index(error.rank) if error.rank in self.ranks else None,
            operation=error.operation,
            bucket=error.bucket,
            ranks=ranks,
        )

    def _of_job(self, rank: int) -> int:
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else rank


def reworded(error: BaguaError, before: str = "", after: str = "", bucket: str | None = None) -> BaguaError:
    """The same with another message, for the program and for its group."""
    of, original = error.left_group or (None, None)
    if original is not None:
        return of.told(reworded(original, before, after, bucket))
    kind, context = _kind_of(error), {"rank": error.rank, "operation": error.operation, "ranks": error.ranks}
    changed = kind(f"{before}{error}{after}", bucket=bucket or error.bucket, **context)
    changed.left_group = error.left_group
    return changed


def _kind_of(error: BaguaError) -> type[BaguaError]:
    """A class of bagua's own, since others may take other arguments."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == BaguaError.__module__)
