"""The launcher: torchrun, with bagua's settings as options, and with one account of how it ended.

`bagua run --nproc-per-node 2 train.py` and `python -m bagua.run ...` take all of torchrun's options and pass them on.
On one node without a rendezvous of its own it chooses a free port (torchrun's --standalone), and without a token it
makes one, which its ranks find in their environment. Ranks run their script through bagua/cli/rank.py, which says once,
with the rank, what a script has raised.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from bagua.cli.make_token import new_token
from bagua.config import settings
from bagua.errors import InvalidArgument
from bagua.net import congestion

__all__ = ["main", "parse"]

_USAGE = "bagua run [options] train.py [the script's arguments]"

# Option -> the setting that it stands for (bagua/config.py), and its help.
_SETTINGS = {
    "--interface": ("BAGUA_SOCKET_IFNAME", "NAME", "network interface for connections between hosts, e.g. eth0"),
    "--tcp-streams": ("BAGUA_TCP_STREAMS", "N", "TCP connections per peer"),
    "--tcp-congestion": (
        "BAGUA_TCP_CONGESTION",
        "NAME",
        "their congestion control: auto (the default), system, or a name such as cubic",
    ),
    "--shm-ring-bytes": ("BAGUA_SHM_RING_BYTES", "BYTES", "of the message ring per direction and local peer"),
    "--heartbeat-timeout": ("BAGUA_HEARTBEAT_TIMEOUT", "SECONDS", "within which a peer that falls silent is named"),
    "--spin-us": ("BAGUA_SPIN_US", "MICROSECONDS", "that a waiting worker polls before it sleeps"),
    "--auth-token-file": (
        "BAGUA_AUTH_TOKEN_FILE",
        "FILE",
        "with the secret of the job, as `bagua token` makes it (default: a new one, on one host)",
    ),
}
_ONE_NODE = ("1", "1:1")
_NEVER_SENT = "SIGRTMAX"  # the signal that torch's agent handles, since it must handle one

# Those of torchrun's options that most jobs need; their names are compared with torchrun's by a test.
_OFTEN_USED = (
    (("--nproc-per-node",), "N", "processes on this host: a number, or auto, cpu or gpu (default: 1)"),
    (("--nnodes",), "N", "hosts, or MIN:MAX of an elastic job (default: 1)"),
    (("--node-rank",), "N", "number of this host, without a rendezvous backend"),
    (("--master-addr",), "HOST", "of rank 0, without a rendezvous backend"),
    (("--master-port",), "PORT", "there"),
    (("--rdzv-backend",), "NAME", "how hosts find each other, e.g. c10d"),
    (("--rdzv-endpoint",), "HOST:PORT", "where they meet"),
    (("--rdzv-id",), "ID", "of the job, the same on all hosts"),
    (("--max-restarts",), "N", "times that failed ranks are started again (default: 0)"),
    (("-m", "--module"), None, "train.py is the name of a module, as for python -m"),
    (("--no-python",), None, "train.py is a program, not a Python script"),
    (("--log-dir",), "FOLDER", "for the ranks' output"),
    (("-r", "--redirects"), "STREAMS", "to files there: 1 stdout, 2 stderr, 3 both"),
    (("-t", "--tee"), "STREAMS", "to files there and to this terminal"),
)
_RENDEZVOUS_OPTIONS = ("master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "standalone")


class _HelpTorchrun(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from torch.distributed import run as torchrun

        torchruns = torchrun.get_args_parser()
        torchruns.prog = parser.prog
        torchruns.print_help()
        parser.exit()


def _add_own_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("bagua's options")
    for option, (_, metavar, text) in _SETTINGS.items():
        group.add_argument(option, metavar=metavar, help=text)
    group.add_argument("--no-shared-memory", action="store_true", help="use TCP even between ranks of one host")
    group.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="that ranks have to save and end after a signal, before they are killed (default: 30)",
    )
    group.add_argument("--help-torchrun", action=_HelpTorchrun, help="show all of torchrun's options and exit")


def _help() -> str:
    """The help of `bagua run`, for which torch need not be imported."""
    parser = argparse.ArgumentParser(
        prog="bagua run",
        usage=_USAGE,
        description="Starts a training script on several processes.",
        epilog="Further options of torchrun are passed on as well: bagua run --help-torchrun lists them.",
    )
    _add_own_options(parser)
    group = parser.add_argument_group("torchrun's options, the most used ones")
    for names, metavar, text in _OFTEN_USED:
        if metavar is None:
            group.add_argument(*names, action="store_true", help=text)
        else:
            group.add_argument(*names, metavar=metavar, help=text)
    return parser.format_help()


class _Parser(argparse.ArgumentParser):
    """torchrun's options and bagua's. Mistakes are reported with the option and the remedy."""

    def format_help(self) -> str:
        return _help()

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (.*)", message)
        if unknown:
            option = next((word for word in unknown[1].split() if word.startswith("-")), unknown[1]).partition("=")[0]
            near = difflib.get_close_matches(option, re.findall(r"--[a-z][a-z-]+", super().format_help()), 1)
            meant = f"did you mean {near[0]}?" if near else "options of the script come behind it;"
            message = f"{option} is not an option of bagua or torchrun; {meant} bagua run --help lists the options"
        elif "required: training_script" in message:
            message = "which script? Write its name behind the options: bagua run --nproc-per-node 2 train.py"
        elif message.startswith("argument "):
            message += "; bagua run --help-torchrun says what it takes"
        self.exit(2, f"usage: {_USAGE}\nbagua run: {message}\n")


def _refused(message: str, given: dict[str, str]) -> str:
    """Returns config.py's message on a setting, with the option that was given in its place."""
    for option, value in given.items():
        setting = _SETTINGS[option][0]
        for written in (repr(value), value):
            message = message.replace(f"{setting}={written}", f"{option} {written}")
    return message


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The arguments for torchrun and the environment that bagua's own options stand for."""
    from torch.distributed import run as torchrun

    parser = _Parser(prog="bagua run", usage=_USAGE, parents=[torchrun.get_args_parser()], add_help=False)
    _add_own_options(parser)
    args = parser.parse_args(argv)
    values = {option: getattr(args, option[2:].replace("-", "_")) for option in _SETTINGS}
    given = {option: value for option, value in values.items() if value is not None}
    environ = {_SETTINGS[option][0]: value for option, value in given.items()}
    if args.no_shared_memory:
        environ["BAGUA_SHARED_MEMORY"] = "0"
    try:
        congestion.check(settings(changes=environ).tcp_congestion)
    except InvalidArgument as error:
        parser.error(_refused(str(error), given))
    if args.nnodes in _ONE_NODE and all(
        getattr(args, name) == parser.get_default(name) for name in _RENDEZVOUS_OPTIONS
    ):
        args.standalone = True
    if args.standalone and args.local_addr is None:
        # torchrun would publish this host's name, and its ranks would look it up for minutes where nothing resolves it.
        args.local_addr = "127.0.0.1"
    if not (args.module or args.no_python or Path(args.training_script).exists()):
        parser.error(f"there is no script {args.training_script}; write the name of a file, or -m and that of a module")
    return args, environ


def _through_rank_py(args: argparse.Namespace) -> None:
    """Python scripts and modules are run by bagua/cli/rank.py, and by its path: see there."""
    if args.no_python or args.run_path:
        return
    script = ["-m", args.training_script] if args.module else [args.training_script]
    args.training_script = str(Path(__file__).with_name("rank.py"))
    args.training_script_args = [*script, *args.training_script_args]
    args.module = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run a training script on several processes; see `bagua run --help`.

    Returns:
        0, or the exit status of the rank that failed first (128 and the number of the signal that it died of), 1 where
        hosts do not meet or lose the rendezvous, or 130 after Ctrl-C and 143 after SIGTERM, when all ranks have ended.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in (["-h"], ["--help"]):
        print(_help(), end="")
        return 0
    try:
        args, environ = parse(argv)
        return _launch(args, environ)
    except KeyboardInterrupt:
        print("bagua run: interrupted before a rank was started", file=sys.stderr)
        return 128 + signal.SIGINT


def _launch(args: argparse.Namespace, environ: dict[str, str]) -> int:
    from torch.distributed import DistNetworkError, DistStoreError
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    from bagua.cli.endings import Interrupts, quiet_agent, who_failed_first, without_rendezvous

    if args.run_path:
        # The script runs in this process's image, where `import bagua` has happened: it may name the backend.
        import bagua.torch_backend  # noqa: F401
    names = [name.strip() for name in getattr(args, "signals_to_handle", "").split(",") if name.strip()]
    try:
        config = torchrun.config_from_args(args)[0]
        if config.nproc_per_node < 1:  # which torch's agent finds later, and without a word
            raise ValueError(f"--nproc-per-node is {config.nproc_per_node}, expected 1 or more")
        grace_s = getattr(config, "shutdown_timeout", 30) if args.grace is None else args.grace
        if not grace_s > 0:
            raise ValueError(f"--grace is {grace_s:g}, expected a number of seconds above 0")
        interrupts = Interrupts(names, grace_s)
    except (AssertionError, RuntimeError, ValueError) as error:
        _Parser(prog="bagua run").error(f"{error}; bagua run --help-torchrun says what the options take")
    if hasattr(args, "signals_to_handle"):  # older versions of torch handle some signals themselves
        args.signals_to_handle = _NEVER_SENT
    _through_rank_py(args)
    if args.nnodes in _ONE_NODE and settings(changes=environ).auth_token is None:
        environ = {**environ, "BAGUA_AUTH_TOKEN": new_token()}
    os.environ.update(environ)
    with interrupts, quiet_agent():
        try:
            torchrun.run(args)
        except SignalException as error:
            print(interrupts.summary(error.sigval), file=sys.stderr)
            return 128 + error.sigval
        except ChildFailedError as error:
            text, status = who_failed_first(error)
            print(text, file=sys.stderr)
            return status
        except (DistNetworkError, DistStoreError, RendezvousError) as error:
            print(without_rendezvous(error, args), file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
