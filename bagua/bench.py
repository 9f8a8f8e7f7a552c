"""`bagua bench record`: measures a model's profile, layer by layer, and writes it to a file.

The file is what benchmarks/replay.py plays on shaped links, for every algorithm and beside torch DDP: what they would
do for this model on another network.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .errors import InvalidArgument
from .profiles import check_repetitions, record

__all__ = ["main"]

_TARGET = """\
what to record, `train.py:make` or `package.module:make`: a function without arguments that returns the model and a
function of the model that runs one forward and returns its loss
"""


def _load(target: str) -> Callable[[], Any]:
    """The function that ``target`` names."""
    place, separator, name = target.rpartition(":")
    if not separator:
        raise InvalidArgument(f"{target!r} names no function; write `train.py:make` or `package.module:make`")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            module = importlib.util.module_from_spec(spec)
            sys.path.insert(0, str(Path(place).resolve().parent))  # as when it is run as a script
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except (OSError, ImportError) as error:
        raise InvalidArgument(f"{place!r} cannot be imported: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidArgument(f"{place!r} has no function {name!r}")
    return function


def _check_out(out: Path) -> None:
    """Raises InvalidArgument where no file can be written, before anything is measured for it."""
    if out.is_dir():
        raise InvalidArgument(f"--out is the folder {out}, expected a file, such as {out / 'profile.json'}")
    if not out.parent.is_dir():
        raise InvalidArgument(f"--out is {out}, but there is no folder {out.parent}; make it, or name another one")
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise InvalidArgument(f"--out is {out}, which may not be written; name a file in a folder of your own")


def _record(args: argparse.Namespace) -> None:
    check_repetitions(args.repetitions)
    _check_out(args.out)
    made = _load(args.target)()
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[1]):
        raise InvalidArgument(f"{args.target} returned {type(made).__name__}, expected (model, loss of the model)")
    model, loss = made
    profile = record(model, loss, name=args.name, source=args.source, repetitions=args.repetitions)
    profile.save(args.out)
    print(
        f"{profile.name}: {len(profile.layers)} layers, {profile.num_parameters:,} parameters, "
        f"forward {profile.forward_ms:.1f} ms, backward {profile.backward_ms:.1f} ms -> {args.out}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand; 0 when it has done its work, 1 when it says why not."""
    parser = argparse.ArgumentParser(prog="bagua bench", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="record")
    recorder = commands.add_parser("record", help="measure a model's layers", description=__doc__.split("\n\n")[0])
    recorder.add_argument("target", help=_TARGET)
    recorder.add_argument("--out", type=Path, required=True, help="the profile, a JSON file in a folder that exists")
    recorder.add_argument("--name", default="", help="of the model; its class by default")
    recorder.add_argument("--source", default="", help="a line on the figures; the device by default")
    recorder.add_argument("--repetitions", type=int, default=5, help="steps of which the median counts")
    recorder.set_defaults(run=_record)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except InvalidArgument as error:
        print(f"bagua bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
