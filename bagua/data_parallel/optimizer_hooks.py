"""Sees every step of every optimizer while a model is wrapped, and tells the models whose parameters it steps.

Beside the data path: torch's global optimizer hooks -> **here** -> ``step.py``. Hooks on an optimizer object would miss
the one that a trainer makes in its place. Invariants: the hooks are registered while a wrapped model exists, and no
longer; models hear of a step in the order in which they were wrapped, which all ranks share; none of them does anything
for a step that another one refuses, and what ends the group of one ends those of all; nothing that has to be undone
depends on a post hook, because torch calls none when a step raises.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_TORCH_FILE = register_optimizer_step_pre_hook.__code__.co_filename


class Call:
    """One call of ``optimizer.step`` under way, as one wrapped model sees it.

    Attributes:
        optimizer: whose step it is.
        is_inner: it is part of another call: of super().step(), or of the optimizer that wraps this one.
        is_prepared: ``Algorithm.before_optimizer_step`` has been called for it.
        is_evaluating: its closure runs.
        is_skipped: a GradScaler makes nothing of it, and the host knows; or torch.distributed.checkpoint makes it.
        num_forwards, num_backwards: synchronising ones in its closure so far.
    """

    __slots__ = (
        "_frame",
        "is_evaluating",
        "is_inner",
        "is_prepared",
        "is_skipped",
        "num_backwards",
        "num_forwards",
        "optimizer",
    )

    def __init__(self, optimizer: torch.optim.Optimizer, frame: FrameType, is_inner: bool) -> None:
        self.optimizer, self.is_inner = optimizer, is_inner
        self._frame: FrameType | None = frame
        self.is_prepared = self.is_evaluating = self.is_skipped = False
        self.num_forwards = self.num_backwards = 0

    def release(self) -> None:
        """The call has ended: its frame, and with it the caller's locals, are kept alive no longer."""
        self._frame = None

    def is_running(self) -> bool:
        """Whether the call is still on the stack: one that raised is not."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class Calls:
    """The calls under way that step parameters of one model, the outermost first."""

    def __init__(self) -> None:
        self._stack: list[Call] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> Call:
        """A step begins."""
        self._forget_raised()
        outer = self._outer()
        call = Call(optimizer, _frame_of_step(), outer is not None and not outer.is_evaluating)
        self._stack.append(call)
        return call

    def end(self, optimizer: torch.optim.Optimizer) -> Call | None:
        """A step has returned; None where its beginning was not seen, as that of another model's optimizer."""
        if all(call.optimizer is not optimizer for call in self._stack):
            return None  # perhaps in another thread, on whose stack no call of this one is
        self._forget_raised()
        if not self._stack or self._stack[-1].optimizer is not optimizer:
            return None
        call = self._stack.pop()
        call.release()
        return call

    def drop(self, call: Call) -> None:
        """A step is refused before it begins."""
        self._stack.remove(call)
        call.release()

    def evaluating(self) -> Call | None:
        """The call whose closure runs now."""
        outer = self._outer()
        return outer if outer is not None and outer.is_evaluating else None

    def _outer(self) -> Call | None:
        return next((call for call in reversed(self._stack) if not call.is_inner), None)

    def _forget_raised(self) -> None:
        while self._stack and not self._stack[-1].is_running():
            self._stack.pop().release()


class Model(Protocol):
    """Who is told: the training step of a wrapped model."""

    parameter_ids: frozenset[int]
    calls: Calls
    exchanges_weights: bool  # so that each step counts

    def is_wrapper(self, optimizer: torch.optim.Optimizer) -> bool: ...

    def pass_over(self, call: Call) -> None: ...

    def check_optimizer_step(self, call: Call, has_closure: bool) -> bool: ...

    def check_closure(self, call: Call) -> None: ...

    def before_optimizer_step(self, call: Call) -> None: ...

    def after_optimizer_step(self, call: Call) -> None: ...

    def failure(self) -> Exception | None: ...

    def end(self, error: Any) -> None: ...


_lock = threading.Lock()  # guards the hooks against being registered and removed at once
_watched: dict[weakref.ref[Model], None] = {}  # in the order of wrapping
_handles: list[Any] = []  # of the global hooks


class Watch:
    """Keeps a model informed until it is removed, or the model is gone."""

    def __init__(self, model: Model) -> None:
        # The garbage collector may end a model anywhere, in the middle of torch's look at its hooks too, so that these
        # are removed by who ends a wrap, or stay, to find nobody.
        self._ref = weakref.ref(model, _forget)
        with _lock:
            _watched[self._ref] = None
            if not _handles:
                _handles.append(register_optimizer_step_pre_hook(_before))
                _handles.append(register_optimizer_step_post_hook(_after))

    def remove(self) -> None:
        """The model hears of no further step. Idempotent."""
        _forget(self._ref)
        with _lock:
            while _handles and not _watched:
                _handles.pop().remove()


def _forget(ref: weakref.ref[Model]) -> None:
    _watched.pop(ref, None)


def _models() -> list[Model]:
    return [model for model in (ref() for ref in [*_watched]) if model is not None]


@torch._disable_dynamo  # a compiled step calls it between its graphs
def _before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    closure = closure if callable(closure) else None
    begun: list[tuple[Model, Call]] = []
    due: list[tuple[Model, Call]] = []
    try:
        for model in _models():
            if not _steps(optimizer, model) or model.is_wrapper(optimizer):
                continue
            call = model.calls.begin(optimizer)
            if call.is_inner:
                continue
            begun.append((model, call))
            if model.exchanges_weights and _makes_only_states(optimizer):
                model.pass_over(call)
            elif model.check_optimizer_step(call, closure is not None):
                due.append((model, call))
        for model, call in due:
            model.before_optimizer_step(call)
    except BaseException:  # torch calls no post hook then
        for model, call in begun:
            model.calls.drop(call)
        _end_together(optimizer)
        raise
    if closure is None or not begun:
        return None
    closure = _told(closure, optimizer, begun)
    return (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)


def _makes_only_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is no step of the training: torch.distributed.checkpoint makes one with lr=0 and gradients of zeros,
    perhaps on one rank only, where an optimizer has no state yet that it could save or load."""
    module = None if getattr(optimizer, "state", None) else sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame: FrameType | None = None if code is None else sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _steps(optimizer: torch.optim.Optimizer, model: Model) -> bool:
    ids = map(id, chain.from_iterable([options["params"] for options in optimizer.param_groups]))
    return not model.parameter_ids.isdisjoint(ids)  # looks as far as the first one


def _end_together(optimizer: torch.optim.Optimizer) -> None:
    """A call of its step has raised. If that has ended the group of a model, it ends those of all that it steps.

    Their next exchange is to come on the other ranks, which do not all learn of the one group that ended before that.
    """
    models = [model for model in _models() if _steps(optimizer, model)]
    failures = [model.failure() for model in models]
    first = next((failure for failure in failures if failure is not None), None)
    for model, failure in zip(models, failures, strict=True):
        if first is not None and failure is None:
            model.end(first)


def _told(
    closure: Callable[..., Any], optimizer: torch.optim.Optimizer, calls: Sequence[tuple[Model, Call]]
) -> Callable[..., Any]:
    """``closure``, whose evaluations the models know of."""

    @functools.wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        for _, call in calls:
            call.is_evaluating = True
        try:
            result = closure(*args, **kwargs)
        finally:
            for _, call in calls:
                call.is_evaluating = False
        try:
            for model, call in calls:
                model.check_closure(call)
            for model, call in calls:
                model.before_optimizer_step(call)
        except BaseException:
            _end_together(optimizer)
            raise
        return result

    return evaluate


@torch._disable_dynamo
def _after(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    try:
        for model in _models():
            call = model.calls.end(optimizer)
            if call is not None and not call.is_inner:
                model.after_optimizer_step(call)
    except BaseException:
        _end_together(optimizer)
        raise


def _frame_of_step() -> FrameType:
    """Of torch's wrapper around ``Optimizer.step``, which has called a hook; between them may be those of Dynamo."""
    nearest: FrameType | None = sys._getframe(3)
    frame = nearest
    while frame is not None and frame.f_code.co_filename != _TORCH_FILE:
        frame = frame.f_back
    return nearest if frame is None else frame
