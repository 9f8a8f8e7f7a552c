"""Measures the cost of TCP's congestion controls in a collective between hosts.

Hosts are network namespaces on this machine (needs root). The same all_reduce is repeated under each congestion control
of this kernel: "auto", bagua's default, "system", and by name (BAGUA_TCP_CONGESTION). gloo, whose connections use the
system's, runs before in the same processes. Each has the links to itself while it is measured. A sample is the mean
over about ten seconds, because BBR pauses that often, but not after idle time. "limit" is 2(n-1)/n * bytes / rate, the
lower bound of any full-precision all_reduce.

    sudo .venv/bin/python -m benchmarks.micro.congestion [--hosts 4] [--rate 1000] [--quick]
"""

from __future__ import annotations

from bagua.replay import hosts
from bagua.replay.systems import destroy, initialise
from benchmarks.lib import ranks, report, timing
from benchmarks.lib.contenders import GLOO, verified
from benchmarks.micro.tcp_hosts import limit_s

OURS = "bagua tcp"
_SIZE = 100_000_000  # bytes
_SAMPLE_S = 10.0
_MOST_CALLS = 40  # per sample: every SUM in place multiplies by the number of ranks


def measure(size: int, inner: int, repetitions: int) -> dict[str, dict]:
    """Measures on a rank; returns samples by contender."""
    import bagua

    initialise()
    samples = {}
    for name, contender in verified((GLOO, OURS), size).items():
        samples |= timing.interleaved({name: contender}, repetitions=repetitions, inner=inner, barrier=bagua.barrier)
    destroy()
    return samples


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", type=int, default=1000, help="Mbit/s of every host's link")
    args = parser.parse_args()
    reason = hosts.why_not_as_many(args.hosts, least=2)
    if reason is not None:
        parser.error(f"--hosts is {reason}")
    if args.rate < 1:
        parser.error(f"--rate is {args.rate}; expected 1 or more")
    report.need_hosts("congestion")
    limit = limit_s(_SIZE, args.hosts, args.rate)
    inner = 1 if args.quick else min(_MOST_CALLS, max(1, round(_SAMPLE_S / limit)))
    of_system = hosts.system_congestion()
    result = report.Report(
        __file__, "what TCP's congestion control costs a collective", args, {"the system's": of_system}
    )
    rows: list[report.Row] = []
    for chosen in ("auto", "system", *(name for name in hosts.available_congestions() if name != of_system)):
        with hosts.hosts(args.hosts, args.rate) as prefixes:
            per_rank = ranks.run(
                args.hosts,
                {"size": _SIZE, "inner": inner, "repetitions": 3},
                env={"GLOO_SOCKET_IFNAME": "eth0", "BAGUA_SOCKET_IFNAME": "eth0", "BAGUA_TCP_CONGESTION": chosen},
                prefixes=prefixes,
                master_addr=hosts.address(0),
                timeout_s=1800,
            )
        gloo, ours = (timing.slowest([of_rank[name]["wall"] for of_rank in per_rank]) for name in (GLOO, OURS))
        baseline = report.Row(f"gloo, in the run of {chosen}", gloo)
        rows += [baseline, report.Row(f"bagua, {chosen}", ours, baseline)]
    for row in rows:
        row.cells = {"of the limit": f"{limit / row.p50:.3f}"}
    title = f"all_reduce of {_SIZE / 1e6:g} MB, {args.hosts} hosts, {args.rate} Mbit/s each"
    notes = [
        f"A sample is the mean of {inner}. ratio: gloo's median over ours; gloo has the system's, {of_system}. "
        "`bagua doctor`, as the same user, says what auto is."
    ]
    result.add(report.Table(title, rows, notes=notes))
    figure, (axis,) = report.subplots(1)
    report.bars(axis, rows, title, "ms", 1e3)
    axis.axvline(limit * 1e3, color="tab:red", ls=":", label="limit")
    axis.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
