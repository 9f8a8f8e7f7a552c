"""What to say of a wrapped model's parameters whose gradients cannot be synchronised.

Beside the data path: ``step.py`` raises these where a backward leaves the way that gradients should go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.buckets import BucketStorage, Member
from bagua.errors import InvalidArgument


def refused_gradient(name: str, grad: torch.Tensor) -> InvalidArgument:
    """Of a gradient that is sparse, or has a graph."""
    if grad.layout is not torch.strided:
        return InvalidArgument(f"parameter {name!r} has a {grad.layout} gradient; bagua sends dense ones")
    return InvalidArgument(
        f"backward(create_graph=True) would lose the graph of {name!r}.grad when it is averaged; use "
        "torch.autograd.grad for higher-order terms, or no_sync()"
    )


def converted(member: Member, grad: torch.Tensor, device: torch.device, rank: int) -> InvalidArgument:
    """Of a parameter that has another dtype, device or memory format than when the model was wrapped, on `device`."""
    now, before = f"{grad.dtype} on {grad.device}", f"{member.dtype} on {device}"
    if now == before:
        now, before = f"of strides {grad.stride()}", "of another memory format"
    return InvalidArgument(
        f"rank {rank}: the gradient of {member.name!r} is {now}, but the parameter was {before} when the model was "
        "wrapped; move or convert the model before with_bagua, or call it again",
        rank=rank,
    )


def moved(name: str, rank: int) -> InvalidArgument:
    """Of a parameter whose gradient lies in memory of bagua's that was moved as a whole."""
    return InvalidArgument(
        f"rank {rank}: the memory of gradients was moved since the model was wrapped, that of {name!r} for one (by "
        "share_memory()); do that before with_bagua, or call it again",
        rank=rank,
    )


def ready_twice(name: str) -> InvalidArgument:
    """Of a parameter whose gradient was complete, and was added to again."""
    return InvalidArgument(
        f"parameter {name!r} became ready twice in one backward, after its gradient may have been sent; this happens "
        "when it is used in two checkpoint() calls: pass use_reentrant=False to them"
    )


def hook_returned(name: str, value: object) -> InvalidArgument:
    """Of a parameter with a hook that returns something, which torch gives to the next one."""
    return InvalidArgument(
        f"a hook of parameter {name!r} (register_post_accumulate_grad_hook) returned a {type(value).__name__}; such "
        "hooks return None, and change the parameter's grad in place"
    )


def under_compiled_autograd(rank: int) -> InvalidArgument:
    """Of a backward whose end nobody would hear of."""
    return InvalidArgument(
        f"rank {rank}: backward of the wrapped model runs under torch's compiled autograd "
        "(torch._dynamo.config.compiled_autograd), which does not tell when it ends; leave that out: torch.compile of "
        "the model compiles its backward as well",
        rank=rank,
    )


def swapped(name: str, rank: int) -> InvalidArgument:
    """Of a parameter whose hooks torch has not called in this backward."""
    return InvalidArgument(
        f"rank {rank}: torch has swapped the tensor of parameter {name!r} (torch.utils.swap_tensors), and since then "
        "no forward of the wrapped model itself has come before this backward; call the model, or with_bagua again",
        rank=rank,
    )


def unfrozen(name: str, rank: int) -> InvalidArgument:
    """Of a parameter that has no place in a bucket, and begins to train."""
    return InvalidArgument(
        f"rank {rank}: parameter {name!r} was frozen when the model was wrapped and is not any more, so it would not "
        "be synchronised; unfreeze parameters before with_bagua, or call it again before the next forward",
        rank=rank,
    )


def stepped_in_backward(optimizer: torch.optim.Optimizer, rank: int) -> InvalidArgument:
    """Of an optimizer whose step a hook of backward has called."""
    return InvalidArgument(
        f"rank {rank}: {type(optimizer).__name__}.step was called inside backward, before gradients are synchronised; "
        "the ranks would part. Call it after backward: an optimizer in backward (register_post_accumulate_grad_hook, "
        "torch.distributed.optim._apply_optimizer_in_backward) cannot train a wrapped model",
        rank=rank,
    )


def closure_not_called(optimizer: torch.optim.Optimizer, rank: int) -> InvalidArgument:
    """Of an optimizer that has stepped without the gradients that it was to have."""
    return InvalidArgument(
        f"rank {rank}: {type(optimizer).__name__}.step was given a closure and has stepped without calling it, and "
        "there was no backward before; call backward yourself, or have the optimizer call the closure",
        rank=rank,
    )


def never_ready(names: Sequence[str], missing: Sequence[int], rank: int, began_at_output: bool) -> InvalidArgument:
    """What to say of a backward that has not used the parameters ``missing`` of ``names``, where none may be.

    Args:
        began_at_output: it was seen to reach an output of the model. Otherwise it may be one inside another.
    """
    num = len(missing)
    shown = ", ".join(repr(names[index]) for index in missing[:8]) + (f" and {num - 8} more" if num > 8 else "")
    return InvalidArgument(
        f"rank {rank}: backward has ended and {num} of {len(names)} parameters have no gradient: {shown}. "
        "They took no part in the loss, or were frozen after the model was wrapped; pass find_unused_parameters=True, "
        "or set requires_grad=False before with_bagua" + ("" if began_at_output else _INSIDE_ANOTHER),
        rank=rank,
    )


_INSIDE_ANOTHER = (
    ". Or a checkpoint with use_reentrant=True has run this backward inside another: have forward return its tensors "
    "in tuples, lists, dicts or dataclasses, or pass use_reentrant=False"
)


def changed_parameters(
    model: torch.nn.Module, storage: BucketStorage, rank: int, may_be_gone: bool
) -> InvalidArgument | None:
    """What to say where the model has no longer the parameters that it was wrapped with, whose gradients are hooked.

    Args:
        may_be_gone: whether it may do without some of them.
    """
    current = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    known = {id(parameter): name for name, parameter in zip(storage.names, storage.parameters, strict=True)}
    held = {id(parameter) for parameter in model.parameters()}
    new = [name for key, name in current.items() if key not in known]
    gone = [name for key, name in known.items() if key not in held]
    replaced = [name for name in gone if name in new or not may_be_gone]
    told = [("were replaced", replaced), ("were added", [name for name in new if name not in replaced])]
    told = [(verb, names) for verb, names in told if names]
    return _got_others(told, rank) if told else None


def added_parameters(names: Sequence[str], rank: int) -> InvalidArgument:
    """What to say of an optimizer that is to step parameters which the model has got since it was wrapped."""
    return _got_others([("were added", names)], rank)


def _got_others(told: Sequence[tuple[str, Sequence[str]]], rank: int) -> InvalidArgument:
    what = "; ".join(f"{len(names)} {verb}, {names[0]!r} for one" for verb, names in told)
    return InvalidArgument(
        f"rank {rank}: since with_bagua the model has got other parameters, which are not synchronised: {what}; "
        "do what replaces or adds them (modules, load_state_dict(assign=True)) before with_bagua, or call it again",
        rank=rank,
    )
