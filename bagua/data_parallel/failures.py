"""What fails on one rank in training ends it on all ranks at once, with rank and cause.

Beside the data path: around every hook of an algorithm that training calls (``step.py``, ``optimizer_steps.py``), and
around a wrap that can no longer be taken back; where a step is refused that the other ranks may go on with. They would
wait for this one until their deadline and then know nothing of the cause.
"""

from __future__ import annotations

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import Aborted, BaguaError


class fatal:
    """A context manager that poisons ``group`` with what is raised inside; cheap, as each bucket passes by one.

    Args:
        what: who raised it, such as "after_backward".
        algorithm_name: whose hook ``what`` is, if it is one.
    """

    __slots__ = ("_algorithm_name", "_group", "_what")

    def __init__(self, group: ProcessGroup, what: str, algorithm_name: str | None = None) -> None:
        self._group, self._what, self._algorithm_name = group, what, algorithm_name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            rank, of = (
                self._group.rank,
                "" if self._algorithm_name is None else f" of algorithm {self._algorithm_name!r}",
            )
            told = f"rank {rank}: {self._what}{of} raised {type(error).__name__}: {error}"
            ending(self._group, error if isinstance(error, BaguaError) else Aborted(told, rank=rank))


def ending(group: ProcessGroup, error: BaguaError) -> BaguaError:
    """Poisons ``group`` with ``error``, whose ranks are the group's, and returns it to be raised.

    A single rank has nobody to tell.
    """
    if group.size > 1:
        group.poison(error)
    return group.job_ranks.told(error)
