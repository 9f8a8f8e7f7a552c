"""average_model: a copy of a model with the mean of all ranks' parameters and buffers.

Beside the data path: to evaluate or publish what ranks have trained apart. Invariant: the model itself is not changed.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

from bagua.buckets import as_real
from bagua.data_parallel.handle import handle_of
from bagua.distributed.process_group import ReduceOp
from bagua.distributed.tensors import local_tensor
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import InvalidArgument

__all__ = ["average_model"]

Model = TypeVar("Model", bound=torch.nn.Module)


@torch.no_grad()
def average_model(model: Model, group: GroupLike = None) -> Model:
    """Returns a copy of ``model`` with the mean over the ranks of every parameter and floating buffer; collective.

    Other buffers, such as counters, are those of the group's first rank. The copy is not wrapped.

    Args:
        model: wrapped by ``with_bagua`` or not, the same on all ranks but for its values.
        group: the ranks; by default those that the model is wrapped for, or all.

    Raises:
        InvalidArgument: ranks hold other shapes or dtypes, or the model is under ``fully_shard``.

    Example:
        >>> averaged = bagua.average_model(model)
        >>> bool(torch.equal(averaged.weight, model.weight))  # as gradients are averaged here
        True
    """
    handle = handle_of(model)
    ranks = handle.group if group is None and handle is not None else resolve(group)
    if any(kind.__name__ == "FSDPModule" for module in model.modules() for kind in type(module).__mro__):
        raise InvalidArgument(
            "average_model copies the model, which torch does not do under fully_shard; average in place instead, by "
            "model.bagua.synchronize()"
        )
    averaged = copy.deepcopy(model)
    works = []
    for name, value in (*averaged.named_parameters(), *averaged.named_buffers()):
        tensor = local_tensor(value.detach())
        if tensor.is_floating_point() or tensor.is_complex():
            work = ranks.all_reduce(as_real(tensor), ReduceOp.AVG, label=name)
        else:
            work = ranks.broadcast(tensor, 0, label=name)
        works.append(work)
    for work in works:
        work.wait()
    return averaged
