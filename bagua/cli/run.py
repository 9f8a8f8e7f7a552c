"""The launcher: torchrun, with bagua's settings as options.

`bagua run --nproc-per-node 2 train.py` and `python -m bagua.run ...` take all of torchrun's options and pass them on.
On one node without a rendezvous of its own it chooses a free port (torchrun's --standalone).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch.distributed import run as torchrun

from bagua.config import settings
from bagua.errors import InvalidArgument
from bagua.net import congestion

__all__ = ["main", "parse"]

# Option -> the setting that it stands for (bagua/config.py).
_SETTINGS = {
    "interface": "BAGUA_SOCKET_IFNAME",
    "tcp_streams": "BAGUA_TCP_STREAMS",
    "tcp_congestion": "BAGUA_TCP_CONGESTION",
    "shm_ring_bytes": "BAGUA_SHM_RING_BYTES",
    "spin_us": "BAGUA_SPIN_US",
}
_RENDEZVOUS_OPTIONS = ("master_addr", "master_port", "rdzv_endpoint", "rdzv_id", "rdzv_backend", "standalone")


def _parser() -> argparse.ArgumentParser:
    parser = torchrun.get_args_parser()
    parser.prog = "bagua run"
    group = parser.add_argument_group("bagua")
    group.add_argument("--interface", help="network interface for connections between hosts, e.g. eth0")
    group.add_argument("--tcp-streams", type=int, help="TCP connections per peer")
    group.add_argument(
        "--tcp-congestion", help="their congestion control: auto (the default), system, or a name such as cubic"
    )
    group.add_argument("--shm-ring-bytes", type=int, help="bytes of the message ring per direction and local peer")
    group.add_argument("--spin-us", type=int, help="microseconds that a waiting worker polls before it sleeps")
    group.add_argument("--no-shared-memory", action="store_true", help="use TCP even between ranks of one host")
    group.add_argument("--auth-token-file", help="file with the secret that connections between ranks must prove")
    return parser


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The arguments for torchrun and the environment that bagua's own options stand for."""
    parser = _parser()
    args = parser.parse_args(argv)
    given = {name: getattr(args, option) for option, name in _SETTINGS.items()}
    environ = {name: str(value) for name, value in given.items() if value is not None}
    if args.no_shared_memory:
        environ["BAGUA_SHARED_MEMORY"] = "0"
    if args.auth_token_file:
        try:
            with open(args.auth_token_file) as file:
                environ["BAGUA_AUTH_TOKEN"] = file.read().strip()
        except OSError as error:
            parser.error(f"--auth-token-file {args.auth_token_file}: {error.strerror}")
        if not environ["BAGUA_AUTH_TOKEN"]:
            parser.error(f"--auth-token-file {args.auth_token_file}: the file is empty")
    try:
        congestion.check(settings(changes=environ).tcp_congestion)
    except InvalidArgument as error:
        parser.error(str(error))
    one_node = args.nnodes in ("1", "1:1")
    if one_node and all(getattr(args, name) == parser.get_default(name) for name in _RENDEZVOUS_OPTIONS):
        args.standalone = True
    if args.standalone and args.local_addr is None:
        # torchrun would publish this host's name, and its ranks would look it up for minutes where nothing resolves it.
        args.local_addr = "127.0.0.1"
    return args, environ


def main(argv: Sequence[str] | None = None) -> None:
    """Run a training script on several processes; see `bagua run --help`."""
    args, environ = parse(sys.argv[1:] if argv is None else argv)
    os.environ.update(environ)
    torchrun.run(args)


if __name__ == "__main__":
    main()
