"""DistributedDataParallel: torch's class and its arguments, around with_bagua."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree

from bagua.algorithms import Algorithm
from bagua.buckets import DEFAULT_BUCKET_BYTES
from bagua.data_parallel.handle import BaguaHandle
from bagua.data_parallel.wrap import Optimizers, with_bagua
from bagua.distributed.world import GroupLike
from bagua.errors import InvalidArgument


class DistributedDataParallel(torch.nn.Module):
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel``: only the import changes.

    The wrapped module is ``.module``, state_dict keys begin with ``module.``, and ``no_sync()`` is a method.
    Unlike torch's, gradients are always views of the buckets (``gradient_as_bucket_view``), buffers are
    sent at the end of a synchronising backward, and a parameter without gradient is an error at the end of
    that backward. An argument that cannot be honoured raises.

    Args:
        module: the module to train, with its parameters on one device.
        device_ids: None, or a list of the one device that the module is on, as in torch's: then what forward is given
            is moved there, where it is not.
        output_device: None, or the device that the module is on.
        broadcast_buffers: as in :func:`bagua.with_bagua`.
        process_group: a group of bagua or of torch.distributed; all ranks by default.
        bucket_cap_mb: ``bucket_bytes`` of :func:`bagua.with_bagua` in MiB, 25 by default.
        find_unused_parameters: a backward may leave parameters out.
        gradient_as_bucket_view: either value; gradients are views in any case, which costs no copy.
        static_graph: either value; nothing depends on it. Parameters that are never used need find_unused_parameters.
        algorithm, optimizers, options: as in :func:`bagua.with_bagua`.

    Raises:
        InvalidArgument: as ``with_bagua``, and for arguments that bagua cannot honour.

    Example:
        >>> model = bagua.DistributedDataParallel(model, algorithm="bytegrad")
        >>> with model.no_sync():
        ...     loss(model(x), y).backward()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: GroupLike = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        algorithm: str | Algorithm = "gradient_allreduce",
        optimizers: Optimizers = (),
        **options: Any,
    ) -> None:
        super().__init__()
        _check_devices("device_ids", device_ids, module)
        self._moves_inputs = bool(device_ids)
        _check_devices("output_device", None if output_device is None else [output_device], module)
        _refuse("dim", dim, dim != 0, "inputs are not scattered, each rank brings its own")
        _refuse("init_sync", init_sync, not init_sync, "all ranks start equal to rank 0")
        _refuse("check_reduction", check_reduction, check_reduction, "it is always checked: leave it out")
        bucket_bytes = DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else int(bucket_cap_mb * 1024 * 1024)
        self.module = with_bagua(
            module,
            optimizers,
            algorithm=algorithm,
            group=process_group,
            bucket_bytes=bucket_bytes,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            **options,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The wrapped module's forward."""
        if self._moves_inputs:
            device = next(self.module.parameters()).device
            inputs, kwargs = _moved(inputs, device), _moved(kwargs, device)
        return self.module(*inputs, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Keeps backwards inside local, as ``model.bagua.no_sync()``; those of a copy always are."""
        return self.module.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Lets ranks train on while others have no more batches, as torch's; see ``model.bagua.join``.

        Raises:
            InvalidArgument: the algorithm exchanges weights, or ``throw_on_early_termination``.
        """
        _refuse(
            "throw_on_early_termination", throw_on_early_termination, throw_on_early_termination,
            "ranks follow to the end, or fail together"
        )  # fmt: skip
        return self.bagua.join(divide_by_initial_world_size) if enable else nullcontext()

    def join_hook(self, **kwargs: Any) -> Any:
        """Refuses torch.distributed.algorithms.Join, which joins several objects at once.

        Raises:
            InvalidArgument: always.
        """
        raise InvalidArgument("torch's Join is not supported; with model.join(): joins this model alone")

    @property
    def bagua(self) -> BaguaHandle:
        """The handle of the wrapped module."""
        return self.module.bagua


def _check_devices(name: str, given: Any, module: torch.nn.Module) -> None:
    """Raises InvalidArgument unless ``given`` is None, empty, or a list of the one device of the module."""
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return
    devices = {parameter.device for parameter in module.parameters()}
    if not isinstance(given, (list, tuple)) or {_device(each, devices) for each in given} != devices:
        where = ", ".join(sorted(map(str, devices)))
        raise InvalidArgument(
            f"DistributedDataParallel: {name} is {given!r}, but the module is on {where}; give the one device that it "
            f"is on, or its index, as torch does ({name} = local rank), or leave {name} out"
        )


def _device(given: Any, devices: set[torch.device]) -> torch.device | None:
    """Returns the device that an index or a name stands for; None: none."""
    try:
        return torch.device(next(iter(devices)).type, given) if isinstance(given, int) else torch.device(given)
    except (RuntimeError, TypeError, StopIteration):
        return None


def _moved(value: Any, device: torch.device) -> Any:
    """Returns the arguments of a forward on the device, in the containers that torch's pytrees know."""
    kinds = (torch.Tensor, torch.nn.utils.rnn.PackedSequence)
    return pytree.tree_map(
        lambda one: one.to(device) if isinstance(one, kinds) else one, value, is_leaf=lambda one: isinstance(one, kinds)
    )


def _refuse(name: str, value: Any, is_refused: bool, reason: str) -> None:
    if is_refused:
        raise InvalidArgument(f"DistributedDataParallel: {name}={value!r} cannot be honoured; {reason}")
