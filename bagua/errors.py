"""The exception tree. The same classes exist in three languages (csrc/common/error.h, rust_core/src/error.rs);
the binding layer translates them one to one.

A message carries the value, what was expected and what to do. `rank` is the rank at fault (None if no rank is),
`ranks` are all of them, `operation` the collective that was running, `bucket` the gradient bucket that it was for.
These attributes hold ranks of the job. The message of a group of some ranks counts within the group, and says so.
"""

from __future__ import annotations

import typing

__all__ = [
    "Aborted",
    "BaguaError",
    "DeadlineExceeded",
    "DeviceError",
    "InternalError",
    "InvalidArgument",
    "RemoteError",
    "TransportError",
]


class BaguaError(Exception):
    """The base of everything that bagua raises on purpose.

    Args:
        message: the value, what was expected, what to do.
        rank: the rank of the job at fault, if there is one.
        operation: the collective or verb that was running, e.g. "all_reduce".
        bucket: label of the bucket that the operation was for, e.g. "bucket 3".
        ranks: all ranks at fault, by default `rank` alone. After processes have died, all ranks that are still
            connected, directly or through others, report the same ones.
    """

    def __init__(
        self,
        message: str = "",
        *,
        rank: int | None = None,
        operation: str | None = None,
        bucket: str | None = None,
        ranks: tuple[int, ...] | None = None,
    ):
        super().__init__(message)
        self.rank = rank
        self.ranks = ranks if ranks is not None else () if rank is None else (rank,)
        self.operation = operation
        self.bucket = bucket
        # The group whose call raised this error, and the error as that group's ranks would number it, where that is
        # a different one (distributed/job_ranks.py).
        self.left_group: tuple[typing.Any, BaguaError | None] | None = None

    @property
    def peer(self) -> int | None:
        """The rank at fault: the documented attribute of TransportError."""
        return self.rank

    def __reduce__(self):
        return (
            _rebuild,
            (type(self), str(self), self.rank, self.operation, self.bucket, self.ranks),
            {"left_group": self.left_group},
        )


def _rebuild(cls, message, rank, operation, bucket, ranks):
    return cls(message, rank=rank, operation=operation, bucket=bucket, ranks=ranks)


class InvalidArgument(BaguaError, ValueError):
    """An argument or a variable is missing or wrong, or ranks disagree about it. Nothing was changed."""


class TransportError(BaguaError, ConnectionError):
    """A connection or a shared segment failed, mostly because the process of `peer` died. Also raised when this
    process has no file descriptor, thread or memory left."""


class DeadlineExceeded(BaguaError, TimeoutError):
    """A rank did not do its part in time; the message says which one and what it is doing instead."""


class Aborted(BaguaError):
    """The group was destroyed while the operation was pending."""


class RemoteError(BaguaError):
    """Another rank failed first; the message is its cause."""


class DeviceError(BaguaError, RuntimeError):
    """A device is out of memory, or reports a failure."""


class InternalError(BaguaError, RuntimeError):
    """A bug in bagua. Please report it with the message."""
