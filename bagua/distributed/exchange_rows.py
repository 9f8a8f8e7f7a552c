"""exchange_rows: an all_to_all of rows that autograd records, as a mixture of experts sends its tokens.

Data path: a tensor of any program -> **rows to other ranks** -> ProcessGroup.all_to_all. Forward costs one all_to_all,
and one of 8 bytes per rank where the sizes are not known; backward sends the gradients of the rows the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch

from bagua.distributed.arguments import check_codec
from bagua.distributed.process_group import ProcessGroup
from bagua.distributed.tensors import split_numels
from bagua.distributed.world import GroupLike, resolve
from bagua.errors import InvalidArgument

if TYPE_CHECKING:
    from bagua.codecs import Codec

__all__ = ["exchange_rows"]


@torch._disable_dynamo
def exchange_rows(
    input: torch.Tensor,
    input_splits: Sequence[int] | torch.Tensor,
    output_splits: Sequence[int] | torch.Tensor | None = None,
    *,
    codec: str | Codec | None = None,
    backward_codec: str | Codec | None = "same",
    group: GroupLike = None,
) -> tuple[torch.Tensor, list[int]]:
    """Sends rows to each rank, and returns those that arrive, in the order of the ranks; differentiable.

    Collective, and its backward too: on each rank the loss depends on the rows that arrive there, even where there are
    none. Backward sends the gradient of each row to the rank that the row came from. Under a codec that is the gradient
    of a straight-through estimator. It may be differentiated again.

    Args:
        input: of shape ``[rows, ...]``; equal but for the rows on all ranks. It is not changed.
        input_splits: how many of its rows go to each rank, in this order; 0 for none.
        output_splits: how many come from each rank; None: the ranks tell each other, in a message of 8 bytes for each.
        codec: of what travels. Each row is encoded by itself, those for the own rank too, so that it arrives with the
            same bits whatever other rows there are; "fp8_e4m3" and "bf16" suit activations. On a device rows of a
            multiple of 2048 elements are encoded together, others in a launch each.
        backward_codec: of the gradients; by default that of the rows.
        group: the ranks, all by default.

    Returns:
        The rows, of shape ``[sum(output_splits), ...]``, and ``output_splits``, by which they are sent back.

    Raises:
        InvalidArgument: ``input_splits`` do not add up to the rows, a codec does not encode their type, or the ranks'
            splits do not fit together.
        DeadlineExceeded, TransportError, RemoteError: a rank is late, dead, or failed first; the message names it.

    Example:
        >>> bagua.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> tokens, splits = bagua.exchange_rows(torch.ones(3, 2, requires_grad=True), [3])
        >>> tokens.shape, splits
        (torch.Size([3, 2]), [3])
        >>> back, _ = bagua.exchange_rows(tokens.exp(), splits, [3])
        >>> bagua.destroy_process_group()
    """
    group = resolve(group)
    group.check()
    if not isinstance(input, torch.Tensor) or input.dim() == 0:
        what = f"{input!r}" if not isinstance(input, torch.Tensor) else "a tensor without dimensions"
        raise InvalidArgument(f"input is {what}, expected a torch.Tensor of shape [rows, ...]")
    backward_codec = codec if backward_codec == "same" else backward_codec
    for one in (codec, backward_codec):
        check_codec(one, input.dtype)
    outgoing = _numbers(input_splits, "input_splits", group.size)
    split_numels(input, outgoing, "input", group.size)  # before the others are told
    if output_splits is None:
        incoming = _incoming(outgoing, group)
    else:
        incoming = _numbers(output_splits, "output_splits", group.size)
    return _ExchangeRows.apply(input, outgoing, incoming, codec, backward_codec, group), incoming


def _numbers(splits: Sequence[int] | torch.Tensor, name: str, size: int) -> list[int]:
    numbers = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    if len(numbers) != size or not all(isinstance(one, Integral) and one >= 0 for one in numbers):
        raise InvalidArgument(f"{name} are {numbers}, expected {size} whole numbers that are not negative")
    return list(map(int, numbers))


def _incoming(outgoing: Sequence[int], group: ProcessGroup) -> list[int]:
    numbers = torch.empty(group.size, dtype=torch.int64, device="cpu")
    group.all_to_all(numbers, torch.tensor(outgoing, dtype=torch.int64, device="cpu"), blocking=True).wait()
    return numbers.tolist()


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        outgoing: list[int],
        incoming: list[int],
        codec: Any,
        backward_codec: Any,
        group: ProcessGroup,
    ) -> torch.Tensor:
        ctx.back = (incoming, outgoing, backward_codec, codec, group)
        output = input.new_empty((sum(incoming), *input.shape[1:]))
        group.all_to_all(output, input, incoming, outgoing, codec=codec, by_row=True, blocking=True).wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ExchangeRows.apply(grad, *ctx.back), None, None, None, None, None
