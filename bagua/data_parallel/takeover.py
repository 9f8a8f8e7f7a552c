"""What takes the place of a step that trains: the next wrap's, or the one that a checkpoint goes on with.

Beside the data path. Invariant: it is prepared beside the one that trains, in memory of its own and without changing
anything of it, until all ranks have prepared theirs (consensus.py); so whatever is refused on any rank, all train on as
before. What follows can no longer be refused: an exception ends the group.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bagua.data_parallel.algorithm_state import ParameterStates
from bagua.data_parallel.loss_scale import LossScale
from bagua.data_parallel.step import Step
from bagua.data_parallel.unused_parameters import UnusedParameters
from bagua.distributed.process_group import ProcessGroup


@contextlib.contextmanager
def closing_if_refused(group: ProcessGroup) -> Iterator[None]:
    """Where something is refused inside, closes the groups that an algorithm has made of ``group`` by then."""
    before = list(group.subgroups)
    try:
        yield
    except BaseException:
        for child in [child for child in group.subgroups if child not in before]:
            child.before_close.clear()  # it would take part in what has never begun
            child.close()
        raise


def begin(step: Step) -> None:
    """The ranks are equal and train on from here; collective."""
    step.algorithm.begin(step.storage.buckets)
    # With rank 0's optimizer states the others may have come to its stage.
    if any(step.group.all_gather_plain(step.enters_stage())):
        step.enter_stage()


def begin_gradients(earlier: Step | None, step: Step) -> None:
    """``step`` takes the gradients that are there, which may be each rank's own."""
    if earlier is not None:
        move_gradients(earlier, step)
    step.optimizer_steps.begin_after(None if earlier is None else earlier.optimizer_steps)


def move_gradients(earlier: Step, step: Step) -> None:
    """Those that are in the buckets of ``earlier`` move to the buckets of ``step``, or out of both."""
    if step.sends_gradients:
        earlier.storage.hand_over_gradients(step.storage)
    earlier.storage.release_gradients()


def successor(
    step: Step,
    num_steps: int,
    layout: Sequence[int],
    order: Sequence[int] | None,
    parameters: Mapping[str, Any],
    loss_scale: float,
) -> Step:
    """A step that goes on where a checkpoint was taken, with its layout, ready order, states of parameters and scale.

    Its algorithm is a copy, which is to load its state; ``enter_stage`` and ``become`` are to follow.
    """
    new = copy.copy(step)
    new.algorithm = copy.copy(step.algorithm)
    new.states = ParameterStates(new.algorithm.parameter_state(), step.group)
    new.states.load_state_dict(parameters, new.algorithm.name)
    new.loss_scale = LossScale(step.loss_scale.is_followed, loss_scale)
    new.optimizer_steps = step.optimizer_steps.draft(new.states)
    new.storage = step.storage.anew(layout)
    if step.unused is not None:
        new.unused = UnusedParameters(new.storage, step.group)
        new.unused.is_used = step.unused.is_used
    new.num_steps = num_steps
    new.new_machine(order)
    return new


def become(step: Step, new: Step) -> None:
    """All of ``new`` takes the place of what is in ``step``, which the hooks know; so do the algorithm's groups."""
    move_gradients(step, new)
    algorithm, optimizer_steps = step.algorithm, step.optimizer_steps
    vars(algorithm).update(vars(new.algorithm))
    optimizer_steps.become(new.optimizer_steps)
    vars(step).update({**vars(new), "algorithm": algorithm, "optimizer_steps": optimizer_steps})
