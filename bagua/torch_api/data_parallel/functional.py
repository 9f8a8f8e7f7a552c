"""A differentiable all_reduce.

Data path: the caller, and autograd -> **here** -> bagua.ProcessGroup. One all_reduce in forward, one of gradients in
backward: a sum over ranks is its own adjoint, so every rank's input gets the sum of all ranks' gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bagua.distributed.process_group import ProcessGroup
from bagua.errors import InvalidArgument
from bagua.torch_api.process_group import BaguaProcessGroup, to_bagua_process_group

__all__ = ["all_reduce"]


def all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | BaguaProcessGroup | None = None
) -> torch.Tensor:
    """Returns the reduction of a tensor over ranks. Backward through it must run on all ranks, or on none.

    Args:
        op: torch.distributed.ReduceOp.SUM, or MAX if no gradient is needed.
        group: a group of torch.distributed or of new_group; all ranks by default.

    Raises:
        InvalidArgument: another op, or MAX of a tensor that requires a gradient.

    Example:
        >>> total = all_reduce((model(x) - y).square().sum())
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        raise InvalidArgument(f"op is {op!r}, expected torch.distributed.ReduceOp.SUM or MAX")
    if op == dist.ReduceOp.MAX and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument("op is MAX, which has no gradient here; pass tensor.detach(), or SUM")
    return _AllReduce.apply(tensor, op, to_bagua_process_group(group).group)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Any, group: ProcessGroup) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        total = tensor.clone(memory_format=torch.contiguous_format)
        group.all_reduce(total, op, blocking=True).wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _AllReduce.apply(grad, ctx.op, ctx.group), None, None
