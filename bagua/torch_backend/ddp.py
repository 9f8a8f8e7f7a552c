"""Wraps two methods of torch's DDP, in the whole process, that work only with backends written in C++.

DDP.join passes a Work to the reducer, and Python then drops it. The reducer holds only the C++ half, whose wait needs
the Python half and would never return without it; so the reducer is made to keep both. (_register_work, which also
passes a Work to torch's C++, does so already.)

The C++ code of the built-in float16 hook accepts only a future of a C++ list, which a future made by Python cannot
hold. The hook of that name in default_hooks does the same in Python.
"""

from __future__ import annotations

import functools
import weakref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .group import TorchProcessGroup
from .work import TorchWork

__all__ = ["adapt_ddp"]

# The last Work passed to each reducer, which uses it until the backward and drops it when it gets another.
_works: weakref.WeakKeyDictionary[dist.Reducer, TorchWork] = weakref.WeakKeyDictionary()


def adapt_ddp() -> None:
    """Makes DDP.join and built-in hooks work with groups of bagua; nothing changes for other groups. Idempotent."""
    if not hasattr(dist.Reducer._set_forward_pass_work_handle, "is_adapted"):
        dist.Reducer._set_forward_pass_work_handle = _keeping(dist.Reducer._set_forward_pass_work_handle)
        DistributedDataParallel._register_builtin_comm_hook = _in_python(
            DistributedDataParallel._register_builtin_comm_hook
        )


def _keeping(hand_over):
    @torch._disable_dynamo
    @functools.wraps(hand_over)
    def adapted(self: dist.Reducer, work: dist.Work, *arguments: bool) -> None:
        hand_over(self, work, *arguments)
        if isinstance(work, TorchWork):
            _works[self] = work  # only now, because the reducer has dropped the previous one

    adapted.is_adapted = True
    return adapted


def _in_python(register):
    @functools.wraps(register)
    def adapted(self: DistributedDataParallel, comm_hook_type: dist.BuiltinCommHookType) -> None:
        if comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS and isinstance(
            self.process_group, TorchProcessGroup
        ):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # slow to import

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            register(self, comm_hook_type)

    return adapted
