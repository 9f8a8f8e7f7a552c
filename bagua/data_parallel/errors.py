"""The errors of training, and how an error of one rank ends the step of all.

Beside the data path: ``reducer.py`` raises these where a backward leaves the way that gradients should go. The other
ranks would wait for this one until their deadline and then not know the cause, so the group is poisoned with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import Bucket
from bagua.distributed.process_group import ProcessGroup
from bagua.errors import Aborted, BaguaError, InvalidArgument


class fatal:
    """A context manager that poisons ``group`` with what is raised inside; cheap, as each bucket passes by one.

    Args:
        what: the part of training that runs inside, such as "after_backward".
        algorithm_name: the algorithm whose hook ``what`` is, if it is one.
        others: as of ``poisoned``.
    """

    __slots__ = ("_algorithm_name", "_group", "_others", "_what")

    def __init__(
        self, group: ProcessGroup, what: str, algorithm_name: str | None = None, others: Sequence[ProcessGroup] = ()
    ) -> None:
        self._group, self._what, self._algorithm_name, self._others = group, what, algorithm_name, others

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            rank = self._group.rank
            of = "" if self._algorithm_name is None else f" of algorithm {self._algorithm_name!r}"
            text = f"rank {rank}: {self._what}{of} raised {type(error).__name__}: {error}"
            poisoned(self._group, error if isinstance(error, BaguaError) else Aborted(text, rank=rank), self._others)


def poisoned(group: ProcessGroup, error: BaguaError, others: Sequence[ProcessGroup] = ()) -> BaguaError:
    """Poisons ``group`` with ``error``, whose ranks are the group's, and returns it to be raised.

    Args:
        others: groups of some of its ranks, in which these may be waiting, too.
    """
    if group.size > 1:
        group.poison(error)
    told = group.job_ranks.told(error)
    for other in others:
        if other.size > 1:
            other.poison(told)
    return told


def refused_gradient(name: str, grad: torch.Tensor) -> InvalidArgument:
    """The error of a gradient that is sparse, or has a graph."""
    if grad.layout is not torch.strided:
        return InvalidArgument(f"parameter {name!r} has a {grad.layout} gradient; bagua sends dense ones")
    return InvalidArgument(
        f"backward(create_graph=True) would lose the graph of {name!r}.grad when it is averaged; use "
        "torch.autograd.grad for higher-order terms, or no_sync()"
    )


def no_gradient(name: str, rank: int) -> InvalidArgument:
    """The error of a parameter that backward has reached without leaving a gradient."""
    return InvalidArgument(
        f"rank {rank}: backward has reached parameter {name!r}, but its .grad is None: a hook of the parameter has "
        "cleared it, as optimizers that step in backward do (LOMO), or an autograd.Function returned None for it. Step "
        "after backward, or pass find_unused_parameters=True",
        rank=rank,
    )


def moved(name: str, rank: int) -> InvalidArgument:
    """The error of a model that was moved or converted after the wrap, and its gradients with it."""
    return InvalidArgument(
        f"rank {rank}: the memory of the gradient of {name!r} was moved since the wrap, by .to(), .half(), "
        "share_memory() or the like; do that before with_bagua, or call it again",
        rank=rank,
    )


def ready_twice(name: str) -> InvalidArgument:
    """The error of a parameter whose gradient was complete, and was added to again."""
    return InvalidArgument(
        f"parameter {name!r} became ready twice in one backward, after its gradient may have been sent; this happens "
        "when it is used in two checkpoint() calls: pass use_reentrant=False to them"
    )


def summed_twice(rank: int, are_means: bool) -> InvalidArgument:
    """The error of a second backward on gradients that are sums of all ranks' already.

    Args:
        are_means: only those of experts are sums.
    """
    if are_means:
        return InvalidArgument(
            f"rank {rank}: the gradients of experts (groups=) are those of an earlier backward, already divided by the "
            "number of all ranks, and exchanged again they would be divided twice. Call zero_grad() between two "
            "synchronising backwards, or have all but the last inside no_sync()",
            rank=rank,
        )
    return InvalidArgument(
        f"rank {rank}: gradients are the sums over all ranks (average=False) of an earlier backward, and summed again "
        "they would count once for each rank. Call zero_grad() between two synchronising backwards, have all "
        "but the last inside no_sync(), or use average=True",
        rank=rank,
    )


def exchanged_twice(rank: int, algorithm: str) -> InvalidArgument:
    """The error of a second backward on gradients that are momenta already."""
    return InvalidArgument(
        f"rank {rank}: gradients are what algorithm {algorithm!r} has made of an earlier backward, and would go "
        "through its momentum again. Call zero_grad() between two synchronising backwards, or have all but the last "
        "inside no_sync()",
        rank=rank,
    )


def in_compiled_autograd(rank: int) -> InvalidArgument:
    """The error of a backward whose end torch does not report."""
    return InvalidArgument(
        f"rank {rank}: backward of the wrapped model runs under torch's compiled autograd "
        "(torch._dynamo.config.compiled_autograd), which does not report its end; leave that out: torch.compile of the "
        "model compiles its backward as well",
        rank=rank,
    )


def never_ready(names: Sequence[str], missing: Sequence[int], rank: int, began_at_output: bool) -> InvalidArgument:
    """The error of a backward that has not used the parameters ``missing`` of ``names``, where all must be used.

    Args:
        began_at_output: it was seen to reach an output of the model. Otherwise it may be one inside another.
    """
    num = len(missing)
    shown = ", ".join(repr(names[index]) for index in missing[:8]) + (f" and {num - 8} more" if num > 8 else "")
    return InvalidArgument(
        f"rank {rank}: backward has ended and {num} of {len(names)} parameters have no gradient: {shown}. They took no "
        "part in the loss, or were frozen or replaced after the wrap; pass find_unused_parameters=True, or set "
        "requires_grad=False before with_bagua" + ("" if began_at_output else _INSIDE_ANOTHER),
        rank=rank,
    )


_INSIDE_ANOTHER = (
    ". Or a checkpoint with use_reentrant=True has run this backward inside another: have forward return its tensors "
    "in tuples, lists, dicts or dataclasses, or pass use_reentrant=False"
)


def nonfinite(buckets: Sequence[Bucket]) -> InvalidArgument:
    """The error of a backward whose result holds NaN or Inf, under ``nonfinite="raise"``; the same on all ranks.

    Args:
        buckets: those with NaN or Inf; empty where the weights may have changed since.
    """
    if not buckets:
        return InvalidArgument(
            'a gradient of the last backward was NaN or Inf on some rank (nonfinite="raise"), and the weights may have '
            "changed by it on all ranks: load a checkpoint"
        )
    where = "; ".join(f"{bucket.label} ({', '.join(bucket.names)})" for bucket in buckets)
    return InvalidArgument(
        f'a gradient is NaN or Inf on some rank (nonfinite="raise"): {where}. No weight has changed; skip the step '
        "with zero_grad()",
        bucket=buckets[0].label,
    )


def unseen_step(index: int, kind: str, algorithm_name: str) -> str:
    """The warning of weights that have changed without a step of the optimizer that was passed to with_bagua."""
    return (
        f"weights of optimizers[{index}] ({kind}) have changed since the last forward without a step of it. Algorithm "
        f"{algorithm_name!r} exchanges weights at the steps of the optimizers that were passed to with_bagua, and no "
        "others: call with_bagua again after making an optimizer anew"
    )
