"""A torch device for tests: "emulated", a GPU that is not there.

    import tests.emulated_device as emulated

    emulated.load()                      # builds the extension at the first use on a machine (about 25 s)
    model = model.to("emulated")

Its memory cannot be touched by the host, its streams run late by up to 0.3 ms, so that host code that touches a tensor
dies and a missing event gives wrong numbers; see csrc/device/emulated/ and extension/. torch's own interface works:
torch.accelerator, torch.Stream, torch.Event, autocast, GradScaler, pinned memory. Operators are computed by the host
with the CPU's kernels, so results are the CPU's, bit for bit; random numbers come from the CPU's default generator.

load() makes it the process's accelerator, for good: load it in processes of their own, or where no test minds, and
before the process's first backward, for which torch starts a thread per device.
There are `num_devices` devices. A process that is to fork ranks must not use it before.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build/emulated_device"
NAME = "emulated"
num_devices = 4
# The headers that the extension is written for; older ones lack Stream.native_handle.
TORCH_NEEDED = (2, 13)
DEFAULT_DELAY = 0.3e-3  # seconds
FLAGS = ["-std=c++20", "-Og", "-DAT_PER_OPERATOR_HEADERS", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]


def unavailable() -> str | None:
    """Why the device cannot be built here; None where it can."""
    if shutil.which(compiler()[0]) is None:
        return f"needs a C++20 compiler, and there is no {compiler()[0]}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "needs Python.h (python3-dev)"
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < TORCH_NEEDED:
        return f"needs torch {TORCH_NEEDED[0]}.{TORCH_NEEDED[1]} or later, found {torch.__version__}"
    return None


def build() -> Path:
    """The extension's file, made by the first process that asks; the others wait for it. Registers nothing.

    Raises:
        RuntimeError: it cannot be built; unavailable() says so beforehand, unless the sources are wrong.
    """
    return built(FOLDER / f"bagua_emulated_{_key()}.so", _compile)


def built(made: Path, make: Callable[[Path], None]) -> Path:
    """A file of the tests' own compiler runs: made unless it is there, by the first process that asks."""
    if not made.exists():
        reason = unavailable()
        if reason is not None:
            raise RuntimeError(f"the emulated device {reason}")
        made.parent.mkdir(parents=True, exist_ok=True)
        with open(made.parent / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it should this process die
            if not made.exists():
                make(made)
    return made


@functools.cache
def load() -> types.ModuleType:
    """Registers the device with torch and with bagua, and returns torch.emulated. Builds the extension if need be."""
    from bagua import _C

    extension = _extension()
    torch.utils.rename_privateuse1_backend(NAME)
    module = _device_module(extension)
    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _C.register_device_runtime(NAME, extension.runtime_address())
    return module


def load_in_rank(rank: int, world_size: int) -> None:
    """load() in a rank of a bagua.testing.Pool, as its first function, which imports nothing else."""
    load()


def stream_handle(stream: torch.Stream) -> int:
    """What bagua takes as the stream's handle: torch's stream_id is the runtime's pointer, 0 the default stream's."""
    return stream.stream_id


def counters() -> dict:
    """What happened on all devices since reset_counters(), and what is alive.

    `launches` of bagua's kernels by name; `bytes_to_device`, `bytes_to_host` and `bytes_on_device`, of the user's
    copies and bagua's, not of torch's operators; `live_bytes`, `pinned_bytes`, `num_streams` and `num_events`.
    `num_host_waits`: how often the host was told to wait for a device, by a copy, for a number or explicitly; what the
    CPU waits for to compute an operator does not count.
    """
    return _extension().counters()


def reset_counters() -> None:
    """Launches and bytes are 0."""
    _extension().reset_counters()


def set_delay(seconds: float) -> None:
    """Half of all commands begin late, by up to this; 0: none."""
    _extension().set_delay(seconds)


def limit_memory(num_bytes: int | None) -> None:
    """An allocation that would need more on its device fails; None: as before."""
    extension = _extension()
    extension.limit_memory(extension.memory_bytes if num_bytes is None else num_bytes)


def fail_next_kernel(device: int = 0) -> None:
    """The next of bagua's kernels on the device fails, and after it everything there, until reset_errors()."""
    _extension().fail_next_kernel(device)


def fake_nccl_device() -> int:
    """The address of what a fake libnccl has to know of the device; see nccl.py."""
    return _extension().fake_nccl_device()


def reset_errors() -> None:
    """Devices that failed work again."""
    _extension().reset_errors()


@contextlib.contextmanager
def delayed(seconds: float):
    """set_delay() for a block."""
    set_delay(seconds)
    try:
        yield
    finally:
        set_delay(DEFAULT_DELAY)


# ---- torch.emulated -------------------------------------------------------------------------------------


def _device_module(extension: types.ModuleType) -> types.ModuleType:
    """What torch asks of torch.<device>."""
    module = types.ModuleType(f"torch.{NAME}")

    class device:
        """The current device within a block."""

        def __init__(self, device):
            self.index = torch.device(NAME, device).index if isinstance(device, int) else torch.device(device).index

        def __enter__(self):
            self.before = torch.accelerator.current_device_index()
            if self.index is not None:
                torch.accelerator.set_device_index(self.index)

        def __exit__(self, *_):
            torch.accelerator.set_device_index(self.before)

    def generator(device=None) -> torch.Generator:
        index = torch.device(NAME if device is None else device).index if not isinstance(device, int) else device
        index = torch.accelerator.current_device_index() if index is None else index
        return torch.Generator(torch.device(NAME, index)) if index not in generators else generators[index]

    generators = {index: torch.Generator(torch.device(NAME, index)) for index in range(num_devices)}

    def manual_seed_all(seed: int) -> None:
        for each in generators.values():
            each.manual_seed(seed)

    def stream(stream: torch.Stream | None):
        return contextlib.nullcontext() if stream is None else stream

    module.device = device
    module.Stream = lambda device=None, priority=0: torch.Stream(torch.device(NAME if device is None else device))
    module.Event = lambda enable_timing=False, blocking=False: torch.Event(device=NAME)
    module.stream = stream
    module.is_available = lambda: not extension.is_in_bad_fork()
    module.is_initialized = lambda: True
    module.device_count = lambda: 0 if extension.is_in_bad_fork() else num_devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed_all = module.manual_seed = manual_seed_all
    module.get_rng_state = lambda device=None: generator(device).get_state()
    module.set_rng_state = lambda state, device=None: generator(device).set_state(state)
    module._is_in_bad_fork = extension.is_in_bad_fork
    module._lazy_init = lambda: None
    module._initialized = True
    return module


# ---- the build ------------------------------------------------------------------------------------------


def compiler() -> list[str]:
    """The command of the C++ compiler."""
    return shlex.split(os.environ.get("CXX", "c++"))


def _sources() -> list[Path]:
    here = sorted((Path(__file__).parent / "extension").glob("*.cc"))
    # runtime.cc only for the interface's own vtable: the registry that counts is bagua._C's.
    return [*here, *sorted((ROOT / "csrc/device/emulated").glob("*.cc")), ROOT / "csrc/device/runtime.cc"]


def _headers() -> list[Path]:
    folders = [Path(__file__).parent / "extension", ROOT / "csrc/device", ROOT / "csrc/device/emulated"]
    return [
        *(path for folder in folders for path in sorted(folder.glob("*.h"))),
        *sorted((ROOT / "csrc/common").glob("*.h")),
        ROOT / "csrc/tests/fake_nccl/fake_nccl.h",
    ]


def _key() -> str:
    digest = hashlib.sha256()
    for text in (torch.__version__, sys.version, torch.__file__, *compiler(), *FLAGS):
        digest.update(text.encode() + b"\0")
    for path in [*_sources(), *_headers()]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def _extension() -> types.ModuleType:
    library = build()
    specification = importlib.util.spec_from_file_location(library.stem, library)
    extension = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(extension)
    assert extension.num_devices == num_devices
    return extension


def _compile(library: Path) -> None:
    from torch.utils import cpp_extension

    includes = [f"-I{ROOT}", *(f"-isystem{path}" for path in cpp_extension.include_paths())]
    includes.append(f"-isystem{sysconfig.get_path('include')}")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    for abandoned in library.parent.glob("tmp*"):  # by builds that were killed: the lock is ours now
        shutil.rmtree(abandoned)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="tmp") as scratch:
        made = f"{scratch}/{library.name}"
        # As one: most of what each takes are PyTorch's headers.
        all_sources = Path(scratch) / "all_sources.cc"
        all_sources.write_text("".join(f'#include "{source}"\n' for source in _sources()))
        defined = [abi, f"-DBAGUA_EMULATED_MODULE={library.stem}"]
        linked = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        run_compiler(
            [*compiler(), *FLAGS, *defined, *includes, "-shared", str(all_sources), *libraries, *linked, "-o", made]
        )
        os.replace(made, library)  # whole, or not there


def run_compiler(command: list[str]) -> None:
    """Raises RuntimeError with what it says where it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(
            f"the emulated device does not build:\n{shlex.join(command)}\n{result.stdout}{result.stderr}"
        )
