"""Before a training forward every buffer becomes equal to rank 0's.

Data path: one message per device, through memory that is kept. Invariants: values arrive bit for bit, as bytes. Buffers
are those that the model has then: they may be replaced, come and go, and change their shape, where they do so on all
ranks alike; ranks whose buffers are not alike raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bagua.data_parallel.failures import ending
from bagua.data_parallel.module_tree import ModuleTree, compiled_from
from bagua.data_parallel.validation import check_buffer, describe_buffer
from bagua.distributed.consensus import agree
from bagua.distributed.job_ranks import reworded
from bagua.distributed.process_group import ProcessGroup, Work
from bagua.errors import BaguaError, InvalidArgument

__all__ = ["BufferBroadcast"]

_ALIGN_BYTES = 16  # a multiple of every item size, so that a slice of bytes can be viewed as any dtype
_REMEDY = "change the buffers of all ranks alike, or pass broadcast_buffers=False"


@dataclass
class _Slot:
    """The place of a buffer in a message; of one that is not there yet there is none."""

    name: str
    described: str
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None
    memory: torch.Tensor | None = None

    def fits(self, buffer: Any) -> bool:
        if self.shape is None or not _is_there(buffer):
            return self.shape is None and not _is_there(buffer)
        return buffer.shape == self.shape and buffer.dtype == self.dtype


class BufferBroadcast:
    """Sends rank 0's buffers to all ranks.

    Before them travels a byte that tells whether rank 0 has other ones than before. If so, nothing is taken over until
    all ranks have agreed on them.

    Args:
        model: the same on all ranks; held weakly.
        group: the ranks.
    """

    def __init__(self, model: torch.nn.Module, group: ProcessGroup) -> None:
        self._model, self._group = weakref.ref(model), group
        self._lay_out()

    def run(self) -> list[Work]:
        """Blocks until every buffer equals rank 0's. Returns the completed messages.

        Raises:
            InvalidArgument: the buffers of the ranks are not alike: on all ranks where rank 0's, or those of all, have
                changed, and the group goes on; otherwise the rank that has changed ends it. Or one has become what
                torch cannot write or read, which ends it, too.
        """
        if self._group.size == 1:
            return []
        works: list[Work] = []
        while (model := self._model()) is not None:
            buffers, change = self._buffers(), None
            if buffers is None:
                change = self._change(model)
                if change is None:  # others, which are like those before
                    self._lay_out()
                    buffers = self._buffers()
            if self._are_any:
                works += self._send(buffers)
                if not self._is_other.item():
                    self._take(buffers, change)
                    break
            elif buffers is not None:
                break
            self._agree(model, change)
        return works

    # ---- what the model has

    def _lay_out(self) -> None:
        """From now on the buffers are those that the model has now."""
        model = self._model()
        assert model is not None
        self._tree = ModuleTree(model)
        self._names = self._tree.buffer_names()
        named = [*_named(model)]
        cpu = torch.device("cpu")
        ends = {cpu: _ALIGN_BYTES}
        places = []
        for _, buffer in named:
            if not _is_there(buffer):
                continue
            begin = ends.get(buffer.device, 0)
            end = begin + buffer.numel() * buffer.element_size()
            places.append((buffer.device, begin, end))
            ends[buffer.device] = end + -end % _ALIGN_BYTES
        self._are_any = bool(places)
        if not places:
            ends[cpu] = 0
        # The CPU's comes first: it tells whether the others hold anything.
        self._memories = {device: self._group.empty(end, torch.uint8, device) for device, end in ends.items()}
        self._is_other = self._memories[cpu][:1]
        self._slots = [_Slot(name, describe_buffer(buffer) if _is_there(buffer) else "none") for name, buffer in named]
        rest = iter(places)
        for slot, (_, buffer) in zip(self._slots, named, strict=True):
            if _is_there(buffer):
                device, begin, end = next(rest)
                slot.shape, slot.dtype = buffer.shape, buffer.dtype
                slot.memory = self._memories[device][begin:end].view(buffer.dtype).view(buffer.shape)

    def _buffers(self) -> list[Any] | None:
        """What is in the slots now; None where the model has others."""
        if not self._tree.has_same_modules() or self._names != self._tree.buffer_names():
            return None
        buffers = self._tree.buffers()
        return buffers if all(map(_Slot.fits, self._slots, buffers)) else None

    def _change(self, model: torch.nn.Module) -> str | None:
        """What to say of the buffers that the model has now, and of those that it had; None where they are alike."""
        before = {slot.name: slot.described for slot in self._slots if slot.memory is not None}
        now = {name: describe_buffer(buffer) for name, buffer in _named(model) if _is_there(buffer)}
        if list(before.items()) == list(now.items()):
            return None
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        what = "the order of the buffers is another one"
        if names:
            had, has = (described.get(names[0], "none") for described in (before, now))
            what = f"buffer {names[0]!r} was {had} when the ranks agreed on it and is now {has}"
        return f"rank {self._group.rank}: {what}, but not on all ranks; {_REMEDY}"

    # ---- messages

    def _send(self, buffers: list[Any] | None) -> list[Work]:
        if self._group.rank == 0:
            self._is_other.fill_(buffers is None)
            if buffers is not None:
                self._copy(buffers, is_sent=True)
        works = []
        for memory in self._memories.values():
            works.append(self._group.broadcast(memory, 0, label="buffers", blocking=True))
            works[-1].wait()
        return works

    def _take(self, buffers: list[Any] | None, change: str | None) -> None:
        if buffers is None:  # rank 0 has those that were agreed on
            raise ending(self._group, InvalidArgument(str(change), rank=self._group.rank))
        if self._group.rank != 0:
            self._copy(buffers, is_sent=False)

    def _copy(self, buffers: Sequence[Any], is_sent: bool) -> None:
        for buffer, slot in zip(buffers, self._slots, strict=True):
            if slot.memory is None:
                continue
            try:
                # .data has its own version counter: a second forward before backward must not look like an
                # in-place change of what the first one saved (BatchNorm saves its statistics).
                source, target = (buffer, slot.memory) if is_sent else (slot.memory, buffer.data)
                target.copy_(source)
            except Exception as error:  # torch's, of a new buffer that is expanded, sparse or the like
                rank = self._group.rank
                told = (
                    f"rank {rank}: buffer {slot.name!r} cannot be {'read' if is_sent else 'written'}: {error}; put a "
                    "plain copy in its place, or pass broadcast_buffers=False"
                )
                raise ending(self._group, InvalidArgument(told, rank=rank)) from error

    def _agree(self, model: torch.nn.Module, change: str | None) -> None:
        """On the buffers that all ranks have now; collective. Where they are not alike nothing changes."""
        try:
            changes = self._group.all_gather_plain(change)
        except BaguaError as error:
            if self._are_any or change is None:
                raise
            raise reworded(error, f"{change}: ") from None  # of whose first buffer the others heard nothing
        if None in changes:
            rank, change = next((rank, change) for rank, change in enumerate(changes) if change is not None)
            raise self._group.job_ranks.told(InvalidArgument(change, rank=rank))

        def prepare() -> tuple[None, dict[str, str]]:
            named = [(name, buffer) for name, buffer in _named(model) if _is_there(buffer)]
            for name, buffer in named:
                check_buffer(name, buffer)
            return None, {f"buffer {name!r}": describe_buffer(buffer) for name, buffer in named}

        agree(self._group, prepare, _REMEDY)
        self._lay_out()


def _is_there(buffer: Any) -> bool:
    """Not if it is registered as None, or of a lazy module before its first forward."""
    return buffer is not None and type(buffer) is not torch.nn.parameter.UninitializedBuffer


def _named(model: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """Full name and value of all buffers, in the order of ModuleTree.buffers."""
    for prefix, module in compiled_from(model).named_modules():
        for key, buffer in module._buffers.items():
            yield f"{prefix}.{key}" if prefix else key, buffer
