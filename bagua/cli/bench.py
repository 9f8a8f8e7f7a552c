"""`bagua bench record` measures what a training step of a model costs, `replay` plays it on a network.

The profile that the one writes and the other plays says so layer by layer. What plays it is bagua/replay/command.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bagua.errors import InvalidArgument
from bagua.replay import command
from bagua.replay.profiles import check_repetitions, record
from bagua.replay.report import check_file, three_digits

__all__ = ["main"]

_HOSTS, _GBIT = 4, (1, 10, 25, 100)  # of which the ratio is printed

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
            module = _execute(place)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a script may raise anything
        raise InvalidArgument(f"{place!r} cannot be imported: {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidArgument(f"{place!r} has no function {name!r}")
    return function


def _execute(path: str) -> ModuleType:
    """The module of a script, which finds itself in sys.modules, as dataclasses and pickle need it.

    It has the script's name, by which processes that it starts can import it too, unless that is another module's.
    """
    name = Path(path).stem
    if name in sys.modules or not name.isidentifier():
        name = f"_bagua_bench_{name.replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as when it is run as a script
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _told(error: BaseException) -> str:
    """The error, and where in the user's code it was raised."""
    text = "".join(traceback.format_exception_only(error)).strip()
    if isinstance(error, SystemExit):
        text += '; it ends when it is imported: put what runs it below `if __name__ == "__main__":`'
    ours = (__file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen importlib")
    ]
    return "\n".join([text, *(line.rstrip() for line in traceback.format_list(frames))])


def _checked(made: Any, target: str) -> tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]:
    """What ``target`` returned. Raises InvalidArgument where it is no model and its loss, in this order."""
    if isinstance(made, tuple) and len(made) == 2:
        model, loss = made
        if isinstance(model, torch.nn.Module) and callable(loss) and not isinstance(loss, torch.nn.Module):
            return model, loss
    is_tuple = isinstance(made, tuple)
    returned = f"({', '.join(type(one).__name__ for one in made)})" if is_tuple else type(made).__name__
    raise InvalidArgument(
        f"{target} returned {returned}, expected (model, loss): a torch.nn.Module, and a function of it that runs one "
        "forward and returns its loss"
    )


def _record(args: argparse.Namespace) -> None:
    check_repetitions(args.repetitions)
    check_file("--out", args.out, "profile.json")
    make = _load(args.target)
    try:
        made = make()
    except Exception as error:  # as a script may
        raise InvalidArgument(f"{args.target}() raised {_told(error)}") from error
    model, loss = _checked(made, args.target)
    try:
        profile = record(model, loss, name=args.name, source=args.source, repetitions=args.repetitions)
    except InvalidArgument:
        raise
    except Exception as error:
        raise InvalidArgument(f"a step of {args.target} raised {_told(error)}") from error
    profile.save(args.out)
    print(
        f"{profile.name}: {len(profile.layers)} layers, {profile.num_parameters:,} parameters, "
        f"forward {profile.forward_ms:.1f} ms, backward {profile.backward_ms:.1f} ms -> {args.out}"
    )
    ratios = (f"{three_digits(profile.wire_over_compute(_HOSTS, gbit * 1000))} at {gbit}" for gbit in _GBIT)
    print(f"wire over compute, {_HOSTS} hosts with links of so many Gbit/s: {', '.join(ratios)}")
    print("below 1 stay with DDP or gradient_allreduce; 1 to 3: bytegrad; above: qsgd with bits=4")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand; 0 when it has done its work, 1 when it says why not."""
    parser = argparse.ArgumentParser(prog="bagua bench", description="What would each algorithm do for your model?")
    commands = parser.add_subparsers(required=True, metavar="record|replay")
    recorder = commands.add_parser(
        "record",
        help="measure what a training step of a model costs, layer by layer",
        description="Measures a model's profile, layer by layer, on the device that the model is on, writes it to a "
        "file, and says what of its training is communication.",
    )
    recorder.add_argument("target", help=_TARGET)
    recorder.add_argument("--out", type=Path, required=True, help="the profile, a JSON file in a folder that exists")
    recorder.add_argument("--name", default="", help="of the model; its class by default")
    recorder.add_argument("--source", default="", help="a line on the figures; the device by default")
    recorder.add_argument("--repetitions", type=int, default=5, help="steps of which the median counts")
    recorder.set_defaults(run=_record)
    command.add_to(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except (InvalidArgument, command.RanksFailed) as error:
        print(f"bagua bench: {error}", file=sys.stderr)
        return 1
    return 0
