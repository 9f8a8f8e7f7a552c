"""bagua.fsdp: gradients of models under torch's fully_shard (FSDP2) under a codec, by its own extension points.

Data path: FSDP2's post-backward -> **a custom reduce-scatter, and an all-reduce hook** -> CodedReductions ->
ProcessGroup. Invariant: every rank starts the reductions in the same order, that of FSDP2. A reduction ends at the end
of the backward, while backward goes on, where FSDP2 leaves the gradient where it was reduced; elsewhere (another dtype,
a gradient that is there already, offload, hooks that read it) it ends at once, as torch's own does on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bagua.distributed.coded_reductions import CodedReductions
from bagua.distributed.process_group import ProcessGroup, ReduceOp, Work
from bagua.distributed.tensors import local_tensor
from bagua.distributed.world import GroupLike, get_default_group, init_beside_torch, resolve
from bagua.errors import InvalidArgument
from bagua.profiler.hook_timeline import HookTimeline

__all__ = ["Compression", "compress"]


class _Unit:
    """One module that ``fully_shard`` was applied to, and the only code that reads FSDP2's own fields.

    Args:
        index: its number, equal on all ranks.
        name: of the module, for errors and the timeline.
        module: the module.
        param_group: FSDP2's FSDPParamGroup of it.
    """

    def __init__(self, index: int, name: str, module: Any, param_group: Any) -> None:
        self.index, self.name, self.module, self._param_group = index, name or "the model", module, param_group
        self.partial: torch.Tensor | None = None  # what micro-batches without an all-reduce have added up

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self._param_group.mesh_info.shard_process_group

    @property
    def mesh_names(self) -> tuple[str, ...]:
        mesh = self._param_group.mesh_info.mesh
        return tuple(mesh.mesh_dim_names or map(str, range(mesh.ndim)))

    @property
    def all_reduces(self) -> bool:
        return self._param_group.all_reduce_grads

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter.sharded_param for parameter in self._param_group.fsdp_params]

    def keeps_in_place(self, output: torch.Tensor) -> bool:
        """Returns True if FSDP2 makes views of the reduced ``output`` the gradients and computes nothing with it."""
        group = self._param_group
        is_left_alone = output.dtype in (torch.float32, torch.bfloat16) and not group.force_sum_reduction_for_comms
        return is_left_alone and not any(
            one.offload_to_cpu
            or one.sharded_param.dtype != output.dtype
            or one.sharded_param.grad is not None
            or getattr(one.sharded_param, "_post_accumulate_grad_hooks", None)
            for one in group.fsdp_params
        )

    def operator(self, op: Any) -> tuple[ReduceOp, float]:
        """Returns bagua's operator for torch's, and the factor of the input before it."""
        kind = getattr(op, "op", op)
        if kind == dist.ReduceOp.AVG:
            return ReduceOp.AVG, 1.0
        if kind == dist.ReduceOp.SUM:
            return ReduceOp.SUM, 1.0
        return ReduceOp.SUM, 1 / self._param_group.gradient_divide_factor  # PREMUL_SUM


@dataclasses.dataclass
class _Backward:
    """A backward with reductions: when the first began, how many there are, and those that end with the backward."""

    begin_ns: int
    num_reductions: int = 0
    late: list[Work] = dataclasses.field(default_factory=list)


class _ReduceScatter:
    """FSDP2's custom reduce-scatter of one unit: torch's interface of that name."""

    def __init__(self, compression: Compression, unit: _Unit) -> None:
        self._compression, self._unit = compression, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # FSDP2 never passes it
    ) -> None:
        self._compression.reduce_scatter(self._unit, output_tensor, input_tensor, op)


class Compression(HookTimeline):
    """The result of ``bagua.fsdp.compress``; with error feedback its state belongs into checkpoints.

    It has the timeline of the units' reductions, not of torch's own all-gathers. A step there is a backward, from its
    first reduction on, and one more for each backward inside of it (checkpoints with use_reentrant=True). With
    ``replicate`` all ranks of the job call ``save_timeline``.

    Args:
        shards, replicas: the ranks that share a model, and those that hold the same shard; None without replicas.
        codec, shard_codec, error_feedback: as for ``compress``.
    """

    def __init__(
        self,
        shards: ProcessGroup,
        replicas: ProcessGroup | None,
        codec: str | None,
        shard_codec: str | None,
        error_feedback: bool,
    ) -> None:
        super().__init__("bagua.fsdp.compress")
        self._shards, self._replicas = shards, replicas
        self._group = shards if replicas is None else get_default_group()
        self._reduce_scatters = self._all_reduces = None
        if replicas is not None:
            self._all_reduces = CodedReductions(codec, error_feedback, self._record)
        if replicas is None or shard_codec is not None:
            of_shards = codec if replicas is None else shard_codec
            self._reduce_scatters = CodedReductions(of_shards, error_feedback, self._record)
        # The backwards under way: one with use_reentrant=True has others inside of it.
        self._backwards: dict[int, _Backward] = {}

    def attach(self, units: Sequence[_Unit]) -> None:
        """Registers itself with FSDP2."""
        for unit in units:
            if self._reduce_scatters is not None:
                unit.module.set_custom_reduce_scatter(_ReduceScatter(self, unit))
            if self._all_reduces is not None:
                unit.module.set_all_reduce_hook(functools.partial(self.all_reduce, unit))

    def reduce_scatter(self, unit: _Unit, output: torch.Tensor, input: torch.Tensor, torch_op: Any) -> None:
        """Reduces the gradients of a unit among its shards."""
        op, factor = unit.operator(torch_op)
        if factor != 1:
            input.mul_(factor)
        backward, label = self._backward(), f"reduce_scatter {unit.name}"
        work = self._reduce_scatters.reduce_scatter(self._shards, output, input, unit.index, op, label)
        # Behind it comes the all-reduce, or the division of a sum.
        is_result = self._all_reduces is None and op == ReduceOp.AVG
        self._finish(work, backward, may_be_late=is_result and unit.keeps_in_place(output))

    def all_reduce(self, unit: _Unit, output: torch.Tensor) -> None:
        """Averages what a unit's reduce-scatter has left over the replicas."""
        if not unit.all_reduces:  # set_requires_all_reduce(False): adds up outside of .grad, as torch's HSDP does
            unit.partial = output.clone() if unit.partial is None else unit.partial.add_(output)
            output.zero_()
            return
        if unit.partial is not None:
            output.add_(unit.partial)
            unit.partial = None
        backward, label = self._backward(), f"all_reduce {unit.name}"
        work = self._all_reduces.all_reduce(self._replicas, output, unit.index, ReduceOp.AVG, label)
        self._finish(work, backward, may_be_late=unit.keeps_in_place(output))

    def _backward(self) -> _Backward | None:
        """Returns the backward that the calling thread runs, which begins with its first reduction; None: none."""
        number = torch._C._current_graph_task_id()
        if number == -1:
            return None
        if number not in self._backwards:
            self._backwards[number] = _Backward(time.monotonic_ns())
            finish = functools.partial(self._finish_backward, number)
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        return self._backwards[number]

    def _finish(self, work: Work, backward: _Backward | None, may_be_late: bool) -> None:
        """Waits for a reduction, now or at the end of the backward."""
        if backward is not None:
            backward.num_reductions += 1
            if may_be_late:
                backward.late.append(work)
                return
        wait_ns = time.monotonic_ns()
        work.wait()
        self._recorder.add_exposed_hook(work.label, wait_ns, time.monotonic_ns())

    def _finish_backward(self, number: int) -> None:
        wait_ns = time.monotonic_ns()
        backward = self._backwards.pop(number)
        for work in backward.late:
            work.wait()
        self._recorder.add_step(backward.begin_ns, wait_ns, time.monotonic_ns(), backward.num_reductions)
        for later in [one for one in self._backwards if one > number]:
            del self._backwards[later]  # it raised inside of this one

    def state_dict(self) -> dict[str, Any]:
        """Returns what error feedback remembers on this rank: plain data and tensors; every rank saves its own."""
        return {name: reductions.state_dict(group) for name, reductions, group in self._parts()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` returned on this rank.

        Raises:
            InvalidArgument: it is of other codecs, another rank or number of ranks.
        """
        parts = list(self._parts())
        if set(state) != {name for name, _, _ in parts}:
            raise InvalidArgument(
                f"the state is of {' and '.join(state) or 'nothing'}, the model compresses "
                f"{' and '.join(name for name, _, _ in parts)}; call compress with the arguments of the checkpoint"
            )
        for name, reductions, group in parts:
            reductions.load_state_dict(state[name], group)

    def _parts(self) -> Iterator[tuple[str, CodedReductions, ProcessGroup]]:
        if self._reduce_scatters is not None:
            yield "reduce_scatter", self._reduce_scatters, self._shards
        if self._all_reduces is not None:
            yield "all_reduce", self._all_reduces, self._replicas


def compress(
    model: torch.nn.Module,
    codec: str | None = "minmax_uint8",
    *,
    error_feedback: bool = False,
    replicate: GroupLike = None,
    shard_codec: str | None = None,
) -> Compression:
    """Sends the gradients of a model under ``fully_shard`` in a codec; collective, before the first backward.

    Without ``replicate`` it is the reduce-scatter of every unit that ``codec`` is for. With it the model is replicated
    (HSDP): apply ``fully_shard`` on the mesh of the shards alone, and pass that of the replicas here. Then ``codec`` is
    for what replicas exchange, and the sharded parameters become equal to the first replica's. Torch's own HSDP, on a
    mesh of two dimensions, cannot be compressed: it runs an all-reduce that no hook replaces.

    All of fully_shard stays as it is: mixed precision, offload, activation checkpointing,
    ``set_requires_gradient_sync`` and ``set_requires_all_reduce``. Codecs add up in float32. With ``reduce_dtype=
    torch.float32`` reductions run while backward goes on, on the CPU too; gradients that are cast after they were
    reduced are waited for at once.

    Args:
        model: after ``fully_shard``; parameters on a device or the CPU, not on "meta".
        codec: any of ``bagua.codecs.available()``, with its options; "bf16" halves what float32 sends.
        error_feedback: what the codes of a step leave out is added to what the next step encodes. For replicas it takes
            2 (1 + 1/n) float32 copies of this rank's shards, for a reduce-scatter two of all gradients.
        replicate: the ranks that hold the same shards: a group, or a DeviceMesh with one dimension, such as
            ``mesh["dp_replicate"]``.
        shard_codec: with ``replicate``, a codec for the reduce-scatter too; None: torch's own.

    Returns:
        The Compression, whose state belongs into checkpoints where there is error feedback.

    Raises:
        InvalidArgument: no module is under fully_shard, or one on a mesh of two dimensions; replicas and shards have
            ranks in common; the replicas' parameters differ in name, shape or shard; the codec is unknown, or does not
            go with ``error_feedback``.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))  # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["dp_shard"])  # doctest: +SKIP
        >>> bagua.fsdp.compress(model, "minmax_uint8", replicate=mesh["dp_replicate"])  # doctest: +SKIP
    """
    if replicate is None and shard_codec is not None:
        raise InvalidArgument("shard_codec is for a model with replicas; without replicate= pass it as codec")
    units = _units_of(model)
    init_beside_torch()
    shards = resolve(units[0].shard_group)
    if replicate is None:
        compression = Compression(shards, None, codec, None, error_feedback)
    else:
        replicas = resolve(replicate)
        _check_replicas(units, shards, replicas)
        compression = Compression(shards, replicas, codec, shard_codec, error_feedback)
        for unit in units:
            for parameter in unit.parameters:
                replicas.broadcast(local_tensor(parameter), 0, label=unit.name, blocking=True).wait()
    compression.attach(units)
    return compression


def _units_of(model: torch.nn.Module) -> list[_Unit]:
    """Returns the units of FSDP2, which are on one mesh with one dimension. Raises InvalidArgument."""
    from torch.distributed.fsdp import FSDPModule  # of torch 2.6 and later

    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise InvalidArgument(f"torch {torch.__version__} has no set_custom_reduce_scatter; take 2.9 or later")
    units: dict[int, _Unit] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        # Torch until 2.12 has one at most.
        param_groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        for param_group in filter(None, param_groups):
            units.setdefault(id(param_group), _Unit(len(units), name, module, param_group))
    if not units:
        raise InvalidArgument("no module of the model is under fully_shard; call it first, on the layers and the model")
    found = list(units.values())
    for unit in found:
        if len(unit.mesh_names) > 1:
            raise InvalidArgument(
                f"{unit.name} is sharded on a mesh with the dimensions {unit.mesh_names}, where torch's own all-reduce "
                "runs whatever a hook does; call fully_shard on the dimension of the shards, such as mesh['dp_shard'], "
                "and pass the other one, replicate=mesh['dp_replicate']"
            )
        if unit.shard_group is not found[0].shard_group:
            raise InvalidArgument(
                f"{unit.name} and {found[0].name} are sharded on different meshes; compress each alone"
            )
        if any(parameter.is_meta for parameter in unit.parameters):
            raise InvalidArgument(f"{unit.name} has parameters on 'meta'; call to_empty and initialise them first")
    return found


def _check_replicas(units: Sequence[_Unit], shards: ProcessGroup, replicas: ProcessGroup) -> None:
    """Raises InvalidArgument unless the replicas hold the same shards, on all ranks."""
    common = {*shards.ranks} & {*replicas.ranks}
    if len(common) > 1:
        raise InvalidArgument(
            f"replicate is of the ranks {replicas.ranks}, and {units[0].name} is sharded over the ranks {shards.ranks} "
            f"of the mesh dimension {units[0].mesh_names[0]!r}: {sorted(common)} are in both; replicas hold the same "
            "shards, so pass the mesh's other dimension"
        )
    mine = [
        [f"{unit.name}, parameter {number}", [*local_tensor(parameter).shape], str(parameter.dtype), shards.rank]
        for unit in units
        for number, parameter in enumerate(unit.parameters)
    ]
    for rank, theirs in enumerate(replicas.all_gather_plain(mine)):
        if theirs != mine:
            different = next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), (mine, theirs))
            raise InvalidArgument(
                f"replicate: rank {replicas.ranks[rank]} holds {different[1]} (name, local shape, dtype, shard), rank "
                f"{replicas.ranks[replicas.rank]} {different[0]}; replicas hold the same shards of the same model"
            )
