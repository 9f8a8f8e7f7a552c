"""What fails on one rank in training ends it on all ranks at once, with rank and cause.

Beside the data path: around every hook of an algorithm that training calls (``step.py``, ``optimizer_steps.py``), and
around a wrap that can no longer be taken back; where a step is refused that the other ranks may go on with. They would
wait for this one until their deadline and then know nothing of the cause.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bagua.errors import Aborted, BaguaError
from bagua.group import ProcessGroup


@contextlib.contextmanager
def fatal(group: ProcessGroup, what: str) -> Iterator[None]:
    """Poisons ``group`` with what is raised inside.

    Args:
        what: who raised it, such as "after_backward of algorithm 'bytegrad'".
    """
    try:
        yield
    except Exception as error:
        told = f"rank {group.rank}: {what} raised {type(error).__name__}: {error}"
        ending(group, error if isinstance(error, BaguaError) else Aborted(told, rank=group.rank))
        raise


def in_hook(group: ProcessGroup, hook: str, algorithm_name: str) -> contextlib.AbstractContextManager[None]:
    """``fatal`` around an algorithm's own code in training."""
    return fatal(group, f"{hook} of algorithm {algorithm_name!r}")


def ending(group: ProcessGroup, error: BaguaError) -> BaguaError:
    """Poisons ``group`` with ``error``, which is returned to be raised; a single rank has nobody to tell."""
    if group.size > 1:
        group.poison(error)
    return error
