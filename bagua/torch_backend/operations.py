"""What is common to all operations of a group: their level, their event in torch's profiler, averages of integers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import torch.autograd.profiler as profiler
import torch.distributed as dist

from ..distributed.process_group import ProcessGroup, ReduceOp
from .profiling import Span
from .work import TorchWork

__all__ = ["divide_integers", "operation"]


def operation(event: str, inputs: int | None = None) -> Callable[[Callable[..., TorchWork]], Callable[..., TorchWork]]:
    """A method that starts an operation.

    Args:
        event: its name in torch's profiler, behind "bagua:".
        inputs: position of the argument that has the tensors that go in.
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


def divide_integers(
    op: dist.ReduceOp.RedOpType, tensor: torch.Tensor, group: ProcessGroup
) -> tuple[object, Callable[[], None] | None]:
    """The operator to reduce with, and what is to be done with the outcome: integers are averaged as in NCCL.

    That is their sum, which may overflow, divided by the number of ranks and rounded towards zero.
    """
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool or op != dist.ReduceOp.AVG:
        return op, None
    return ReduceOp.SUM, lambda: tensor.div_(group.size, rounding_mode="trunc")
