"""State that is one rank's alone, such as residuals: a checkpoint of it is loaded by the rank that wrote it.

Beside the data path. Saving on rank 0 and loading everywhere is right for weights, and wrong for such state.
"""

from __future__ import annotations

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument


def writer_of(group: ProcessGroup) -> tuple[int, int]:
    """Returns a checkpoint's entry on its writer: this rank and the number of ranks."""
    return group.rank, group.size


def check_writer(writer: tuple[int, int], group: ProcessGroup, what: str) -> None:
    """Raises InvalidArgument unless ``writer`` is ``writer_of(group)``; ``what`` is what the checkpoint holds."""
    if writer[1] != group.size:
        raise InvalidArgument(
            f"the checkpoint is of {writer[1]} ranks, this group has {group.size}: it holds {what}, which no rank here "
            "can take over; load model and optimizer, and skip model.bagua.load_state_dict"
        )
    if tuple(writer) != writer_of(group):
        raise InvalidArgument(
            f"the checkpoint is of rank {writer[0]} of {writer[1]}, this is rank {group.rank} of {group.size}: it "
            f"holds {what}, so save model.bagua.state_dict() on every rank, and load each rank's own"
        )
