"""The `bagua` command. Each subcommand is the ``main(argv)`` of a module of its own, which reads the rest of the line.

These modules import torch, and what needs it, where they use it: help, the version and mistakes come at once.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from bagua._C import __version__

__all__ = ["main"]

_COMMANDS = {
    "run": "start a training script on several processes",
    "doctor": "show what this host and its connections offer",
    "bench": "measure a model, and play it on a network",
    "simulate": "play a model on a network that is not there",
    "timeline": "merge the ranks' timelines, and say who waited",
    "token": "make the secret that the ranks of a job prove to each other",
}
# These are not bagua/cli/<command>.py: the interpreter that runs rank.py looks there for Python's own modules first.
_MODULES = {"token": "make_token"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the commands\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="bagua", description="Data-parallel training for slow networks.")
    parser.add_argument("--version", action="version", version=f"bagua {__version__}")
    commands = parser.add_subparsers(
        title="commands", dest="command", metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    for name, text in _COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns its exit status. Without one, print which there are."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    # The rest of the line is the subcommand's, and for `run` torchrun's and the script's.
    command = parser.parse_args(argv[:1]).command
    status: int = importlib.import_module(f"bagua.cli.{_MODULES.get(command, command)}").main(argv[1:])
    return status
