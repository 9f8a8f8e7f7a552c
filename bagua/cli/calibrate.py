"""`bagua bench links` and `bagua bench codecs`: what simulations and `algorithm="auto"` count with, measured here.

The links' figures are kept in the user's cache, by pair of hosts and with the date, where `bagua simulate --link
measured` finds them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import TYPE_CHECKING, Any

from bagua import config
from bagua.cli.progress import Progress
from bagua.cli.run import main as launch
from bagua.errors import BaguaError, InvalidArgument
from bagua.files import replace_file

if TYPE_CHECKING:
    from bagua.choice.links import Network

_STREAMS = (1, 2, 4, 8)
_LIMIT_S = 1.0  # of a ring
_FILE = "links.json"

_LINKS = """\
Measures the network between hosts: each pair alone, and all hosts at once, with several TCP streams.

    bagua run --nnodes 4 ... -m bagua bench links      # on each host
    bagua bench links --nproc-per-node 2               # between ranks of this host
"""
_CODECS = """\
Measures what codecs cost on this machine: one core, float32, messages of the size that collectives cut tensors into.
"""
_COLUMNS = """\
columns:
  bits      of a value on the wire
  encode, decode   gigabytes of float32 per second, decode with the addition that follows
  pays      links up to this rate: beyond it encoding and decoding take longer than sending all 32 bits would
"""
_SIZES = (64 << 10, 1 << 20, 16 << 20)
_REPEAT_S = 0.05


def add_to(commands: Any) -> None:
    """Adds both to the subcommands of `bagua bench`."""
    links = commands.add_parser(
        "links",
        help="measure the network between hosts",
        description=_LINKS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    links.add_argument("--nproc-per-node", type=int, default=0, help="start so many ranks on this host first")
    links.set_defaults(run=_links)
    codecs = commands.add_parser(
        "codecs",
        help="measure what codecs cost on this machine",
        description=_CODECS,
        epilog=_COLUMNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    codecs.add_argument("--codecs", nargs="+", help="names, with options as in qsgd:bits=4; all of them")
    codecs.set_defaults(run=_codecs)


# --- links


def measured_link() -> dict[str, Any]:
    """Returns what `bagua bench links` has measured last of all hosts at once: up, latency, burst and date.

    Raises:
        InvalidArgument: it has not run on this machine.
    """
    path = config.cache_folder() / _FILE
    try:
        return json.loads(path.read_text())["all"]
    except (OSError, ValueError, KeyError):
        raise InvalidArgument(
            f"{path} has no measured link; run `bagua bench links` between your hosts first"
        ) from None


def _links(args: argparse.Namespace) -> None:
    if not config.is_launched():
        if args.nproc_per_node < 2:
            raise InvalidArgument("there is one rank; add --nproc-per-node 2, or run it under `bagua run`")
        status = launch(["--nproc-per-node", str(args.nproc_per_node), "-m", "bagua", "bench", "links"])
        raise SystemExit(status)
    try:
        with Progress("bagua bench") as progress:
            _measure_links(progress)
    except BaguaError as error:
        raise InvalidArgument(str(error)) from error


def _measure_links(progress: Progress) -> None:
    import platform

    import torch

    from bagua.choice.links import measure_network, measure_pair
    from bagua.distributed import world

    settings, by_streams = config.settings(), {}
    world.init_process_group()
    group, cpu = world.get_default_group(), torch.device("cpu")
    by_streams[settings.tcp_streams] = measure_network(group, cpu, _LIMIT_S)
    if len(group.nodes.members) > 1 and settings.backend != "torch":
        for streams in _STREAMS:
            if group.rank == 0:
                progress.tell(f"all hosts at once, with {streams} streams between them")
            with world.tcp_streams(streams):
                by_streams[streams] = measure_network(world.new_group(), cpu, _LIMIT_S)
    leaders = group.nodes.leaders if len(group.nodes.members) > 1 else list(range(group.size))
    names = group.all_gather_plain(platform.node())
    rows: list[list[Any]] = []
    pairs = [(a, b) for index, a in enumerate(leaders) for b in leaders[index + 1 :]]
    for a, b in pairs:
        if group.rank == 0:
            progress.tell(f"ranks {a} and {b} alone")
        if group.rank in (a, b):
            pair = measure_pair(group, b if group.rank == a else a, group.rank == a)
            if group.rank == a:
                rows.append([a, b, pair.latency_p50_s, pair.latency_p99_s, pair.rate_p50, pair.rate_least])
        group.barrier(blocking=True).wait()
    found = [row for part in group.all_gather_plain(rows) for row in part]
    if group.rank == 0:
        _say_links(found, names, by_streams, settings.tcp_streams)
    group.barrier(blocking=True).wait()
    world.destroy_process_group()


def _say_links(found: list[list[Any]], names: list[str], by_streams: dict[int, Network], chosen: int) -> None:
    from bagua.replay.report import aligned

    head = ["alone", "one way us, median", "99 of 100", "Gbit/s, median", "least of 5"]
    cells = [
        [f"{names[a]} (rank {a}) and {names[b]} ({b})", f"{1e6 * p50:.1f}", f"{1e6 * p99:.1f}"]
        + [f"{8e-9 * one:.3g}" for one in (rate, least)]
        for a, b, p50, p99, rate, least in found
    ]
    print("\n".join(aligned([head, *cells])))
    network = by_streams[chosen]
    link = network.link
    print(
        f"\nall {network.hosts} at once, each to the next: {link.up / 1e9:.3g} Gbit/s out and in per host, one way "
        f"{1e6 * link.latency:.0f} us, {link.burst / 1024:.0f} KiB saved up by a rest of 0.1 s"
    )
    if len(by_streams) > 1:
        rates = {streams: one.link.up for streams, one in by_streams.items()}
        said = ", ".join(f"{streams}: {rate / 1e9:.3g}" for streams, rate in sorted(rates.items()))
        fastest = max(rates, key=lambda streams: rates[streams])
        advice = f"; BAGUA_TCP_STREAMS={fastest} would be faster" if rates[fastest] > 1.05 * rates[chosen] else ""
        print(f"by streams per peer, Gbit/s: {said}; {chosen} are in use{advice}")
    today = f"{date.today()}"
    path = config.cache_folder() / _FILE
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        kept = {}
    for a, b, *figures in found:
        keys = ("latency_p50_s", "latency_p99_s", "rate_p50", "rate_least")
        kept[f"{names[a]} {names[b]}"] = {**dict(zip(keys, figures, strict=True)), "date": today}
    kept["all"] = {"up": link.up, "latency": link.latency, "burst": link.burst, "hosts": network.hosts, "date": today}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(kept, indent=1) + "\n").encode())
    print(f"kept in {path}, for `bagua simulate --link measured`")


# --- codecs


def _codecs(args: argparse.Namespace) -> None:
    import torch

    from bagua.codecs import available, get
    from bagua.replay.report import aligned

    codecs = [get(name) for name in args.codecs or available()]
    torch.set_num_threads(1)
    rows = [["codec", "bits", *(f"{what} {_named(size)}" for size in _SIZES for what in ("encode", "decode")), "pays"]]
    with Progress("bagua bench") as progress:
        for codec in codecs:
            progress.tell(codec.spec)
            speeds = []
            for size in _SIZES:
                values = torch.randn(size // 4, generator=torch.Generator().manual_seed(0), device="cpu")
                encoded, total = codec.encode(values), torch.zeros_like(values)
                taken = [_seconds(codec.encode, values), _seconds(codec.decode_add, encoded, total)]
                speeds += [size / 1e9 / seconds for seconds in taken]
            bits = 8 * codec.wire_bytes(_SIZES[1] // 4, torch.float32) / (_SIZES[1] // 4)
            # Each value is encoded and decoded twice in an all_reduce, and leaves twice.
            pays = 8 / sum(1 / speed for speed in speeds[2:4])
            rows.append([codec.spec, f"{bits:.3g}", *(f"{speed:.3g}" for speed in speeds), f"{pays:.3g} Gbit/s"])
    print("\n".join(aligned(rows)))


def _named(size: int) -> str:
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def _seconds(function: Callable[..., object], *args: Any) -> float:
    """Returns the median seconds of a call, repeated for a twentieth of a second."""
    function(*args)
    taken: list[float] = []
    end = time.perf_counter() + _REPEAT_S
    while not taken or time.perf_counter() < end:
        begin = time.perf_counter()
        function(*args)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
