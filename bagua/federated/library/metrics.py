"""Metrics weighted by examples: sums and counts, which add up over batches, clients and ranks before they are divided.

A mean of clients' means would count each client alike, whatever it has; a mean of batches' means would count a short
last batch too much. A client function returns ``Ratio`` and ``Total``, pytrees of tensors; ``reduce`` adds them up over
the clients in one collective; ``result`` divides. (After FedJAX's metrics.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.library.aggregators import only_of
from bagua.federated.verbs.placement import current
from bagua.federated.verbs.verbs import check_placed, reduce_sum

Tree = Any  # a pytree of Ratio and Total


class Ratio(NamedTuple):
    """A sum and what it is divided by in the end, both ``[]``, or ``[...]`` for several metrics at once."""

    sum: torch.Tensor
    count: torch.Tensor


class Total(NamedTuple):
    """A sum that stays one."""

    sum: torch.Tensor


def mean(values: torch.Tensor, mask: torch.Tensor | None = None) -> Ratio:
    """The mean of values of examples.

    Args:
        values: ``[examples]``, or more axes, all of which are averaged over.
        mask: of the same shape: which count, bools, or weights; of the CPU serves values of a device, too. None: all.
            What is masked out may be anything.

    Returns:
        Sums in float32, of float64 in float64.

    Raises:
        InvalidArgument: a mask of another shape.

    Example:
        >>> import torch
        >>> result(mean(torch.tensor([1.0, 2.0, 6.0])))
        tensor(3.)
        >>> result(mean(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([True, True, False])))
        tensor(1.5000)
    """
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    values = values.to(torch.promote_types(values.dtype, torch.float32))  # 257 is no bfloat16, 65,536 no float16
    if mask is None:
        return Ratio(values.sum(), torch.full((), values.numel(), dtype=values.dtype, device=values.device))
    if mask.shape != values.shape:
        raise InvalidArgument(f"mask of shape {list(mask.shape)} for values of shape {list(values.shape)}")
    weights = mask.to(values.device, values.dtype)
    return Ratio((torch.where(weights != 0, values, torch.zeros_like(values)) * weights).sum(), weights.sum())


def accuracy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> Ratio:
    """The share of examples whose largest logit is the label's.

    Args:
        logits: ``[examples, ..., classes]``.
        labels: ``[examples, ...]``, integers.
        mask: as of ``mean``.

    Example:
        >>> import torch
        >>> result(accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])))
        tensor(0.5000)
    """
    if logits.shape[:-1] != labels.shape:
        raise InvalidArgument(f"logits of shape {list(logits.shape)} for labels of shape {list(labels.shape)}")
    return mean(logits.argmax(-1) == labels, mask)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None = None) -> Ratio:
    """The mean over examples of -log softmax(logits)[label], in nats; arguments as of ``accuracy``."""
    if logits.shape[:-1] != labels.shape:
        raise InvalidArgument(f"logits of shape {list(logits.shape)} for labels of shape {list(labels.shape)}")
    if mask is not None and mask.shape == labels.shape:  # pads, such as labels -100, are no classes
        counts = mask.to(logits.device) != 0
        labels = torch.where(counts, labels, torch.zeros_like(labels))
        logits = torch.where(counts.unsqueeze(-1), logits, torch.zeros_like(logits))
    chosen = logits.log_softmax(-1).gather(-1, labels.long().unsqueeze(-1)).squeeze(-1)
    return mean(-chosen, mask)


def count(mask: torch.Tensor) -> Total:
    """The number of examples that count.

    Args:
        mask: bools of any shape, or weights, which add up.
    """
    if mask.dtype is torch.bool:
        mask = mask.to(torch.get_default_dtype())
    if mask.is_floating_point():
        mask = mask.to(torch.promote_types(mask.dtype, torch.float32))
    return Total(mask.sum())


def merge(one: Tree, other: Tree) -> Tree:
    """The metrics of both, such as of two batches."""
    return pytree.tree_map(torch.add, one, other)


def reduce(metrics: Tree, *, mask: torch.Tensor | None = None, placement: str | None = None) -> Tree:
    """The metrics of all clients, inside of a program: one collective for all of them.

    Args:
        metrics: a pytree of placed ``Ratio`` and ``Total``, as ``map_fn`` returns them.
        mask: ``[num_local]`` of bools: whose count; may be of the CPU where the metrics are on a device.
        placement: the name of the program whose clients are meant; by default the innermost that runs.

    Returns:
        The same, of the server, equal on all ranks.
    """
    if mask is not None:
        clients = current(placement, "metrics.reduce")
        check_placed(metrics, clients, "metrics.reduce")
        mask = torch.as_tensor(mask)
        if mask.dtype is not torch.bool or tuple(mask.shape) != (clients.num_local,):
            raise InvalidArgument(
                f"metrics.reduce: mask of {mask.dtype} and shape {list(mask.shape)}, expected bools "
                f"[{clients.num_local}]"
            )
        metrics = only_of(mask, metrics)
    return reduce_sum(metrics, placement=placement)


def result(metrics: Tree) -> Tree:
    """The values: of a ``Ratio`` sum / count, NaN where nothing counts; of a ``Total`` the sum. Placed ones keep their
    axis.

    Example:
        >>> import torch
        >>> result({"loss": Ratio(torch.tensor(6.0), torch.tensor(4.0)), "examples": Total(torch.tensor(4.0))})
        {'loss': tensor(1.5000), 'examples': tensor(4.)}
    """

    def divide(metric: Ratio | Total) -> torch.Tensor:
        return metric.sum / metric.count if isinstance(metric, Ratio) else metric.sum

    return pytree.tree_map(divide, metrics, is_leaf=lambda node: isinstance(node, (Ratio, Total)))
