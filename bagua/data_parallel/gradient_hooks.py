"""How autograd lets the step know that a parameter's gradient is complete: a hook of the parameter.

torch keeps a parameter's hooks in the Python object, and calls those of the tensor behind it. Where it exchanges that
tensor for another one (torch.utils.swap_tensors, which load_state_dict and conversions of a module use under
torch.__future__.set_swap_module_params_on_conversion) no hook is called any more, the user's neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from bagua.buckets import BucketStorage
from bagua.data_parallel.failures import ending
from bagua.data_parallel.parameter_errors import hook_returned
from bagua.distributed.process_group import ProcessGroup

__all__ = ["SwappedParameters", "hook_gradient"]


class _Step(Protocol):
    group: ProcessGroup
    storage: BucketStorage

    def gradient_ready(self, index: int, parameter: torch.nn.Parameter, is_last: bool) -> None: ...


def hook_gradient(step_ref: weakref.ref[_Step], index: int, parameter: torch.nn.Parameter) -> Any:
    """Lets the step know when ``parameter.grad`` is complete: behind the hooks of the user's, whenever they came.

    torch calls a parameter's hooks in the order of a dict, as it is when the first one is called.
    """

    def gradient_is_ready(parameter: torch.Tensor) -> None:
        step = step_ref()
        if step is not None:
            hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks is None:  # torch gives a hook what the one before has returned
                raise ending(step.group, hook_returned(step.storage.names[index], parameter))
            is_last = len(hooks) < 2 or next(reversed(hooks)) == own
            if not is_last and own in hooks:  # else a hook has just ended the wrap
                hooks[own] = hooks.pop(own)  # move_to_end changes another order than the one that torch follows
            step.gradient_ready(index, parameter, is_last)

    handle = parameter.register_post_accumulate_grad_hook(_uncompiled(gradient_is_ready))
    own = handle.id
    _revive(parameter)
    return handle


class SwappedParameters:
    """Finds parameters whose tensor torch has exchanged, and has their hooks called again.

    Args:
        parameters: those that are hooked. A swap exchanges their ``__dict__`` as well, by which it shows.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = tuple(parameters)
        self._dicts = [parameter.__dict__ for parameter in self._parameters]

    def revive(self) -> list[int]:
        """Before a forward: what was swapped until then is as it was before. Returns which those are."""
        swapped = []
        for index, (parameter, known) in enumerate(zip(self._parameters, self._dicts, strict=True)):
            if parameter.__dict__ is not known:
                self._dicts[index] = parameter.__dict__
                _revive(parameter)
                swapped.append(index)
        return swapped


def _revive(parameter: torch.nn.Parameter) -> None:
    """Has the tensor that is behind the parameter now call its hooks."""
    parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, which torch.compile does not compile, nor what it calls, where backward runs in what is compiled.

    As torch._disable_dynamo, which would take a microsecond for each gradient.
    """
    from torch._dynamo import eval_frame  # takes a second, which the first hook of a forward takes otherwise

    if not hasattr(eval_frame, "FrameExecStrategy"):  # of older torches
        return torch._disable_dynamo(hook)
    skip = eval_frame.FrameAction.SKIP
    eval_frame.set_code_exec_strategy(hook.__code__, eval_frame.FrameExecStrategy(skip, skip))
    return hook
