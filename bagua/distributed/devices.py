"""Every question of communication and training to torch about devices is in this file.

Data path: tensors.py asks whether the core can work where a tensor lies, process_group.py on which stream its values
are ready, work.py which stream is to find the result. CUDA and the emulated device of the tests are one text: what
torch has for any accelerator (torch.accelerator, torch.Stream). Kinds are those of csrc/common/device.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

import torch

from bagua import _C
from bagua.errors import InvalidArgument

__all__ = [
    "BackwardStream",
    "HostCopy",
    "StreamKey",
    "check_not_capturing",
    "check_supported",
    "common_device",
    "current_handle_of",
    "current_stream",
    "current_torch_stream",
    "is_capturing",
    "keep_for_current_stream",
    "multiplied",
    "new_stream",
    "on_stream",
    "processor_of",
    "recorded_event",
    "seeded",
    "supported_types",
    "timing_event",
    "use_stream",
    "wait_for_current_stream",
]

# Kind and index of the device, and the handle of the stream, for the core.
StreamKey = tuple[int, int, int]

_CPU = "cpu"
_KINDS = {name: code for code, name in enumerate(_C.device_kinds)}


def check_supported(device: torch.device, what: str) -> None:
    """Raises InvalidArgument where the core cannot work on the device of `what`."""
    kind = device.type
    if kind == _CPU or (kind in _KINDS and _C.has_device_runtime(kind)):
        return
    if kind == "cuda":
        raise InvalidArgument(
            f"{what} is on {device}, but this bagua was built without CUDA; move it to the CPU (.cpu()), or install a "
            "build with CUDA (BAGUA_CUDA=1 pip install ., where nvcc is)"
        )
    instead = "make it there, with values (to_empty)" if kind == "meta" else "move it there (.cpu())"
    raise InvalidArgument(
        f"{what} is on {device}; bagua communicates tensors of the CPU and of CUDA devices: {instead}"
    )


def supported_types() -> list[str]:
    """The types of the devices whose tensors the core can work on."""
    return [_CPU, *(kind for kind in _KINDS if kind != _CPU and _C.has_device_runtime(kind))]


def common_device(tensors: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of all the named tensors. Raises InvalidArgument where they lie on several."""
    first_name, device = "", torch.device(_CPU)
    for name, tensor in tensors:
        if not first_name:
            first_name, device = name, tensor.device
        elif tensor.device != device:
            raise InvalidArgument(
                f"{first_name} is on {device}, but {name} is on {tensor.device}; one operation works on tensors of one "
                "device: move them there with .to(device)"
            )
    return device


def current_stream(device: torch.device) -> StreamKey | None:
    """The stream on which the caller's next operations on the device run; None for the CPU."""
    if device.type == _CPU:
        return None
    if device.type == "cuda":  # older torches know no native_handle
        handle = torch.cuda.current_stream(device).cuda_stream
    else:
        handle = torch.accelerator.current_stream(device.index).native_handle
    return _KINDS[device.type], device.index or 0, handle or 0


def current_handle_of(device: torch.device) -> Callable[[], int]:
    """Returns a function that returns the handle of that stream, called for every gradient; 0 for the CPU.

    A device of another kind has an index.
    """
    if device.type == _CPU:
        return int
    if device.type == "cuda":  # makes no torch.cuda.Stream
        return partial(torch._C._cuda_getCurrentRawStream, device.index)
    return lambda: torch.accelerator.current_stream(device.index).native_handle


def is_capturing(device: torch.device) -> bool:
    """Returns True if what the caller enqueues on the device is recorded into a graph and does not run now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_capturing(device: torch.device, what: str, instead: str) -> None:
    """Raises InvalidArgument, which says what to do `instead`, where `what` would be recorded into a graph."""
    if is_capturing(device):
        raise InvalidArgument(
            f"{what} while a CUDA graph is captured on {device}, whose replays would communicate nothing; {instead}"
        )


def current_torch_stream(device: torch.device) -> torch.Stream:
    """The current stream of a device other than the CPU, as torch has it."""
    if device.type == "cuda":  # older torches have no torch.accelerator
        return torch.cuda.current_stream(device)
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """A stream of the device, other than its default one."""
    return torch.Stream(device)


def use_stream(stream: torch.Stream) -> None:
    """Runs the calling thread's operations on this stream of this device from here on."""
    torch.accelerator.set_stream(stream)


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Within it, the calling thread's operations run on this stream of this device."""
    if stream.device.type != "cuda":
        with stream:
            yield
        return
    # torch.cuda.stream() would come back to another device by cudaSetDevice, which makes a context of several hundred
    # MB there. torch.cuda.device() comes back to one that has none without making it.
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep the memory of a tensor of a device until what was enqueued on the current stream is done with it."""
    tensor.record_stream(current_torch_stream(tensor.device))


def wait_for_current_stream(device: torch.device) -> None:
    """Block until the device has done what the caller has enqueued on its current stream."""
    current_torch_stream(device).synchronize()


def recorded_event(device: torch.device) -> torch.Event:
    """The point that the caller's current stream of the device has reached."""
    return current_torch_stream(device).record_event()


def timing_event(device: torch.device) -> torch.Event:
    """An event like that of ``recorded_event``, for ``elapsed_time`` between two of them."""
    event = (torch.cuda if device.type == "cuda" else torch).Event(enable_timing=True)
    event.record(current_torch_stream(device))
    return event


def processor_of(device: torch.device) -> str:
    """The kind of processor that computes there. Another kind, or another number of threads, may round differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != _CPU:
        return device.type
    return f"{_cpu_model()} ({torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


@cache
def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = dict.fromkeys(
        line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))
    )
    return ", ".join(found)


def multiplied(values: torch.Tensor, number: float | torch.Tensor) -> torch.Tensor:
    """`values`, in float32 at least, times a number, or a scalar of their device: with the same bits."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    return wide if isinstance(number, float) and number == 1.0 else wide * number


@contextmanager
def seeded(seed: int, devices: Iterable[torch.device]) -> Iterator[None]:
    """Within it, what is drawn on the CPU and on these devices starts from the seed; then as if nothing had been."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.default_generator.manual_seed(seed)
        for device in devices:
            if device.type == _CPU:
                continue
            stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
            state = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(state, device)
        yield


class HostCopy:
    """A copy of a small tensor of a device that is on its way to the host, which continues meanwhile.

    Args:
        tensor: as the caller's current stream finds it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device=_CPU)
        self._values.copy_(tensor, non_blocking=True)
        self._event = recorded_event(tensor.device)

    def get(self) -> torch.Tensor:
        """Returns the values; waits until they are there."""
        self._event.synchronize()
        return self._values


class BackwardStream:
    """The stream on which a backward's buckets are communicated, whichever streams their gradients come from.

    Autograd completes a gradient on the stream on which forward used the parameter, and ends backward on the caller's.
    What is done for communication, from the first launch of a backward to its last wait, is on the one stream where
    that backward began, so that what an algorithm allocates meets no other. That stream waits for those of the
    gradients, and the caller's waits for it. On the CPU there is nothing to do.

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
        """Returns True if a gradient that is ready now, on the current stream, is so for communication; awaited if not.

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
        """Works as ``entered``, where autograd has had the current stream, the caller's, wait for all of backward.

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
