"""What the code of an algorithm raises on one rank ends the training on all ranks at once, with rank and cause.

Beside the data path: around every hook that training calls (``step.py``, ``optimizer_steps.py``), and around a wrap
that can no longer be taken back. The other ranks would wait for this one until their deadline and then know nothing of
the cause.
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
        if group.size > 1:
            told = f"rank {group.rank}: {what} raised {type(error).__name__}: {error}"
            group.poison(error if isinstance(error, BaguaError) else Aborted(told, rank=group.rank))
        raise
