"""`bagua bench record` measures what a training step of a model costs, `replay` plays it on a network.

The profile that the one writes and the other plays says so layer by layer. What plays it is bagua/replay/command.py;
`links` and `codecs` are in calibrate.py.
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
from typing import TYPE_CHECKING, Any

from bagua.cli import calibrate
from bagua.cli.progress import Progress
from bagua.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["main"]

_HOSTS, _GBIT = 4, (1, 10, 25, 100)  # of which the ratio is printed

_TARGET = """\
what to record, `train.py:make` or `package.module:make`: a function without arguments that returns the model and a
function of the model that runs one forward and returns its loss
"""


_REPLAY = """\
What would each algorithm do for this model on that network?

Plays a model's profile under torch DDP on gloo (float32, its fp16 hook, a cast to bf16) and under every algorithm of
bagua: real tensors, real buckets, real communication, and a sleep instead of compute. Hosts are network namespaces
of this machine with links of the given rate, which needs root; under `bagua run` the ranks and the network are those
that there are:

    sudo $(which bagua) bench replay --profiles vgg16 --hosts 4 --rates 1000
    sudo $(which bagua) bench replay --profiles mine.json --scale 0.1 --rates 100 1000 --csv mine.csv --plot mine.png
    sudo $(which bagua) bench replay --profiles mine.json --systems ddp_fp16 bytegrad qsgd:bits=4,error_feedback=True
    bagua run --nproc-per-node 2 -m bagua bench replay --profiles mine.json --rates 1000
"""
_COLUMNS = """\
columns of the table:
  step, min, max   a step on the slowest rank: median, least and largest sample
  ratio            how many times as fast as the best DDP
  processor        how long a rank's threads ran per step, in the kernel too, a mean; all hosts share the same cores
  exposed          step less compute alone: what communication costs
  waiting          what bagua's own timeline says that a step waited, a mean
  wire             what a host's link carried per step, headers and acknowledgements too
  bound            what nothing can beat that sends these bytes: none leaves before its gradient is ready, the link is a
                   token bucket of its rate, and compute is what it is; of bound is the step over it
  stolen           what the hypervisor took of this machine's processors meanwhile

Results are verified on every rank before times count. A system is measured again, at most twice, while a hypervisor
takes more than 10% of the processors; so is compute alone while it, which only sleeps, takes 5% longer than the profile
says. With --scale 0.1 tensors are a tenth, so 1 Gbit/s stands for 10; buckets do not shrink with them, so DDP and bagua
also play with caps that do. A system whose bytes go by the sides of matrices, as powersgd's do, is refused then: it is
played at scale 1 alone. What the answers mean: docs/performance.md of the project.
"""
_MODELS = Path(__file__).parents[1] / "replay" / "models"  # whose profiles are shipped


def _load(target: str) -> Callable[[], Any]:
    """The function that ``target`` names."""
    module_name, separator, name = target.rpartition(":")
    if not separator:
        raise InvalidArgument(f"{target!r} names no function; write `train.py:make` or `package.module:make`")
    try:
        if module_name.endswith(".py"):
            module = _execute(module_name)
        else:
            sys.path.insert(0, "")
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script may raise anything
        raise InvalidArgument(f"{module_name!r} cannot be imported: {_told(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise InvalidArgument(f"{module_name!r} has no function {name!r}")
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
    """Returns the model and loss that ``target`` made. Raises InvalidArgument if it made anything else."""
    import torch

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
    import bagua.torch_backend  # noqa: F401  # the model's script may name the backend, as in a program of its own
    from bagua.replay.profiles import check_repetitions, record
    from bagua.replay.report import check_file, three_digits

    check_repetitions(args.repetitions)
    check_file("--out", args.out, "profile.json")
    make = _load(args.target)
    try:
        made = make()
    except Exception as error:  # as a script may
        raise InvalidArgument(f"{args.target}() raised {_told(error)}") from error
    model, loss = _checked(made, args.target)
    try:
        with Progress("bagua bench") as progress:
            progress.tell(f"measuring {args.target}")
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


def _add_replay(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="play a model's profile on a network, under every algorithm and torch DDP",
        description=_REPLAY,
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    ours = ", ".join(sorted(path.stem for path in _MODELS.glob("*.json")))
    option = parser.add_argument
    option("--profiles", nargs="+", required=True, help=f"files of `bagua bench record`, or some of {ours}")
    option("--rates", nargs="+", type=int, help="Mbit/s of every host's link (1000); under `bagua run` for the bound")
    option("--hosts", nargs="+", type=int, help="how many (4)")
    option("--ranks-per-host", type=int, help="how many (1)")
    option("--scale", type=float, default=1.0, help="of the tensors' sizes (1)")
    option(
        "--systems",
        nargs="+",
        help="ddp, ddp_fp16, ddp_bf16, ddp_minmax_uint8, auto:risk=R2, or an algorithm, with options; all of them",
    )
    option("--congestion", default="", help="TCP's congestion control, for DDP and bagua (as they come)")
    option("--turns", type=int, default=1, help="how often all systems are measured, one after the other (1)")
    option("--quick", action="store_true", help="few samples: to see that it works")
    option("--csv", type=Path, help="add a row for each system to this file")
    option("--plot", type=Path, help="draw this file, with matplotlib: by rate where there are several")
    parser.set_defaults(run=lambda args: _replay(parser, args))


def _replay(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from bagua.replay import command

    try:
        command.run(command.checked(parser, args))
    except command.RanksFailed as error:
        raise InvalidArgument(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand; 0 when it has done its work, 1 when it says why not."""
    parser = argparse.ArgumentParser(prog="bagua bench", description="What would each algorithm do for your model?")
    commands = parser.add_subparsers(required=True, metavar="record|replay|links|codecs")
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
    _add_replay(commands)
    calibrate.add_to(commands)
    args = parser.parse_args(argv)
    try:
        args.run(args)
    except InvalidArgument as error:
        print(f"bagua bench: {error}", file=sys.stderr)
        return 1
    return 0
