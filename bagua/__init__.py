"""Bagua: data-parallel training for networks that are slower than the accelerators behind them.

>>> import bagua
>>> {"gradient_allreduce", "bytegrad", "qsgd", "qadam", "decentralized"} <= set(bagua.algorithms.available())
True
"""

import importlib.util
import os
import sys
from typing import TYPE_CHECKING


def _is_the_command() -> bool:
    """Returns True if this is the command: the script `bagua`, `python -m bagua` or `python -m bagua.run`."""
    arguments = getattr(sys, "argv", [])
    started = sys.orig_argv[-len(arguments)] if 0 < len(arguments) <= len(sys.orig_argv) else ""
    if arguments and arguments[0] == "-m":  # so it is while Python imports the packages that contain the module
        return started in ("bagua", "bagua.run") or started.startswith("bagua.cli.")
    return bool(started) and started == arguments[0] and os.path.basename(started) == "bagua"


if importlib.util.find_spec(f"{__name__}._C") is None:
    _folder = os.path.dirname(os.path.abspath(__path__[0]))
    raise ImportError(
        f"{_folder} is the source of bagua, which is not built there for this Python (bagua._C is missing). If bagua "
        "is installed, change to another folder: Python imports what is in the current one first. To build it in "
        "place: make build, or pip install -e .",
        name=f"{__name__}._C",
    )

# A program that imports bagua can use the backend "bagua" of torch.distributed, which must be registered with torch, so
# torch is imported here. The command registers no backend, and its help should not wait for torch: there each name is
# imported when it is first used.
if TYPE_CHECKING or not _is_the_command():
    from ._public import *  # noqa: F403
    from ._public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("_") and name not in ("__all__", "__version__"):
            raise missing
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        from . import _public

        try:
            return getattr(_public, name)
        except AttributeError:
            raise missing from None

    def __dir__() -> list[str]:
        from . import _public

        return sorted({*globals(), *_public.__all__})
