"""`bagua doctor`: what is built, what this host has, and, with several ranks, what lies between them.

Alone it looks at this host. With --nproc-per-node N, or under a launcher, every pair of ranks is measured: round trip
of 8 bytes and rate of 16 MiB messages, with the transport that carried them.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from bagua import _C, config
from bagua.cli.progress import Progress
from bagua.cli.run import main as launch
from bagua.errors import BaguaError, InvalidArgument
from bagua.net import congestion
from bagua.net.interfaces import interface_addresses

__all__ = ["main", "report_host"]

_CPU_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_fp16", "asimd", "sve")
_CPU = "cpu"
_DRIVER = Path("/proc/driver/nvidia/version")
_STAGED = "staged through pinned host memory, over the transports above"
# How they move between ranks, by BAGUA_BACKEND.
_DEVICE_PATHS = {
    "auto": f"over NCCL where every rank has a GPU of its own and torch an NCCL that fits, else {_STAGED}",
    "native": f"{_STAGED} (BAGUA_BACKEND)",
    "nccl": "over NCCL, or refused (BAGUA_BACKEND)",
    "torch": f"{_STAGED} (BAGUA_BACKEND)",
}


def _is_built_in(kind: str) -> bool:
    return kind == _CPU or _C.has_device_runtime(kind)


def _cpu_features() -> list[str]:
    with open("/proc/cpuinfo") as file:
        words = set(file.read().split())
    return [flag for flag in _CPU_FLAGS if flag in words]


def _transports(settings: config.Settings) -> str:
    if settings.backend == "torch":
        return "torch (BAGUA_BACKEND)"
    congestion.check(settings.tcp_congestion)
    control = congestion.describe(settings.tcp_congestion)
    tcp = f"tcp ({settings.tcp_streams} streams per peer, congestion control {control})"
    return f"shm {tcp}" if settings.shared_memory else tcp


def _token(settings: config.Settings) -> str:
    if settings.auth_token is not None:
        return "given: ranks prove to each other that they know it"
    return "none: on several hosts whoever reaches the store can join (bagua token); bagua run makes one on one host"


def _devices() -> list[str]:
    """Lines on GPUs: which there are, what drives them, and how their tensors move."""
    import torch

    kinds = [kind for kind in _C.device_kinds if kind != _CPU and _is_built_in(kind)]
    found = [(kind, index) for kind in kinds for index in range(_C.num_devices(kind))]
    if not found:
        if kinds:
            why = f"CUDA finds none ({_C.device_versions(kinds[0])})"
        elif torch.cuda.is_available():
            why = "torch has some, but bagua was built without CUDA: BAGUA_CUDA=1 pip install ., where nvcc is"
        else:
            why = "bagua was built without CUDA, and torch has none either"
        return [f"devices        none: {why}"]
    lines = []
    for kind, index in found:
        name, memory_bytes, architecture = _C.describe_device(kind, index)
        lines.append(f"device         {kind}:{index}  {name}, {memory_bytes / 2**30:.1f} GiB, {architecture}")
    lines += [f"driver         {kind}: {_driver_release(kind)}{_C.device_versions(kind)}" for kind in kinds]
    lines.append(f"nccl           {_nccl()}")
    lines.append(f"device tensors {_DEVICE_PATHS[config.settings().backend]}")
    return lines


def _nccl() -> str:
    """The version that groups would use; torch, if it has one, has loaded it by now. Or why there is none."""
    try:
        return _C.nccl_version()
    except InvalidArgument as error:
        return f"none: {error}"


def _driver_release(kind: str) -> str:
    """Returns NVIDIA's number of its driver, if the kernel has one."""
    if kind != "cuda" or not _DRIVER.exists():
        return ""
    release = re.search(r"Kernel Module.*?(\d+(?:\.\d+)+)", _DRIVER.read_text())
    return f"{release[1]}, " if release else ""


def report_host() -> str:
    """Returns a text on what is built and what this host offers."""
    import torch

    settings = config.settings()
    lines = [
        f"bagua {_C.__version__}  python {platform.python_version()}  torch {torch.__version__}",
        f"machine        {platform.machine()}, {len(os.sched_getaffinity(0))} cores, kernel {platform.release()}",
        f"cpu features   {' '.join(_cpu_features()) or 'none that the kernels use'}",
        f"core           built for {' '.join(kind for kind in _C.device_kinds if _is_built_in(kind))}",
        f"codecs         {' '.join(_C.registered_codecs())}",
        f"transports     {_transports(settings)}",
        f"token          {_token(settings)}",
    ]
    lines += _devices()
    for address in interface_addresses():
        chosen = "  <- BAGUA_SOCKET_IFNAME" if settings.interface == address.interface else ""
        lines.append(f"interface      {address.interface:<12} {address.address}{chosen}")
    return "\n".join(lines)


def _report_peers(progress: Progress) -> None:
    from bagua.choice.links import measure_pair
    from bagua.distributed import collectives, world

    rank, size = world.get_rank(), world.get_world_size()
    group = world.get_default_group()
    between_hosts = "torch" if config.settings().backend == "torch" else "tcp"
    rows = []
    for first in range(size):
        for second in range(first + 1, size):
            if rank == 0:
                progress.tell(f"measuring between ranks {first} and {second} of {size}")
            if rank in (first, second):
                pair = measure_pair(group, second if rank == first else first, rank == first)
                if rank == first:
                    kind = "shm" if second in group.local_ranks else between_hosts
                    latency_us, rate_gb = 1e6 * pair.latency_p50_s, pair.rate_p50 / 1e9
                    rows.append(f"{first:>4} {second:>4}  {kind:<5} {latency_us:>10.1f} us {rate_gb:>8.2f} GB/s")
            collectives.barrier()
    gathered = group.all_gather_plain(rows)
    if rank == 0:
        print("rank peer  over     one way        rate")
        for line in (line for lines in gathered for line in lines):
            print(line)
    path = _device_path()
    if rank == 0 and path:
        print(f"device tensors move by {path}")


def _device_path() -> str:
    """Returns the path of devices' tensors between these ranks, tried with one; empty if a rank has no device."""
    import torch

    from bagua.distributed import world

    counts = [(kind, _C.num_devices(kind)) for kind in _C.device_kinds if kind != _CPU and _is_built_in(kind)]
    usable = [(kind, count) for kind, count in counts if count]
    group = world.get_default_group()
    if not all(group.all_gather_plain(bool(usable))):
        return ""
    kind, count = usable[0]
    device = torch.device(kind, world.get_local_rank() % count)
    group.all_reduce(torch.ones(1, device=device)).wait()
    return group.device_path


def _as_script() -> list[str]:
    """This file, for the launcher. By its path: a rank that runs a module looks in the current folder first, where the
    source of bagua may be that is not built; but where the one that runs is there, nothing else may lead to it."""
    here = Path(__file__).resolve()
    return ["-m", "bagua.cli.doctor"] if here.parents[2] == Path.cwd() else [str(here)]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 when everything that was tried worked."""
    parser = argparse.ArgumentParser(prog="bagua doctor", description=__doc__.split("\n\n")[0])
    parser.add_argument("--nproc-per-node", type=int, default=1, help="measure between that many ranks on this host")
    args = parser.parse_args(argv)
    under_launcher = config.is_launched()
    if args.nproc_per_node < 1:
        parser.error(f"--nproc-per-node is {args.nproc_per_node}, expected 1 or more")
    if not under_launcher and args.nproc_per_node > 1:
        return launch(["--nproc-per-node", str(args.nproc_per_node), *_as_script()])
    is_first = not under_launcher or config.launch_environment().rank == 0
    try:
        if is_first:
            with Progress("bagua doctor") as progress:
                progress.tell("looking at this host")
                report = report_host()
            print(report, flush=True)
    except BaguaError as error:
        print(f"settings       FAILED: {error}", file=sys.stderr)
        return 1
    if not under_launcher:
        print("peers          none (add --nproc-per-node 2, or run it under `bagua run`)")
        return 0
    from bagua.distributed import world

    try:
        with Progress("bagua doctor") as progress:
            if is_first:
                progress.tell("waiting for the other ranks")
            world.init_process_group()
            _report_peers(progress)
    except BaguaError as error:
        print(f"peers          FAILED: {error}", file=sys.stderr)
        return 1
    finally:
        world.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
