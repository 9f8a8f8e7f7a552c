"""Of a checkpoint that is one rank's alone: whose is it?

Beside the data path. Saving on rank 0 and loading everywhere is a habit that is right for weights, and wrong for what
each rank remembers by itself.
"""

from __future__ import annotations

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument


def place_of(group: ProcessGroup) -> tuple[int, int]:
    """What a checkpoint says about where it was written: this rank and the number of ranks."""
    return group.rank, group.size


def check_place(written: tuple[int, int], group: ProcessGroup, what: str) -> None:
    """Raises InvalidArgument unless ``written`` is ``place_of(group)``; ``what`` is what the checkpoint holds."""
    if written[1] != group.size:
        raise InvalidArgument(
            f"the checkpoint is of {written[1]} ranks, these are {group.size}: it holds {what}, which no rank here can "
            "take over; load model and optimizer, and leave model.bagua.load_state_dict out"
        )
    if tuple(written) != place_of(group):
        raise InvalidArgument(
            f"the checkpoint is of rank {written[0]} of {written[1]}, this is rank {group.rank} of {group.size}: it "
            f"holds {what}, so save model.bagua.state_dict() on every rank, and load each rank's own"
        )
