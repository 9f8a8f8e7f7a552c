"""The trap of closures: a client function may see a value of the server only through its arguments.

A tensor that a client function takes from around it, and to which a gradient leads, has the right value and a wrong
derivative in reverse mode: each rank would add up its own clients only. While a client function runs, every operation
on such a tensor raises. Constants are free to be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from bagua.errors import InvalidArgument
from bagua.federated.placement import frames
from bagua.federated.traced import tracing


def _refuse_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    """Runs before the step of every optimizer of this process."""
    if any(frame.is_mapping for frame in frames()):
        raise InvalidArgument(
            f"{type(optimizer).__name__} steps inside a client function, where parameters have no .grad: a step "
            "changes nothing under torch.func. Use torch.func.grad and return the new values"
        )


register_optimizer_step_pre_hook(_refuse_step)

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCHS = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MARK = "_bagua_inside"
# They give something else than a value that a gradient flows through.
_HARMLESS = {torch.Tensor.detach, torch.detach, torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel}


class Watch(TorchFunctionMode):
    """Objects to tensors from outside of the client function that a gradient leads to.

    Args:
        verb: that runs the function, for messages.
        arguments: what the function is given, under vmap.
    """

    def __init__(self, verb: str, arguments: Any) -> None:
        super().__init__()
        self._verb = verb
        self._level = 0 if torch.compiler.is_compiling() else torch._C._functorch.maybe_current_level()
        self._trace = tracing()
        self._modes = {_innermost(t).fake_mode for t in pytree.tree_leaves(arguments)} if self._trace else set()
        for tensor in pytree.tree_leaves(arguments):
            if isinstance(tensor, torch.Tensor):
                setattr(tensor, _MARK, True)

    def __enter__(self) -> Watch:
        if self._trace:
            self._trace.watches.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self._trace:
            self._trace.watches.pop()
        super().__exit__(*exception)

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if self._trace:
            is_looked_at = self is self._trace.watches[-1]  # a map inside has tensors of its own
        else:
            is_looked_at = torch.is_grad_enabled() and function not in _HARMLESS
        if is_looked_at and not _reads_attribute(function):
            for tensor in given:
                if not hasattr(tensor, _MARK) and self._is_from_outside(tensor):
                    raise self._objection(tensor)
        result = function(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            # What a function gives back as it came, such as Tensor.float, is not from inside.
            if isinstance(tensor, torch.Tensor) and not any(tensor is one for one in given):
                setattr(tensor, _MARK, True)
        return result

    def _is_from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether it is what the client function may not use.

        In a trace, a value of that trace; otherwise a tensor that a gradient leads to at a level of torch.func below
        the client function's, or without any.
        """
        if torch.compiler.is_compiling():
            return tensor.requires_grad
        functorch = torch._C._functorch
        while functorch.is_functorch_wrapped_tensor(tensor):
            level = functorch.maybe_get_level(tensor)
            if not self._trace:
                if level == self._level and functorch.is_batchedtensor(tensor):
                    return False  # another for every client
                if level < self._level and functorch.is_gradtrackingtensor(tensor):
                    return True
            tensor = functorch.get_unwrapped(tensor)
            if hasattr(tensor, _MARK):
                return False
        if self._trace and isinstance(tensor, FakeTensor):
            return tensor.fake_mode not in self._modes
        return tensor.requires_grad

    def _objection(self, tensor: torch.Tensor) -> InvalidArgument:
        where = "" if torch.compiler.is_compiling() else _place_of_use()
        if self._trace:
            return InvalidArgument(
                f"the client function uses a tensor of shape {list(tensor.shape)} from around it{where}, which clients "
                f"have not: pass federated.broadcast(tensor) to {self._verb} as an argument"
            )
        return InvalidArgument(
            f"the client function uses a tensor of shape {list(tensor.shape)} from around it{where}, and a gradient "
            f"leads to it: its derivative would be wrong. Pass federated.broadcast(tensor) to {self._verb} as an "
            "argument, or use tensor.detach()"
        )


def _innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Without what torch.func has wrapped around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def _reads_attribute(function: Callable) -> bool:
    """Such as Tensor.shape.__get__."""
    return getattr(function, "__name__", "") == "__get__"


def _place_of_use() -> str:
    """The user's line that runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_OURS, _TORCHS)) and not file.startswith("<"):
            return f" in {file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
