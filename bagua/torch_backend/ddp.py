"""Two methods of torch's DDP, wrapped in the whole process for what DDP expects of backends that are written in C++.

DDP.join gives the reducer a Work that Python then drops. The reducer has its C++ half only, which waits through the
Python one, and without it forever; so the reducer keeps both. (_register_work, which also gives a Work to torch's C++,
does that by itself.)

The C++ of the built-in hook for float16 takes only a future of a C++ list, which a future made by Python cannot hold.
The hook of that name in default_hooks does the same in Python.
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

# The last Work that each reducer was given: it uses that until the backward, and drops it when it is given another.
_works: weakref.WeakKeyDictionary[dist.Reducer, TorchWork] = weakref.WeakKeyDictionary()


def adapt_ddp() -> None:
    """From now on DDP.join and built-in hooks work with groups of bagua; other groups see no difference. Idempotent."""
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
            _works[self] = work  # only now, when the reducer has dropped the one before

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
