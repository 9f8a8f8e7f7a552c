"""Finds the sizes at which a collective's fastest algorithm changes, and compares them with the default thresholds.

Each threshold is set so high that the algorithm for small messages always runs, then so low that it never runs
(BAGUA_THRESHOLDS), the two in turns, over sizes around the default. The crossover is the largest size up to which the
small algorithm wins. If it is far from the default on your network, set the threshold. Measured are ranks of one host,
and hosts with links of 1 Gbit/s if network namespaces can be made (root).

    .venv/bin/python -m benchmarks.micro.crossovers [--ranks 4] [--quick]
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from bagua.replay import hosts
from benchmarks.lib import ranks, report, timing

ALWAYS, NEVER = 1 << 50, 0
SIZES = tuple(1 << exponent for exponent in range(10, 22))  # 1 KiB to 2 MiB


@dataclass(frozen=True)
class Case:
    """A threshold, the call that it affects, and the two algorithms; sizes count as the threshold does."""

    threshold: str
    call: str
    small: str
    large: str
    env: tuple[tuple[str, str], ...] = ()


_TCP = (("BAGUA_SHARED_MEMORY", "0"),)
ON_ONE_HOST = (
    Case("recursive_doubling_bytes", "all_reduce", "recursive doubling", "direct"),
    Case("direct_bytes", "all_gather", "messages", "direct"),
    Case("direct_bytes", "broadcast", "messages", "direct"),
    Case("direct_bytes", "reduce_scatter", "messages", "direct"),
    Case("recursive_doubling_bytes", "all_reduce", "recursive doubling", "ring", _TCP),
)
BETWEEN_HOSTS = (
    Case("recursive_doubling_bytes", "all_reduce", "recursive doubling", "ring"),
    Case("pairwise_bytes", "all_gather", "pairwise", "ring"),
    Case("pairwise_bytes", "reduce_scatter", "stripes", "ring"),
    Case("broadcast_tree_bytes", "broadcast", "tree", "chain"),
    Case("reduce_tree_bytes", "reduce", "tree", "stripes"),
)


def measure(call: str, sizes: list[int], repetitions: int) -> dict[str, list[float]]:
    """Measures on a rank, with the thresholds of the environment; returns seconds per call by size."""
    import torch

    import bagua

    torch.set_num_threads(1)
    bagua.init_process_group(timeout=120)
    samples = {}
    for size in sizes:
        run = _prepare(call, size // 4)
        inner = max(3, min(100, 2_000_000 // size))
        timed = timing.interleaved(
            {call: timing.Contender(run)}, repetitions=repetitions, inner=inner, barrier=bagua.barrier
        )
        samples[str(size)] = timed[call]["wall"]
    bagua.destroy_process_group()
    return samples


def _prepare(call: str, numel: int) -> Callable[[], None]:
    """Returns the call on zeros, whose sums in place stay zero."""
    import bagua

    size = bagua.get_world_size()
    block, wide = bagua.empty(numel), bagua.empty(size * numel)
    return {
        "all_reduce": functools.partial(bagua.all_reduce, block),
        "reduce": functools.partial(bagua.reduce, block, 0),
        "broadcast": functools.partial(bagua.broadcast, block, 0),
        "all_gather": functools.partial(bagua.all_gather, wide, block),
        "reduce_scatter": functools.partial(bagua.reduce_scatter, block, wide),
    }[call]


def rows_of(case: Case, sizes: list[int], small: list[list[dict]], large: list[list[dict]]) -> list[report.Row]:
    """Returns one row per size: the large algorithm's time, compared with the small one's."""
    rows = []
    for size in sizes:
        times = [
            [sample for per_rank in runs for sample in timing.slowest([of_rank[str(size)] for of_rank in per_rank])]
            for runs in (small, large)
        ]
        baseline = report.Row(f"{size >> 10} KiB", times[0])
        cells = {f"{case.small} p50": report.three_digits(baseline.p50 * 1e6)}
        rows.append(report.Row(f"{size >> 10} KiB, {case.large}", times[1], baseline, cells))
    return rows


def crossover(rows: list[report.Row], sizes: list[int]) -> int:
    """Returns the size up to which the small algorithm wins more often than it loses, robust against a noisy size."""
    gains = [0.0]
    for row in rows:
        gains.append(gains[-1] + statistics.median(row.samples) - row.baseline.p50)
    best = max(range(len(gains)), key=gains.__getitem__)
    return sizes[best - 1] if best > 0 else 0


def run_case(case: Case, num_ranks: int, sizes: list[int], args, **where) -> list[report.Row]:
    """Runs both algorithms in turns."""
    runs: dict[int, list[list[dict]]] = {ALWAYS: [], NEVER: []}
    for _ in range(1 if args.quick else 3):
        for value, taken in runs.items():
            env = {**dict(case.env), **where.get("env", {}), "BAGUA_THRESHOLDS": f"{case.threshold}={value}"}
            options = {"call": case.call, "sizes": sizes, "repetitions": 3 if args.quick else 7}
            taken.append(ranks.run(num_ranks, options, timeout_s=600, **{**where, "env": env}))
    return rows_of(case, sizes, runs[ALWAYS], runs[NEVER])


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="bytes")
    args = parser.parse_args()
    sizes = sorted(int(size) for size in args.sizes)
    result = report.Report(__file__, "where one algorithm takes over from another", args)
    figure, axes = report.subplots(len(ON_ONE_HOST), 2)

    def show(case: Case, setting: str, rows: list[report.Row]) -> None:
        found = crossover(rows, sizes)
        title = f"{case.threshold}: {case.call}, {case.small} or {case.large}, {setting}"
        result.add(
            report.Table(
                title,
                rows,
                unit="us",
                notes=[f"ratio: {case.small}'s median over {case.large}'s. Crossover: {found >> 10} KiB."],
            )
        )
        axis = axes.pop(0)
        axis.plot(sizes, [row.baseline.p50 * 1e6 for row in rows], marker="o", label=case.small)
        axis.plot(sizes, [row.p50 * 1e6 for row in rows], marker="o", label=case.large)
        axis.axvline(max(found, sizes[0]), color="tab:red", ls=":", label="crossover")
        axis.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us", title=f"{case.call}, {setting}")
        axis.legend(fontsize=7)

    for case in ON_ONE_HOST:
        setting = f"{args.ranks} ranks of one host" + (", tcp" if case.env else "")
        show(case, setting, run_case(case, args.ranks, sizes, args))
    reason = hosts.why_not()
    if reason is not None:
        result.say(f"between hosts SKIPPED: {reason}.")
    else:
        with hosts.hosts(args.ranks, 1000) as prefixes:
            where = {"prefixes": prefixes, "master_addr": hosts.address(0), "env": {"BAGUA_SOCKET_IFNAME": "eth0"}}
            for case in BETWEEN_HOSTS:
                setting = f"{args.ranks} hosts, 1 Gbit/s"
                show(case, setting, run_case(case, args.ranks, sizes, args, **where))
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
