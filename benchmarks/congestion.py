"""What does the congestion control of TCP cost a collective between hosts?

Hosts are network namespaces on this machine (needs root). The same all_reduce again and again, for long enough to see
what happens every ten seconds, under each congestion control that every process may choose (BAGUA_TCP_CONGESTION):
"auto", which is the default, "system", and by name. gloo, whose connections have the system's, runs in the same
processes, in turns. "limit" is 2(n-1)/n * bytes / rate, what no full-precision all_reduce can beat; since pauses are
rare, "of the limit" is of the mean.

    sudo .venv/bin/python benchmarks/congestion.py [--hosts 4] [--rate 1000] [--bytes 26214400] [--seconds 30]
"""

from __future__ import annotations

import statistics

import hosts
import ranks
import report
import timing
from contenders import GLOO, destroy, initialise, verified
from tcp_hosts import limit_s

OURS = "bagua tcp"


def measure(size: int, repetitions: int) -> dict[str, dict]:
    """On a rank: samples by contender."""
    import bagua

    initialise()
    samples = timing.interleaved(verified((GLOO, OURS), size), repetitions=repetitions, barrier=bagua.barrier)
    destroy()
    return samples


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of every host's link")
    parser.add_argument("--bytes", type=int, default=25 << 20, help="of the tensor; a bucket's")
    parser.add_argument("--seconds", type=float, default=30, help="of all_reduces, each of ours and of gloo")
    args = parser.parse_args()
    reason = hosts.why_not()
    if reason is not None:
        print(f"congestion SKIPPED: {reason}.")
        return
    limit = limit_s(args.bytes, args.hosts, args.rate)
    repetitions = max(3, round((3 if args.quick else args.seconds) / limit))
    result = report.Report(
        __file__,
        "what TCP's congestion control costs a collective",
        args,
        {"the system's": hosts.system_congestion()},
    )
    rows: list[report.Row] = []
    for chosen in ("auto", "system", *hosts.congestions("allowed")):
        with hosts.hosts(args.hosts, args.rate) as prefixes:
            per_rank = ranks.run(
                args.hosts,
                {"size": args.bytes, "repetitions": repetitions},
                env={"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0", "BAGUA_TCP_CONGESTION": chosen},
                prefixes=prefixes,
                master_addr=hosts.address(0),
                timeout_s=1800,
            )
        if not rows:
            rows.append(report.Row(f"{GLOO}, system", _samples(per_rank, GLOO)))
        rows.append(report.Row(f"bagua, {chosen}", _samples(per_rank, OURS), rows[0]))
    for row in rows:
        mean = statistics.mean(row.samples)
        row.cells = {"mean ms": report.three_digits(mean * 1e3), "of the limit": f"{limit / mean:.3f}"}
    title = f"all_reduce of {args.bytes / 1e6:.3g} MB, {args.hosts} hosts, {args.rate} Mbit/s each"
    result.add(report.Table(title, rows, notes=["ratio: gloo's median over the case's."]))
    figure, (axis,) = report.subplots(1)
    for row in rows:
        axis.plot(sorted(sample * 1e3 for sample in row.samples), label=row.case)
    axis.set_xlabel("all_reduces, sorted by time")
    axis.set_ylabel("ms")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    result.write(figure)


def _samples(per_rank: list[dict], name: str) -> list[float]:
    return timing.slowest([of_rank[name]["wall"] for of_rank in per_rank])


if __name__ == "__main__":
    ranks.main(measure, main)
