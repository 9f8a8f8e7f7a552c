"""Agreement: a step that all ranks complete with equal results, or that raises on all of them.

Beside the data path: with_bagua, loading of state and federated programs use it before they change anything. Invariant:
if the ranks disagree, or one of them fails, every rank raises and none waits for another. Only digests travel unless
they differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import BaguaError, InvalidArgument, RemoteError

__all__ = ["agree"]

Prepared = TypeVar("Prepared")


def agree(group: ProcessGroup, prepare: Callable[[], tuple[Prepared, dict[str, Any]]], remedy: str) -> Prepared:
    """Runs ``prepare`` on every rank, and compares what it describes; collective.

    Args:
        prepare: returns a value, and a description of it that must be equal on all ranks: plain data by section.
        remedy: the end of the message where descriptions differ, such as "pass the same model on all ranks".

    Returns:
        The value that ``prepare`` returned.

    Raises:
        InvalidArgument: on every rank, naming the first difference with both sides, or what another
            rank's ``prepare`` raised. The rank whose ``prepare`` raised sees its own exception.
        RemoteError: the same where that was an error of bagua's which is no mistake in what was passed.
    """
    prepared, described, failure = None, {}, None
    try:
        prepared, described = prepare()
    except Exception as error:  # the others hear of it first; raised below
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    is_mistake = not isinstance(failure, BaguaError) or isinstance(failure, InvalidArgument)
    digest = hashlib.sha256(repr(list(described.items())).encode()).hexdigest()
    everyone = group.all_gather_plain((text, is_mistake, digest))
    if failure is not None:
        raise group.job_ranks.told(failure) if isinstance(failure, BaguaError) else failure
    for rank, (text, is_mistake, _) in enumerate(everyone):
        if text is not None:
            kind = InvalidArgument if is_mistake else RemoteError
            raise group.job_ranks.told(kind(f"rank {rank} raised {text}", rank=rank))
    if len({digest for _, _, digest in everyone}) > 1:
        texts = {section: (repr(value), str(value)) for section, value in described.items()}
        raise group.job_ranks.told(_disagreement(group.all_gather_plain(texts), remedy))
    return prepared


# Each section has the text that is compared, and the text that a message shows where that differs, too.
_Texts = dict[str, tuple[str, str]]


def _disagreement(everyone: Sequence[_Texts], remedy: str) -> InvalidArgument:
    for rank, other in enumerate(everyone):
        difference = _first_difference(everyone[0], other)
        if difference is not None:
            section, ours, theirs = difference
            return InvalidArgument(
                f"the ranks disagree about {section}: rank 0 has {ours}, rank {rank} has {theirs}; {remedy}",
                rank=rank,
            )
    raise AssertionError("digests differ, descriptions do not")


def _first_difference(original: _Texts, other: _Texts) -> tuple[str, str, str] | None:
    none = ("", "none")
    for section in [*original, *other]:
        (ours, shown), (theirs, shown_there) = original.get(section, none), other.get(section, none)
        if ours != theirs:
            return (section, shown, shown_there) if shown != shown_there else (section, ours, theirs)
    if list(original) != list(other):  # equal entries in another order: parameters would be matched wrongly
        index = next(i for i, (ours, theirs) in enumerate(zip(original, other, strict=True)) if ours != theirs)
        return f"the order of registration, entry {index}", list(original)[index], list(other)[index]
    return None
