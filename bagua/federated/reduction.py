"""Sums over the clients of all ranks: the only place where a federated program communicates.

All leaves of a reduction travel in one collective per dtype, through memory that the ranks of a host share. Nothing
here knows of derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from bagua import agreement
from bagua.errors import InvalidArgument
from bagua.federated.placement import Placement


def sum_over_ranks(placement: Placement, values: Sequence[torch.Tensor], verb: str) -> list[torch.Tensor]:
    """The values' sums over the ranks.

    Args:
        values: each rank's sums over its own clients, not under any transform.

    Returns:
        New tensors of the same shapes and dtypes, equal on all ranks.
    """
    group = placement.group
    if group is None:
        return [value.clone() for value in values]
    with placement.lock:
        agree(placement, values, verb)
        sums = list(values)
        order = sorted(range(len(values)), key=lambda i: str(values[i].dtype))
        for dtype, same in groupby(order, key=lambda i: values[i].dtype):
            indices = list(same)
            for index, total in zip(
                indices, _sum_one_dtype(placement, [values[i] for i in indices], dtype), strict=True
            ):
                sums[index] = total
        return sums


def _sum_one_dtype(placement: Placement, values: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    real = [torch.view_as_real(value) if dtype.is_complex else value for value in values]
    buffer = placement.memory(sum(value.numel() for value in real), real[0].dtype)
    parts = [part.view(value.shape) for part, value in zip(buffer.split([v.numel() for v in real]), real, strict=True)]
    for part, value in zip(parts, real, strict=True):
        part.copy_(value)
    placement.group.all_reduce(buffer, blocking=True, label=placement.name).wait()
    return [torch.view_as_complex(part.clone()) if dtype.is_complex else part.clone() for part in parts]


def agree(placement: Placement, values: Sequence[torch.Tensor], verb: str) -> None:
    """Compares the program and the shapes with the other ranks', the first time that they run here.

    Raises:
        InvalidArgument: on all ranks, naming the first that differs.
    """
    shapes = (verb, *((tuple(value.shape), str(value.dtype)) for value in values))
    if placement.is_agreed and shapes in placement.agreed:
        return

    def describe() -> tuple[None, dict[str, str]]:
        described = {"the program": placement.program, "the clients": f"{placement.size} {placement.name}"}
        described["the verb"] = verb
        described["how many tensors it reduces"] = str(len(values))
        for index, (shape, dtype) in enumerate(shapes[1:]):
            described[f"tensor {index} of a client"] = f"{list(shape)} {dtype}"
        return None, described

    with placement.everywhere():
        agreement.agree(placement.group, describe, "run the same program with values of the same shapes on all ranks")
        numbers = placement.group.all_gather_object(placement.num_local)
        if sum(numbers) != placement.size:
            raise InvalidArgument(
                f"the ranks hold {numbers} clients, {sum(numbers)} in all, but the program {placement.program!r} is "
                f"over {placement.size} {placement.name}; give program(num_local=) what each rank holds"
            )
    placement.is_agreed = True
    placement.agreed.add(shapes)
