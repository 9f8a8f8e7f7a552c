"""What torch.compile is to leave alone: C++ calls our methods in the middle of compiled code, and it would trace them.

No wrapper around a method costs time in a program that compiles nothing: the mark is on the code.
"""

from __future__ import annotations

import types

from torch._C._dynamo import eval_frame

__all__ = ["leave_to_python"]


def leave_to_python(cls: type) -> type:
    """Have torch.compile run the methods of a class, and all that they call, as they are, and never trace them."""
    if not hasattr(eval_frame, "_FrameExecStrategy"):  # a torch that the backend refuses
        return cls
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in vars(cls).values():
        while isinstance(function, types.FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
            function._torchdynamo_disable = True
            function = getattr(function, "__wrapped__", None)
    return cls
