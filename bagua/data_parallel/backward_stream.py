"""On which stream of a device a backward's buckets are communicated, whichever streams their gradients come from.

Data path: gradient ready -> **stream** -> launch. Autograd completes a gradient on the stream on which forward used the
parameter, and ends backward on the caller's. Invariant: what is done for communication, from the first launch of a
backward to its last wait, is on the one stream where that backward began, so that what an algorithm allocates meets no
other. That stream waits for those of the gradients, and the caller's waits for it. On the CPU there is nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bagua.distributed.devices import current_handle_of, current_torch_stream, on_stream


class BackwardStream:
    """The stream of one backward after the other.

    Args:
        device: where the gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._current_handle = current_handle_of(device)
        self._stream: torch.Stream | None = None
        self._handle = 0  # of it
        self._others: list[torch.Stream] = []  # which hold gradients that it has not waited for

    def begin(self) -> None:
        """A backward begins, on the current stream."""
        if self._device is not None:
            self._stream, self._handle = current_torch_stream(self._device), self._current_handle()
            self._others.clear()

    def is_current(self) -> bool:
        """Whether a gradient that is ready now, on the current stream, is so for communication; awaited later if not.

        One that is not must not be read where it is: its memory is another stream's to reuse.
        """
        if self._device is None or self._current_handle() == self._handle:
            return True
        current = current_torch_stream(self._device)
        if current not in self._others:
            self._others.append(current)
        return False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it operations are enqueued there, behind all gradients that are ready."""
        if self._device is None or (not self._others and self._current_handle() == self._handle):
            yield
            return
        while self._others:
            self._stream.wait_stream(self._others.pop())
        with on_stream(self._stream):
            yield

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """As ``entered``, where autograd has had the current stream, the caller's, wait for all of backward.

        What is enqueued on the current stream afterwards is behind it.
        """
        if self._device is None:
            yield
            return
        caller = current_torch_stream(self._device)
        if caller != self._stream:
            self._others.append(caller)
        with self.entered():
            yield
        if caller != self._stream:
            caller.wait_stream(self._stream)
