"""Shared code of the GPU benchmarks: choosing the device, describing it, and writing results.

`--device emulated` runs the same script on the emulated device of the tests, to check it on a machine without a GPU.
Kernels run on the host there, so its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import report

CUDA, EMULATED = "cuda", "emulated"
_DRIVER = Path("/proc/driver/nvidia/version")
_HELD_CYCLES = 10_000_000  # about 5 ms: longer than the host takes to enqueue a sample


def parser(description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options of all benchmarks, and the device."""
    options = report.parser(description)
    options.add_argument(
        "--device", choices=(CUDA, EMULATED), default=CUDA, help="emulated: to see that the script works; no results"
    )
    return options


def need(script: str, device: str) -> None:
    """Ends the script as skipped if there is no such device."""
    import torch

    if device == CUDA and not torch.cuda.is_available():
        print(f"{script} SKIPPED: torch sees no CUDA device.")
        sys.exit(report.SKIPPED)


def use(device: str, index: int = 0) -> Any:
    """Returns the torch.device, after making it current in this process."""
    import torch

    if device == EMULATED:
        import tests.emulated_device as emulated

        emulated.load()
        emulated.set_delay(0)
    torch.accelerator.set_device_index(index)
    return torch.device(device, index)


def device_seconds(call: Callable[[int], object], count: int, period: int) -> float:
    """Returns the seconds per call on the current device, of `count` calls that are enqueued before the first begins.

    The calls get 0, 1, ... `period` - 1 repeatedly.
    """
    import torch

    stream = torch.accelerator.current_stream()
    begin, end = torch.Event(stream.device, enable_timing=True), torch.Event(stream.device, enable_timing=True)
    if stream.device.type == CUDA:
        torch.cuda._sleep(_HELD_CYCLES)
    begin.record(stream)
    for index in range(count):
        call(index % period)
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def facts(device: str) -> dict[str, str]:
    """Returns the GPU, its driver and the builds for it, for a result's header; not in the process that measures."""
    import torch

    if device == EMULATED:
        return {"gpu": "NONE: the emulated device of the tests; these figures mean nothing"}
    properties = torch.cuda.get_device_properties(0)
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    gpu = f"{properties.name}, {memory}, compute capability {properties.major}.{properties.minor}"
    release = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", _DRIVER.read_text()) if _DRIVER.exists() else None
    return {
        "gpu": gpu,
        "driver": release[1] if release else "unknown",
        "cuda": f"torch's {torch.version.cuda}, NCCL {'.'.join(map(str, nccl_version()))}",
    }


def nccl_version() -> tuple[int, int, int]:
    """Returns the version of the loaded NCCL, which may differ from that of torch's build; zeros if there is none."""
    import torch  # noqa: F401  loads NCCL

    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except OSError:
        return (0, 0, 0)
    return version.value // 10000, version.value % 10000 // 100, version.value % 100


class Report(report.Report):
    """A report that writes files only for a GPU."""

    def __init__(
        self,
        script: str,
        question: str,
        args: argparse.Namespace,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        self._device = args.device
        super().__init__(script, question, args, {**facts(args.device), **(setup or {})})

    def write(self, figure: Any = None) -> None:
        if self._device == EMULATED:
            print("not written: the device is emulated")
        else:
            super().write(figure)


def verdict(result: report.Report, missed: Sequence[str], target: str) -> int:
    """Prints the cases that miss the target; returns the script's exit status, 1 if there are any."""
    result.say(f"Missed, {target}: {', '.join(missed)}." if missed else f"All cases reach the target, {target}.")
    return 1 if missed else 0
