"""DistributedDataParallel with the original project's arguments.

Data path: the caller -> **here** -> bagua.DistributedDataParallel. Where the original does not support an argument, it
falls back to torch's class without the algorithm; here every argument is honoured or refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bagua import data_parallel
from bagua.errors import InvalidArgument
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.process_group import BaguaProcessGroup, to_bagua_process_group

__all__ = ["DistributedDataParallel", "DistributedDataParallel_V1_9_0", "to_bagua_process_group"]

_DEFAULT_ALGORITHM = GradientAllReduceAlgorithm()


class DistributedDataParallel(data_parallel.DistributedDataParallel):
    """A replacement of torch's class of that name; ``module`` is the wrapped module.

    Args:
        module: the module to train, with its parameters on one device.
        broadcast_buffers: True: rank 0's are sent before training forwards, by algorithms that synchronise gradients.
            False: each rank keeps its own.
        process_group: a group of new_group or of torch.distributed; all ranks by default.
        bucket_cap_mb: maximum size of a bucket in MiB.
        find_unused_parameters: a backward may leave parameters out.
        gradient_as_bucket_view: True; gradients always lie in the buckets.
        optimizers: the optimizers of its parameters.
        algorithm: an instance of a class of bagua.torch_api.algorithms.
        device_ids, output_device: None, or the one device that the module is on.
        dim, check_reduction: their defaults.

    Raises:
        InvalidArgument: as with_bagua; and for an argument that cannot be honoured.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: BaguaProcessGroup | dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm = _DEFAULT_ALGORITHM,
    ) -> None:
        if not gradient_as_bucket_view:
            raise InvalidArgument(
                "gradient_as_bucket_view=False cannot be honoured: gradients are always views of the buckets; leave it "
                "out"
            )
        ddp = BaguaDistributedDataParallel(module, optimizers, algorithm, to_bagua_process_group(process_group))
        group = ddp.process_group.group
        super().__init__(
            module,
            device_ids,
            output_device,
            dim,
            None if broadcast_buffers else False,
            process_group=group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            algorithm=algorithm.reify(group),
            optimizers=ddp.bagua_optimizers,
        )
        ddp.begin()

    @property
    def inner(self) -> BaguaDistributedDataParallel:
        """An alias of ``bagua_ddp``."""
        return self.bagua_ddp

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if backwards synchronise; False inside no_sync."""
        return self.bagua_ddp.require_backward_grad_sync

    @property
    def parameters_to_ignore(self) -> list[str]:
        """An empty list, because parameters to ignore are refused."""
        return self.bagua_ddp.parameters_to_ignore


DistributedDataParallel_V1_9_0 = DistributedDataParallel
