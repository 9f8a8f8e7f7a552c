"""TorchProcessGroup: a group of torch.distributed whose collectives are those of a bagua ProcessGroup.

torch calls the methods by these names: its Python API on the object itself, its C++ (DDP's reducer, functional
collectives) through the trampolines of torch's PyProcessGroup. Newer torch has second names for some; both are here.
Ranks are ranks of the group. An operation that torch waits for at once runs on the calling thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ..distributed.devices import (
    common_device,
    keep_for_current_stream,
    supported_types,
    wait_for_current_stream,
)
from ..distributed.process_group import ProcessGroup, ReduceOp, Work
from ..errors import InvalidArgument
from .callback_levels import Levels
from .compiling import leave_to_python
from .profiling import Span
from .tensors import as_real, as_wire_dtype, check_disjoint, concatenate, copy_out, only_element
from .work import TorchWork

__all__ = ["TorchProcessGroup"]

# torch's defaults of the options; never changed.
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
    """Returns True if torch waits for the operation as soon as it has been started."""
    if opts.timeout.total_seconds() >= 0:
        raise InvalidArgument(
            f"a timeout of {opts.timeout} for one operation is not possible with the backend 'bagua'; pass the timeout "
            "when the group is made, or to wait()"
        )
    return not opts.asyncOp


def _operation(event: str, inputs: int | None = None) -> Callable[[Callable[..., TorchWork]], Callable[..., TorchWork]]:
    """Decorates a method that starts an operation: gives its work a level, and an event in torch's profiler.

    Args:
        event: the event's name in torch's profiler, after "bagua:".
        inputs: the position of the argument with the input tensors.
    """

    def decorate(start: Callable[..., TorchWork]) -> Callable[..., TorchWork]:
        @functools.wraps(start)
        def method(self, *arguments, **options) -> TorchWork:
            level = self.levels.current()
            if not profiler._is_profiler_enabled:
                work = start(self, *arguments, **options)
                work.level = level
                return work
            span = Span(f"bagua:{event}", [] if inputs is None else list(_tensors(arguments[inputs])))
            try:
                work = start(self, *arguments, **options)
            except BaseException:
                span.end()
                raise
            work.level = level
            work.span = span
            span.end_after(work.last, level)
            return work

        return method

    return decorate


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for part in value:
            yield from _tensors(part)


@leave_to_python
class TorchProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed with the backend "bagua", made by its init_process_group and new_group.

    Args:
        group: the group of bagua that does the work.
        store: torch's store of this group.
        name: torch's name of this group.
        on_close: called once with this object after shutdown.
    """

    def __init__(
        self, group: ProcessGroup, store: dist.Store, name: str, on_close: Callable[[TorchProcessGroup], None]
    ):
        super().__init__(group.rank, group.size)
        self.levels = Levels(group)
        self._store = store
        self._torch_name = name
        self._description = ""
        self._on_close: Callable[[TorchProcessGroup], None] | None = on_close

    @property
    def group(self) -> ProcessGroup:
        """The group of bagua that runs collectives, for features that torch.distributed does not have (codecs).

        In a callback of a future it is the group of the callbacks' level (callback_levels.py).
        """
        return self.levels.current().group

    # ---- properties of a group that torch queries

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
        # Because the CPU is included, torch sends objects as CPU tensors.
        return [torch.device(name) for name in supported_types()]

    def _get_backend(self, device: torch.device) -> object:
        """Returns the backend whose abilities torch queries: the group itself, none for unsupported devices."""
        return self if torch.device(device).type in supported_types() else super()._get_backend(device)

    get_backend = _get_backend
    supports_coalescing = supports_splitting = supports_time_estimate = supports_reconfigure = supports_window = False

    def supports_tensor_alloc(self, _device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of operations that are started from now on."""
        self.levels.set_timeout(timeout)

    def shutdown(self, deadline: float | None = None) -> None:
        """Ends the group; pending operations fail with Aborted. Callbacks may run until `deadline`. Idempotent."""
        on_close, self._on_close = self._on_close, None
        self.levels.close(deadline)
        if on_close is not None:
            on_close(self)

    abort = shutdown

    # ---- reductions

    @_operation("all_reduce", 0)
    def allreduce(self, tensors: list[torch.Tensor], opts: c10d.AllreduceOptions = _ALLREDUCE) -> TorchWork:
        tensor = only_element(tensors, "tensors")
        return TorchWork([self._all_reduce(tensor, opts.reduceOp.op, _is_blocking(opts))], [tensor])

    @_operation("all_reduce", 0)
    def allreduce_coalesced(
        self, tensors: list[torch.Tensor], opts: c10d.AllreduceCoalescedOptions = _ALLREDUCE_COALESCED
    ) -> TorchWork:
        op, blocking = opts.reduceOp.op, _is_blocking(opts)
        check_disjoint([[tensor] for tensor in tensors])
        return TorchWork([self._all_reduce(tensor, op, blocking) for tensor in tensors], list(tensors))

    def _all_reduce(self, tensor: torch.Tensor, op, blocking: bool) -> Work:
        group = self.group
        op, finish = _nccl_reduction(op, tensor, group)
        work = group.all_reduce(as_real(tensor, op), op, blocking=blocking)
        if finish is not None:
            work.finish_with(finish)
        return work

    @_operation("reduce", 0)
    def reduce(self, tensors: list[torch.Tensor], opts: c10d.ReduceOptions = _REDUCE) -> TorchWork:
        tensor = only_element(tensors, "tensors")
        op, finish = _nccl_reduction(opts.reduceOp.op, tensor, self.group)
        work = self.group.reduce(as_real(tensor, op), opts.rootRank, op, blocking=_is_blocking(opts))
        if finish is not None and self.group.rank == opts.rootRank:
            work.finish_with(finish)
        return TorchWork([work], [tensor])

    @_operation("reduce_scatter", 1)
    def reduce_scatter(
        self,
        outputs: list[torch.Tensor],
        inputs: list[list[torch.Tensor]],
        opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER,
    ) -> TorchWork:
        output, parts = only_element(outputs, "output_tensors"), only_element(inputs, "input_tensors")
        self._check_parts(parts, output, "input_list", "output")
        return self._reduce_scatter([output], [concatenate(parts)], opts)

    @_operation("reduce_scatter", 1)
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> TorchWork:
        return self._reduce_scatter([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    @_operation("reduce_scatter", 1)
    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.ReduceScatterOptions = _REDUCE_SCATTER
    ) -> TorchWork:
        return self._reduce_scatter(outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, outputs, inputs, opts) -> TorchWork:
        op, blocking = opts.reduceOp.op, _is_blocking(opts)
        check_disjoint([[output] for output in outputs], inputs)
        works = []
        for output, input in zip(outputs, inputs, strict=True):
            reduced_by, finish = _nccl_reduction(op, output, self.group)
            parts = as_real(output, op), as_real(input, op)
            works.append(self.group.reduce_scatter(*parts, reduced_by, blocking=blocking))
            if finish is not None:
                works[-1].finish_with(finish)
        return TorchWork(works, list(outputs))

    # ---- data movement, of any dtype

    @_operation("broadcast", 0)
    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions = _BROADCAST) -> TorchWork:
        tensor = only_element(tensors, "tensors")
        return TorchWork(
            [self.group.broadcast(as_wire_dtype(tensor), opts.rootRank, blocking=_is_blocking(opts))], [tensor]
        )

    @_operation("all_gather", 1)
    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._allgather([only_element(outputs, "output_tensors")], [only_element(inputs, "input_tensors")], opts)

    @_operation("all_gather", 1)
    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        """Gathers inputs[i] of rank r into outputs[r][i]."""
        self._check_count(outputs, "output_tensor_lists")
        return self._allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def _allgather(self, outputs, inputs, opts) -> TorchWork:
        """Gathers inputs[i] of rank r into outputs[i][r]."""
        blocking = _is_blocking(opts)
        for parts, tensor in zip(outputs, inputs, strict=True):
            self._check_parts(parts, tensor, "tensor_list", "tensor")
        check_disjoint(outputs, inputs, "tensor_list")
        works, results = [], []
        for parts, tensor in zip(outputs, inputs, strict=True):
            gathered = self._room_for_all(tensor)
            work = self.group.all_gather(gathered, as_wire_dtype(tensor), blocking=blocking)
            work.finish_with(copy_out(gathered, parts))
            works.append(work)
            results += parts
        return TorchWork(works, results)

    def _room_for_all(self, tensor: torch.Tensor) -> torch.Tensor:
        view = as_wire_dtype(tensor)
        return torch.empty(self.group.size * view.numel(), dtype=view.dtype, device=view.device)

    @_operation("all_gather", 1)
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._all_gather_single([output], [input], opts)

    _allgather_base = all_gather_single

    @_operation("all_gather", 1)
    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.AllgatherOptions = _ALLGATHER
    ) -> TorchWork:
        return self._all_gather_single(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _all_gather_single(self, outputs, inputs, opts) -> TorchWork:
        blocking = _is_blocking(opts)
        check_disjoint([[output] for output in outputs], inputs)
        works = [
            self.group.all_gather(as_wire_dtype(output), as_wire_dtype(input), blocking=blocking)
            for output, input in zip(outputs, inputs, strict=True)
        ]
        return TorchWork(works, list(outputs))

    @_operation("gather", 1)
    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: c10d.GatherOptions = _GATHER
    ) -> TorchWork:
        tensor = only_element(inputs, "input_tensors")
        if self.group.rank != opts.rootRank:
            return self._gather(None, tensor, [], opts)
        parts = only_element(outputs, "output_tensors")
        self._check_parts(parts, tensor, "gather_list", "tensor")
        check_disjoint([parts], name="gather_list")
        gathered = self._room_for_all(tensor)
        return self._gather(gathered, tensor, list(parts), opts, copy_out(gathered, parts))

    @_operation("gather", 1)
    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: c10d.GatherOptions = _GATHER) -> TorchWork:
        if self.group.rank != opts.rootRank:
            return self._gather(None, input, [], opts)
        return self._gather(as_wire_dtype(output), input, [output], opts)

    gather_into_tensor = gather_single

    def _gather(self, output, input, result, opts, finish: Callable[[], None] | None = None) -> TorchWork:
        work = self.group.gather(output, as_wire_dtype(input), opts.rootRank, blocking=_is_blocking(opts))
        if finish is not None:
            work.finish_with(finish)
        return TorchWork([work], result)

    @_operation("scatter", 1)
    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: c10d.ScatterOptions = _SCATTER
    ) -> TorchWork:
        output, source = only_element(outputs, "output_tensors"), None
        if self.group.rank == opts.rootRank:
            parts = only_element(inputs, "input_tensors")
            self._check_parts(parts, output, "scatter_list", "tensor")
            source = concatenate(as_wire_dtype(part) for part in parts)
        work = self.group.scatter(as_wire_dtype(output), source, opts.rootRank, blocking=_is_blocking(opts))
        return TorchWork([work], [output])

    @_operation("all_to_all", 1)
    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: c10d.AllToAllOptions = _ALLTOALL
    ) -> TorchWork:
        self._check_count(outputs, "output_tensor_list")
        self._check_count(inputs, "input_tensor_list")
        sources, views = [as_wire_dtype(tensor) for tensor in inputs], [as_wire_dtype(tensor) for tensor in outputs]
        into = torch.empty(sum(view.numel() for view in views), dtype=views[0].dtype, device=views[0].device)
        output_splits = [view.numel() for view in views]
        input_splits = [source.numel() for source in sources]
        source, finish = concatenate(sources), copy_out(into, views)
        check_disjoint([outputs], name="output_tensor_list")
        work = self.group.all_to_all(into, source, output_splits, input_splits, blocking=_is_blocking(opts))
        work.finish_with(finish)
        return TorchWork([work], list(outputs))

    @_operation("all_to_all", 1)
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: c10d.AllToAllOptions = _ALLTOALL,
    ) -> TorchWork:
        work = self.group.all_to_all(
            as_wire_dtype(output), as_wire_dtype(input), output_splits or None, input_splits or None,
            blocking=_is_blocking(opts),
        )  # fmt: skip
        return TorchWork([work], [output])

    alltoall_base = all_to_all_single

    # ---- between two ranks; callbacks use the program's group here too, and messages are matched by their order

    @_operation("send", 0)
    def send(self, tensors: list[torch.Tensor], dst: int, tag: int = 0) -> TorchWork:
        tensor = only_element(tensors, "tensors")
        return TorchWork([self.levels.program.group.send(as_wire_dtype(tensor), dst, tag=tag)], [tensor])

    @_operation("recv", 0)
    def recv(self, tensors: list[torch.Tensor], src: int, tag: int = 0) -> TorchWork:
        tensor = only_element(tensors, "tensors")
        return TorchWork([self.levels.program.group.recv(as_wire_dtype(tensor), src, tag=tag)], [tensor], source=src)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> TorchWork:
        raise InvalidArgument("the backend 'bagua' cannot receive from an unknown sender; name the sender with src=")

    @_operation("barrier")
    def barrier(self, opts: c10d.BarrierOptions = _BARRIER) -> TorchWork:
        """Waits for all ranks; with a device (device_ids), each first waits for the device's current stream."""
        device = getattr(opts, "device", None)
        if opts.device_ids and device is not None and device.type != "cpu":
            wait_for_current_stream(device)
        timeout = opts.timeout if opts.timeout.total_seconds() >= 0 else None
        return TorchWork([self.group.barrier(timeout=timeout, blocking=not opts.asyncOp)], [])

    # ---- checks

    def _check_count(self, parts: Sequence[torch.Tensor], name: str) -> None:
        if len(parts) != self.group.size:
            raise InvalidArgument(f"{name} has {len(parts)} tensors; give one for each of the {self.group.size} ranks")

    def _check_parts(self, parts: Sequence[torch.Tensor], tensor: torch.Tensor, name: str, other: str) -> None:
        self._check_count(parts, name)
        for rank, part in enumerate(parts):
            if part.device != tensor.device:
                common_device([(other, tensor), (f"{name}[{rank}]", part)])
            if part.shape != tensor.shape or part.dtype != tensor.dtype:
                raise InvalidArgument(
                    f"{name}[{rank}] is {part.dtype} of shape {tuple(part.shape)}, but {other} is {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}; all ranks give tensors of one type and shape"
                )


def _nccl_reduction(
    op: dist.ReduceOp.RedOpType, tensor: torch.Tensor, group: ProcessGroup
) -> tuple[object, Callable[[], None] | None]:
    """Returns the operator, and a function to finish the result, that reduce integers and bool as NCCL does.

    The mean of integers is their sum, which may overflow, divided by the number of ranks and rounded towards zero. The
    sum of bool is True if any element is, as DTensor's ``any`` expects.
    """
    dtype = tensor.dtype
    if dtype is torch.bool and op == dist.ReduceOp.SUM:
        return ReduceOp.BOR, None
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or op != dist.ReduceOp.AVG:
        return op, None

    def divide() -> None:
        if not tensor.is_cpu:
            keep_for_current_stream(tensor)  # it may have been allocated on another stream
        tensor.div_(group.size, rounding_mode="trunc")

    return ReduceOp.SUM, divide
