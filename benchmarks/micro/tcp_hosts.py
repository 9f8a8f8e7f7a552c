"""Compares an all_reduce between hosts with the limit of their links, and measures the gain of codecs.

Hosts are network namespaces on this machine (needs root): two with unshaped links, where the cost of moving a byte
counts, and two and four with links of 1 Gbit/s, where only the number of bytes counts. "limit" is 2(n-1)/n * bytes /
rate, the lower bound of any full-precision all_reduce. "plain sockets" is one TCP stream from every host to the next,
for the same bytes, which shows the rate that headers and the shaper leave. gloo runs in the same processes, in turns.
CPU time is that of all ranks, user and system, per byte of the tensor.

    sudo .venv/bin/python -m benchmarks.micro.tcp_hosts [--cases 2:max 2:1000 4:1000] [--sizes 1e6 55e6 100e6] [--quick]
"""

from __future__ import annotations

import argparse

from bagua.replay import hosts
from bagua.replay.systems import destroy, initialise
from benchmarks.lib import ranks, report, timing
from benchmarks.lib.contenders import GLOO, verified

NAMES = (GLOO, "bagua tcp", "bagua bf16", "bagua minmax_uint8")
PLAIN = "plain sockets"
CASES = ("2:max", "2:1000", "4:1000")  # hosts:Mbit/s
SIZES = {None: (1_000_000, 16_000_000, 100_000_000), 1000: (1_000_000, 55_000_000)}


def measure(sizes: list[int], repetitions: int) -> dict[str, dict]:
    """Measures on a rank; returns samples by size and contender."""
    import bagua

    initialise()
    ring = _Ring()
    samples = {}
    for size in sizes:
        contenders = verified(NAMES, size)
        contenders[PLAIN] = timing.Contender(ring.shift(2 * size * (ring.size - 1) // ring.size))
        samples[str(size)] = timing.interleaved(
            contenders,
            repetitions=repetitions,
            inner=max(1, min(10, 5_000_000 // size)),
            barrier=bagua.barrier,
        )
    ring.close()
    destroy()
    return samples


class _Ring:
    """A TCP connection from every rank to the next one, used by two plain loops of send and recv_into."""

    def __init__(self) -> None:
        import socket

        import bagua

        self.rank, self.size = bagua.get_rank(), bagua.get_world_size()
        with socket.create_server((hosts.address(self.rank), 0)) as listener:
            ports = bagua.all_gather_object(listener.getsockname()[1])
            following = (self.rank + 1) % self.size
            self._to = socket.create_connection((hosts.address(following), ports[following]))
            self._from, _ = listener.accept()

    def shift(self, num_bytes: int):
        """Sends that many bytes to the next rank and receives as many from the previous one, at the same time."""
        import threading

        outgoing, incoming = bytearray(num_bytes), memoryview(bytearray(num_bytes))

        def run() -> None:
            sender = threading.Thread(target=self._to.sendall, args=(outgoing,), name="plain-sender")
            sender.start()
            received = 0
            while received < num_bytes:
                received += self._from.recv_into(incoming[received:])
            sender.join()

        return run

    def close(self) -> None:
        self._to.close()
        self._from.close()


def limit_s(size: int, num_hosts: int, rate_mbit: int) -> float:
    """Returns the time of a full-precision all_reduce's bytes on one host's link, in one direction."""
    return 2 * (num_hosts - 1) / num_hosts * size * 8 / (rate_mbit * 1e6)


def rows_of(size: int, num_hosts: int, rate_mbit: int | None, per_rank: list[dict]) -> list[report.Row]:
    """Returns rows, with gloo first as the baseline."""
    rows: list[report.Row] = []
    for name in (*NAMES, PLAIN):
        samples = [of_rank[str(size)][name] for of_rank in per_rank]
        row = report.Row(f"{size / 1e6:g} MB, {name}", timing.slowest([s["wall"] for s in samples]))
        row.baseline = rows[0] if rows else None
        cpu = report.Row("", timing.total([s["cpu"] for s in samples])).p50
        row.cells = {"CPU ns/byte": f"{cpu * 1e9 / size:.2f}"}
        if rate_mbit is not None:
            row.cells["of the limit"] = f"{limit_s(size, num_hosts, rate_mbit) / row.p50:.3f}"
        full = next((r for r in rows if r.case.endswith("bagua tcp")), None)
        row.cells["to bagua tcp"] = f"{full.p50 / row.p50:.2f}" if full else "-"
        rows.append(row)
    plain = rows[-1]
    for row in rows:
        row.cells["of plain sockets"] = f"{plain.p50 / row.p50:.3f}"
    return rows


def measured_rate(size: int, num_hosts: int, plain: report.Row) -> str:
    """Returns the rate that plain sockets reached on a link."""
    mbit = limit_s(size, num_hosts, 1) / plain.p50
    how = f"both ways at once, by the system's {hosts.system_congestion()}; bagua's is what `bagua doctor` says"
    return f"plain sockets move {mbit:.0f} Mbit/s of payload over a link, {how}"


def parse_case(text: str) -> tuple[int, int | None]:
    """Parses a case: `4:1000` is four hosts with 1000 Mbit/s, `2:max` two hosts with unshaped links."""
    count, _, rate = text.partition(":")
    if not count.isdecimal() or not (rate == "max" or (rate.isdecimal() and int(rate) > 0)):
        raise argparse.ArgumentTypeError(f"{text!r} is no case; expected HOSTS:MBIT, such as 4:1000 or 2:max")
    reason = hosts.why_not_as_many(int(count), least=2)
    if reason is not None:
        raise argparse.ArgumentTypeError(f"{text} has hosts {reason}")
    return int(count), None if rate == "max" else int(rate)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--cases", nargs="+", type=parse_case, metavar="HOSTS:MBIT", help="HOSTS:max is unshaped")
    parser.add_argument("--sizes", type=float, nargs="+", help="bytes, for every case")
    parser.set_defaults(cases=[parse_case(case) for case in CASES])
    args = parser.parse_args()
    report.need_hosts("tcp_hosts")
    result = report.Report(__file__, "all_reduce between hosts over TCP", args)
    figure, axes = report.subplots(len(args.cases))
    for axis, (num_hosts, rate_mbit) in zip(axes, args.cases, strict=True):
        default = SIZES.get(rate_mbit, SIZES[1000])
        sizes = [int(size) for size in args.sizes or default]
        with hosts.hosts(num_hosts, rate_mbit) as prefixes:
            per_rank = ranks.run(
                num_hosts,
                {"sizes": sizes, "repetitions": 3 if args.quick else 7},
                env={"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0"},
                prefixes=prefixes,
                master_addr=hosts.address(0),
                timeout_s=1800,
            )
        title = f"{num_hosts} hosts, " + (f"{rate_mbit} Mbit/s each" if rate_mbit else "unshaped links")
        rows = [row for size in sizes for row in rows_of(size, num_hosts, rate_mbit, per_rank)]
        notes = [
            "ratio: gloo's median over the case's; `to bagua tcp`: full precision's median over the case's.",
            measured_rate(sizes[-1], num_hosts, rows[-1]) + ".",
        ]
        result.add(report.Table(title, rows, notes=notes))
        largest = rows[-len(NAMES) - 1 :]
        report.bars(axis, largest, title, "ms", 1e3)
        if rate_mbit is not None:
            axis.axvline(limit_s(sizes[-1], num_hosts, rate_mbit) * 1e3, color="tab:red", ls=":", label="limit")
            axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
