"""Prevents torch.compile from tracing our methods, which C++ calls inside compiled code.

The methods' code objects are marked, and the methods are not wrapped, so it costs nothing in a program without
torch.compile.
"""

from __future__ import annotations

import types

from torch._C._dynamo import eval_frame

__all__ = ["leave_to_python"]


def leave_to_python(cls: type) -> type:
    """Makes torch.compile run the methods of a class, and everything they call, as plain Python."""
    if not hasattr(eval_frame, "_FrameExecStrategy"):  # a torch version that the backend refuses
        return cls
    strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for function in vars(cls).values():
        while isinstance(function, types.FunctionType):
            eval_frame.set_code_exec_strategy(function.__code__, strategy)
            function._torchdynamo_disable = True
            function = getattr(function, "__wrapped__", None)
    return cls
