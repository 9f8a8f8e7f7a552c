"""HookTimeline: the records of a hook of torch's DDP or FSDP2, under the calls that ``model.bagua`` has for a timeline.

Beside the data path: hook -> **here** -> recorder.py. Torch's hooks report neither a forward nor the beginning of a
backward, so the records have no computation, and a step begins with its first reduction.
"""

from __future__ import annotations

from pathlib import Path

from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import InvalidArgument
from bagua.profiler.recorder import Recorder
from bagua.profiler.timeline import Timeline, save_all, snapshot

__all__ = ["HookTimeline"]


class HookTimeline:
    """The base of a hook, which records each operation with ``_record``, and steps with ``_recorder.add_step``.

    Args:
        name: of the hook, in the place of an algorithm's.
    """

    def __init__(self, name: str) -> None:
        self._name, self._recorder = name, Recorder()
        self._group: ProcessGroup | None = None  # that train together; None: they are not connected yet
        self._groups: list[ProcessGroup] = []
        self._sent: dict[str, str] = {}  # by label

    def _record(self, work: Work, group: ProcessGroup, codec: str) -> None:
        if group not in self._groups:
            self._groups.append(group)
        self._sent[work.label] = codec or "full precision"
        self._recorder.add_work(group.name, work.core, work.label, codec=codec)

    def _recorded_group(self) -> ProcessGroup:
        if self._group is None:
            raise InvalidArgument("the timeline of a hook before the first backward: there are no records yet")
        return self._group

    def timeline(self, parts: bool = True) -> Timeline:
        """Returns what happened when on this rank, as ``model.bagua.timeline()``; local, after a failure too.

        Args:
            parts: False: operations as a whole only, without encode, wire, decode and reduce.

        Raises:
            InvalidArgument: the ranks are not connected before the first backward.
        """
        return snapshot(self._recorder, self._recorded_group(), self._groups, self._name, self._sent, parts)

    def save_timeline(self, folder: str | Path) -> Path:
        """Writes this rank's trace to ``folder``/rank<rank>.json, as ``model.bagua.save_timeline``; collective.

        Returns:
            The path of this rank's file.

        Raises:
            InvalidArgument: on every rank, where one cannot write its file; or before the first backward.
            BaguaError: the group has failed, or was destroyed; ``timeline().save(path)`` works then too.
        """
        return save_all(self._recorded_group(), folder, self.timeline, "timeline().save(path)")
