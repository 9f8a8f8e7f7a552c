"""Client functions that run again for their derivatives: what they find then is what they found when they were called.

The programs that ran and autocast are put back, and so is the state of random number generators. Whatever else a
function takes from around it cannot be put back: a loop's variable, a counter, a tensor that is written into. So the
operations of each run are compared with those of the first one, and a derivative of another function is refused. A
write through ``.data`` and a change of the order of operands are not seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from bagua.federated.verbs.placement import frames, run_within


def as_called_now(function: Callable) -> Callable:
    """Returns the function with the programs and the autocast of now, wherever it is called later."""
    within = frames()
    kinds = ["cpu", *([torch.accelerator.current_accelerator().type] if torch.accelerator.is_available() else [])]
    options = [
        {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }
        for kind in kinds
        if torch.amp.is_autocast_available(kind)
    ]

    def again(*arguments: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for one in options:
                stack.enter_context(torch.autocast(**one))
            return run_within(within, function, *arguments)

    return again


HAS_CHANGED = (
    "runs again for its derivative, and computes something else than before: what it uses from around it has changed "
    "since, such as a loop's variable; make it a default (k=k), or an argument"
)


class Calls:
    """The operations of a client function, by which its later runs are compared with the first one.

    Attributes:
        has_changed: whether a run had other operations, numbers or constant tensors than the first one.
    """

    def __init__(self) -> None:
        self._first: list[tuple] = []
        self._is_first = True
        self._position = 0
        self.has_changed = False

    @contextlib.contextmanager
    def run(self) -> Any:
        """A run of the function for all clients of a chunk."""
        self._position = 0
        yield
        self.has_changed |= self._position != len(self._first)
        self._is_first = False

    def add(self, function: Callable, arguments: Any, constants: Sequence[tuple[torch.Tensor, int] | None]) -> None:
        """Adds an operation.

        Args:
            arguments: of which numbers, texts and the like count.
            constants: for each tensor among them, the tensor and its version; None if the function has made it.
        """
        call = (getattr(function, "__name__", ""), _numbers_in(arguments))
        if self._is_first:
            self._first.append((call, constants))
        elif self._position < len(self._first):
            earlier, before = self._first[self._position]
            self.has_changed |= earlier != call or not all(map(_is_same, before, constants))
        self._position += 1


def _is_same(before: tuple[torch.Tensor, int] | None, now: tuple[torch.Tensor, int] | None) -> bool:
    if before is None or now is None:  # made within, by a derivative in one run and under more transforms in another
        return True
    if before[0] is now[0]:
        return before[1] == now[1]
    if before[0].shape != now[0].shape or before[0].dtype != now[0].dtype:
        return False
    with temporarily_clear_interpreter_stack():
        return torch.allclose(before[0].detach(), now[0].detach(), atol=0.0, equal_nan=True)


def _numbers_in(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_numbers_in, value))
    if isinstance(value, dict):
        return tuple((key, _numbers_in(one)) for key, one in value.items())
    if value is None or isinstance(value, (int, float, complex, str, slice, torch.dtype, torch.device)):
        return repr(value)
    return type(value).__name__
