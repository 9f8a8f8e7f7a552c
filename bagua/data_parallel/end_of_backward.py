"""How a backward tells that it has ended, well or not.

Beside the data path: autograd's engine -> **here** -> step. Invariant: of the two functions one is called, once, unless
their object is gone by then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable

import torch


class EndOfBackward:
    """Called by the autograd engine when backward ends; dropped uncalled when it raises.

    Args:
        on_end, on_abort: bound methods of one object, which this does not keep alive.
    """

    __slots__ = ("_is_called", "_on_abort", "_on_end")

    def __init__(self, on_end: Callable[[], None], on_abort: Callable[[], None]) -> None:
        self._on_end, self._on_abort = weakref.WeakMethod(on_end), weakref.WeakMethod(on_abort)
        self._is_called = False

    @torch._disable_dynamo  # of a backward in what torch.compile compiles
    def __call__(self) -> None:
        self._is_called = True
        on_end = self._on_end()
        if on_end is not None:
            on_end()

    def __del__(self) -> None:
        on_abort = None if self._is_called else self._on_abort()
        if on_abort is not None:
            on_abort()


def is_never_told() -> bool:
    """Whether backward runs in a graph of torch's compiled autograd, which drops what is to run at the end."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)
