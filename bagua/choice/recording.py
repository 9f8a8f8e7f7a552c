"""Records the profile of a training while it runs: when gradients become ready, and what the rest of a step takes.

Beside the data path: a hook per parameter, one of torch's public ones, for as long as it records. On a device marks are
events of its stream, read once at the end; the device does not wait for them.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from bagua.buckets import Member
from bagua.distributed.devices import timing_event, wait_for_current_stream
from bagua.replay.profiles import Layer, Profile

_MOST_LAYERS = 64


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A rank's steps, in medians.

    Attributes:
        ready: for each parameter, by index: seconds from the first ready gradient of a backward to its own; None if it
            had none.
        before_s: the rest of what a step computes: from the end of a backward to the first ready gradient of the next.
        step_s: a whole step.
    """

    ready: tuple[float | None, ...]
    before_s: float
    step_s: float

    @property
    def compute_s(self) -> float:
        """Seconds of a step without communication at its end."""
        return self.before_s + max((at for at in self.ready if at is not None), default=0.0)

    def profile(self, members: Sequence[Member]) -> Profile:
        """Returns the profile of the training of these parameters, by index; neighbours share layers."""
        last_s = max((at for at in self.ready if at is not None), default=0.0)
        at_s = [last_s if at is None else at for at in self.ready]
        layers: list[list[Member]] = []
        ends: list[float] = []
        for member in sorted(members, key=lambda one: (at_s[one.index], -one.index)):
            end_s = at_s[member.index]
            place = int(_MOST_LAYERS * end_s / last_s) if last_s else 0
            is_near = bool(layers) and place == (int(_MOST_LAYERS * ends[-1] / last_s) if last_s else 0)
            if is_near and layers[-1][0].values.dtype == member.values.dtype:
                layers[-1].append(member)
                ends[-1] = end_s
            else:
                layers.append([member])
                ends.append(end_s)
        found = [
            Layer(
                of_layer[0].name,
                tuple(tuple(member.values.shape) or (1,) for member in of_layer),
                1e3 * self.before_s if index == len(layers) - 1 else 0.0,
                1e3 * (ends[index] - (ends[index - 1] if index else 0.0)),
                str(of_layer[0].values.dtype).removeprefix("torch."),
            )
            for index, of_layer in enumerate(layers)
        ]
        return Profile("training", "recorded while it ran", tuple(reversed(found)))


class DeviceClock:
    """Marks the times at which a device has come so far; the processor's own time without one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Returns a mark of now, which ``between`` reads."""
        return time.perf_counter() if self._device.type == "cpu" else timing_event(self._device)

    def wait(self) -> None:
        """Waits until the device has come to all marks."""
        if self._device.type != "cpu":
            wait_for_current_stream(self._device)

    def between(self, first: Any, second: Any) -> float:
        """Returns the seconds between two marks that were waited for."""
        return second - first if self._device.type == "cpu" else first.elapsed_time(second) / 1e3


class Recording:
    """Marks steps from ``begin_step`` on. ``end`` returns what it has seen; ``remove`` removes the hooks."""

    def __init__(self, members: Sequence[Member], clock: DeviceClock) -> None:
        self.clock = clock
        self._steps: list[tuple[Any, Any, Any, dict[int, Any]]] = []  # begin, end of backward, next begin, ready
        self._begin: Any = None
        self._end: Any = None
        self._ready: dict[int, Any] = {}
        self._num_parameters = len(members)
        self._hooks = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(member.index)) for member in members
        ]

    def _hook(self, index: int) -> Any:
        @torch._disable_dynamo
        def mark(_: torch.Tensor) -> None:
            if self._end is None:  # else a local backward of the next step, before its last one
                self._ready[index] = self.clock.mark()

        return mark

    def begin_step(self, mark: Any) -> None:
        """A step begins, and the one before it ends; at a mark of the clock."""
        if self._begin is not None:
            self._steps.append((self._begin, self._end, mark, self._ready))
        self._begin, self._end, self._ready = mark, None, {}

    def end_backward(self) -> None:
        """A synchronising backward has ended, with all that it waits for."""
        self._end = self.clock.mark()

    def end(self) -> Recorded:
        """Returns the medians over the steps."""
        self.clock.wait()
        ready: list[list[float]] = [[] for _ in range(self._num_parameters)]
        before, whole = [], []
        for begin, end, following, marks in self._steps:
            first = next(iter(marks.values()), end)  # dicts keep their order
            for index, mark in marks.items():
                ready[index].append(max(0.0, self.clock.between(first, mark)))
            before.append(self.clock.between(begin, first) + self.clock.between(end, following))
            whole.append(self.clock.between(begin, following))
        return Recorded(
            tuple(statistics.median(times) if times else None for times in ready),
            statistics.median(before),
            statistics.median(whole),
        )

    def remove(self) -> None:
        """Removes the hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
