"""TorchProcessGroup: a group of torch.distributed whose collectives are those of a bagua ProcessGroup.

The method names are those that torch calls: its Python API on the object itself, its C++ (DDP's reducer, functional
collectives) through the trampolines of torch's PyProcessGroup. Newer torch has second names for some of them; both are
here. Ranks are ranks of the group. An operation that torch will wait for at once runs on the calling thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..distributed.process_group import ProcessGroup, Work
from ..errors import InvalidArgument
from .carrier import as_carrier, check_apart, concatenate, copy_out, one
from .compiling import leave_to_python
from .levels import Levels
from .operations import divide_integers, operation
from .work import TorchWork

__all__ = ["TorchProcessGroup"]

_CPU = torch.device("cpu")
# What a call without options means to torch; never changed.
_ALLREDUCE = c10d.AllreduceOptions()
_ALLREDUCE_COALESCED = c10d.AllreduceCoalescedOptions()
_REDUCE = c10d.ReduceOptions()
_REDUCE_SCATTER = c10d.ReduceScatterOptions()
_BROADCAST = c10d.BroadcastOptions()
_ALLGATHER = c10d.AllgatherOptions()
_GATHER = c10d.GatherOptions()
_SCATTER = c10d.ScatterOptions()
_ALLTOALL = c10d.AllToAllOptions()
_BARRIER = c10d.BarrierOptions()


def _is_blocking(opts) -> bool:
    """Whether torch waits for the operation as soon as it has been started."""
    if opts.timeout.total_seconds() >= 0:
        raise InvalidArgument(
            f"a timeout of {opts.timeout} for one operation is not possible with the backend 'bagua'; give the group "
            "its timeout when it is made, or wait with one"
        )
    return not opts.asyncOp


@leave_to_python
class TorchProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed with the backend "bagua"; made by init_process_group and new_group, not by hand.

    Args:
        group: the group of bagua that does the work; CPU tensors.
        store: torch's store of this group.
        name: torch's name of this group.
        on_close: called once with this object when it was shut down.
    """

    def __init__(
        self, group: ProcessGroup, store: dist.Store, name: str, on_close: Callable[[TorchProcessGroup], None]
    ):
        super().__init__(group.rank, group.size)
        self.levels = Levels(group)
        # DDP.join gives C++ the Work of a one-element all_reduce and drops it. C++ keeps its own half, but the one that
        # waits is ours, and without it that one waits for ever. torch does not tell when C++ lets go: it does so in the
        # backward of the same forward, or in the next forward, so the last ones are kept, which takes a few kilobytes:
        # theirs is a tensor of its own, no view of others.
        self._kept: deque[TorchWork] = deque(maxlen=256)
        self._store = store
        self._torch_name = name
        self._description = ""
        self._on_close: Callable[[TorchProcessGroup], None] | None = on_close

    @property
    def group(self) -> ProcessGroup:
        """The group of bagua that runs collectives, for calls that torch.distributed does not have (a codec).

        As given; in a callback of a future, the group of what callbacks start (levels.py).
        """
        return self.levels.current().group

    # ---- what torch asks about a group

    def getBackendName(self) -> str:
        return "bagua"

    def getGroupName(self) -> str:
        return self._torch_name

    def setGroupName(self, name: str) -> None:
        self._torch_name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def get_group_store(self) -> dist.Store:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> object:
        """Where torch asks for abilities of a backend: the group itself; for other devices there is none."""
        return self if device.type == "cpu" else super()._get_backend(device)

    get_backend = _get_backend
    supports_coalescing = supports_splitting = supports_time_estimate = supports_reconfigure = supports_window = False

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Another deadline for the operations from now on."""
        self.levels.set_timeout(timeout)

    def shutdown(self, deadline: float | None = None) -> None:
        """End the group; pending operations fail with Aborted. Callbacks have until `deadline`. Idempotent."""
        on_close, self._on_close = self._on_close, None
        self.levels.close(deadline)
        if on_close is not None:
            on_close(self)

    abort = shutdown

    # ---- reductions

    @operation("all_reduce", 0)
    def allreduce(self, tensors: list[torch.Tensor], opts: c10d.AllreduceOptions = _ALLREDUCE) -> TorchWork:
        tensor = one(tensors, "tensors")
        blocking = _is_blocking(opts)
        work = TorchWork([self._all_reduce(tensor, opts.reduceOp.op, blocking)], [tensor])
        if not blocking and tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.element_size():
            self._kept.append(work)
        return work

    @operation("all_reduce", 0)
    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: c10d.AllreduceCoalescedOptions = _ALLREDUCE_COALESCED
    ) -> TorchWork:
        op, blocking = opts.reduceOp.op, _is_blocking(opts)
        check_apart([[tensor] for tensor in tensors])
        return TorchWork([self._all_reduce(tensor, op, blocking) for tensor in tensors], list(tensors))

    def _all_reduce(self, tensor: torch.Tensor, op, blocking: bool) -> Work:
        group = self.group
        op, finish = divide_integers(op, tensor, group)
        work = group.all_reduce(tensor, op, blocking=blocking)
        if finish is not None:
            work.finish_with(finish)
        return work

    @operation("reduce", 0)
    def reduce(self, tensors: list[torch.Tensor], opts: c10d.ReduceOptions = _REDUCE) -> TorchWork:
        tensor = one(tensors, "tensors")
        op, finish = divide_integers(opts.reduceOp.op, tensor, self.group)
        work = self.group.reduce(tensor, opts.rootRank, op, blocking=_is_blocking(opts))
        if finish is not None and self.group.rank == opts.rootRank:
            work.finish_with(finish)
        return TorchWork([work], [tensor])

    @operation("reduce_scatter", 1)
    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        output, parts = one(outputs, "output_tensors"), one(inputs, "input_tensors")
        self._check_parts(parts, output, "input_list", "output")
        return self._reduce_scatter([output], [concatenate(parts)], opts)

    @operation("reduce_scatter", 1)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> TorchWork:
        return self._reduce_scatter([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @operation("reduce_scatter", 1)
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> TorchWork:
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs, inputs, opts) -> TorchWork:
        op, blocking = opts.reduceOp.op, _is_blocking(opts)
        check_apart([[output] for output in outputs], inputs)
        works = []
        for output, input in zip(outputs, inputs, strict=True):
            reduced_by, finish = divide_integers(op, output, self.group)
            works.append(self.group.reduce_scatter(output, input, reduced_by, blocking=blocking))
            if finish is not None:
                works[-1].finish_with(finish)
        return TorchWork(works, list(outputs))

    # ---- movements, of any type

    @operation("broadcast", 0)
    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions = _BROADCAST) -> TorchWork:
        tensor = one(tensors, "tensors")
        return TorchWork(
            [self.group.broadcast(as_carrier(tensor), opts.rootRank, blocking=_is_blocking(opts))], [tensor]
        )

    @operation("all_gather", 1)
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._allgather([one(outputs, "output_tensors")], [one(inputs, "input_tensors")], opts)

    @operation("all_gather", 1)
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        """outputs[r][i] <- inputs[i] of rank r."""
        self._check_count(outputs, "output_tensor_lists")
        return self._allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def _allgather(self, outputs, inputs, opts) -> TorchWork:
        """outputs[i][r] <- inputs[i] of rank r."""
        blocking = _is_blocking(opts)
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(parts, tensor, "tensor_list", "tensor")
        check_apart(outputs, inputs, "tensor_list")
        works, results = [], []
        for parts, tensor in zip(outputs, inputs, strict=True):
            gathered = self._room_for_all(tensor)
            work = self.group.all_gather(gathered, as_carrier(tensor), blocking=blocking)
            work.finish_with(copy_out(gathered, parts))
            works.append(work)
            results += parts
        return TorchWork(works, results)

    def _room_for_all(self, tensor: torch.Tensor) -> torch.Tensor:
        carrier = as_carrier(tensor)
        return torch.empty(self.group.size * carrier.numel(), dtype=carrier.dtype)

    @operation("all_gather", 1)
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._all_gather_single([output], [input], opts)

    _allgather_base = all_gather_single

    @operation("all_gather", 1)
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._all_gather_single(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, outputs, inputs, opts) -> TorchWork:
        blocking = _is_blocking(opts)
        check_apart([[output] for output in outputs], inputs)
        works = [
            self.group.all_gather(as_carrier(output), as_carrier(input), blocking=blocking)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return TorchWork(works, list(outputs))

    @operation("gather", 1)
    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.GatherOptions = _GATHER
    ) -> TorchWork:
        tensor = one(inputs, "input_tensors")
        if self.group.rank != opts.rootRank:
            return self._gather(None, tensor, [], opts)
        parts = one(outputs, "output_tensors")
        self._check_parts(parts, tensor, "gather_list", "tensor")
        check_apart([parts], name="gather_list")
        gathered = self._room_for_all(tensor)
        return self._gather(gathered, tensor, list(parts), opts, copy_out(gathered, parts))

    @operation("gather", 1)
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: c10d.GatherOptions = _GATHER) -> TorchWork:
        if self.group.rank != opts.rootRank:
            return self._gather(None, input, [], opts)
        return self._gather(as_carrier(output), input, [output], opts)

    gather_into_tensor = gather_single

    def _gather(self, output, input, result, opts, finish: Callable[[], None] | None = None) -> TorchWork:
        work = self.group.gather(output, as_carrier(input), opts.rootRank, blocking=_is_blocking(opts))
        if finish is not None:
            work.finish_with(finish)
        return TorchWork([work], result)

    @operation("scatter", 1)
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: c10d.ScatterOptions = _SCATTER
    ) -> TorchWork:
        output, source = one(outputs, "output_tensors"), None
        if self.group.rank == opts.rootRank:
            parts = one(inputs, "input_tensors")
            self._check_parts(parts, output, "scatter_list", "tensor")
            source = concatenate(as_carrier(part) for part in parts)
        work = self.group.scatter(as_carrier(output), source, opts.rootRank, blocking=_is_blocking(opts))
        return TorchWork([work], [output])

    @operation("all_to_all", 1)
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.AllToAllOptions = _ALLTOALL
    ) -> TorchWork:
        self._check_count(outputs, "output_tensor_list")
        self._check_count(inputs, "input_tensor_list")
        sources, carriers = [as_carrier(tensor) for tensor in inputs], [as_carrier(tensor) for tensor in outputs]
        into = torch.empty(sum(carrier.numel() for carrier in carriers), dtype=carriers[0].dtype)
        output_splits = [carrier.numel() for carrier in carriers]
        input_splits = [source.numel() for source in sources]
        source, finish = concatenate(sources), copy_out(into, carriers)
        check_apart([outputs], name="output_tensor_list")
        work = self.group.all_to_all(into, source, output_splits, input_splits, blocking=_is_blocking(opts))
        work.finish_with(finish)
        return TorchWork([work], list(outputs))

    @operation("all_to_all", 1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: c10d.AllToAllOptions = _ALLTOALL,
    ) -> TorchWork:
        work = self.group.all_to_all(
            as_carrier(output), as_carrier(input), output_splits or None, input_splits or None,
            blocking=_is_blocking(opts),
        )  # fmt: skip
        return TorchWork([work], [output])

    alltoall_base = all_to_all_single

    # ---- between two ranks; a callback's too are matched with the program's, by their order

    @operation("send", 0)
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> TorchWork:
        tensor = one(tensors, "tensors")
        return TorchWork([self.levels.program.group.send(as_carrier(tensor), dst, tag=tag)], [tensor])

    @operation("recv", 0)
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> TorchWork:
        tensor = one(tensors, "tensors")
        return TorchWork([self.levels.program.group.recv(as_carrier(tensor), src, tag=tag)], [tensor], source=src)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> TorchWork:
        raise InvalidArgument("the backend 'bagua' cannot receive from any rank that sends; name the sender with src=")

    @operation("barrier")
    def barrier(self, opts: c10d.BarrierOptions = _BARRIER) -> TorchWork:
        timeout = opts.timeout if opts.timeout.total_seconds() >= 0 else None
        return TorchWork([self.group.barrier(timeout=timeout, blocking=not opts.asyncOp)], [])

    # ---- checks

    def _check_count(self, parts: Sequence[torch.Tensor], name: str) -> None:
        if len(parts) != self.group.size:
            raise InvalidArgument(f"{name} has {len(parts)} tensors; give one for each of the {self.group.size} ranks")

    def _check_parts(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, name: str, other: str) -> None:
        self._check_count(parts, name)
        for rank, part in enumerate(parts):
            if part.shape != tensor.shape or part.dtype != tensor.dtype:
                raise InvalidArgument(
                    f"{name}[{rank}] is {part.dtype} of shape {tuple(part.shape)}, but {other} is {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}; all ranks give tensors of one type and shape"
                )
