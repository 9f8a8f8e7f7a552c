"""The `bagua` command: run, doctor, bench, timeline. Each subcommand is the main() of the module that does the work."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from bagua._C import __version__

__all__ = ["main"]

_COMMANDS = {
    "run": ("bagua.cli.run", "start a training script on several processes (torchrun's options and bagua's)"),
    "doctor": ("bagua.cli.doctor", "show what is built and what this host and the ranks' connections offer"),
    "bench": ("bagua.cli.bench", "measure a model, and play it on a network under every algorithm and torch DDP"),
    "timeline": ("bagua.profiler.report", "merge the ranks' timelines on one clock, and say who waited for whom"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch to a subcommand; returns its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: bagua COMMAND [options], or bagua --version\n")
        for name, (_, text) in _COMMANDS.items():
            print(f"  {name:<9} {text}")
        return 0
    if argv[0] == "--version":
        print(f"bagua {__version__}")
        return 0
    if argv[0] not in _COMMANDS:
        print(f"bagua: {argv[0]!r} is not a command; the commands are {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    return importlib.import_module(_COMMANDS[argv[0]][0]).main(argv[1:]) or 0
