"""Measures the smallest all_reduce between processes of one host, call by call.

8 bytes over shared memory, 2 and 4 ranks: memory of bagua.empty, an ordinary tensor, gloo and, if mpi4py can be
imported and mpirun is found, OpenMPI. All run in the same processes, in turns of some thousand calls, through one loop
that times every call; a sample is the slowest rank's time of a call. OpenMPI polls while it waits; with more ranks than
cores mpirun makes it yield.

    .venv/bin/python -m benchmarks.micro.latency [--ranks 2 4] [--turns 7] [--no-mpi] [--quick]
"""

from __future__ import annotations

import statistics
import time

from bagua.replay.systems import destroy, initialise
from benchmarks.lib import contenders, ranks, report, timing
from benchmarks.lib.contenders import GLOO, MPI

BYTES = 8
BAGUA = ("bagua shared memory", "bagua ordinary tensor")
CALLS, WARM_UP = 5000, 500
NOTES = [
    "ratio: the case's median over OpenMPI's, or gloo's where OpenMPI is missing. p50/min: of each turn, the median of"
    " turns. CPU us: user and system time of one call, all ranks together."
]


def measure(names: list[str], turns: int, calls: int) -> dict[str, dict]:
    """Measures on a rank; returns per contender and turn `wall`, nanoseconds of every call, and `cpu`, the mean."""
    import bagua

    initialise()
    # Sums in place grow to infinity, which does not change the time of an addition.
    verified = contenders.verified(names, BYTES)
    samples: dict[str, dict] = {name: {"wall": [], "cpu": []} for name in names}
    for _ in range(turns):
        for name, contender in verified.items():
            contender.prepare()
            bagua.barrier()
            time_calls(contender.run, WARM_UP)
            begin = time.process_time_ns()
            samples[name]["wall"].append(time_calls(contender.run, calls))
            samples[name]["cpu"].append((time.process_time_ns() - begin) / calls)
    destroy()
    return samples


def time_calls(run, calls: int) -> list[int]:
    """Returns the nanoseconds of each of `calls` consecutive calls."""
    now = time.perf_counter_ns
    taken = [0] * calls
    for call in range(calls):
        begin = now()
        run()
        taken[call] = now() - begin
    return taken


def rows_of(names: list[str], per_rank: list[dict]) -> list[report.Row]:
    """Returns one row per contender, with the baseline first."""
    rows: list[report.Row] = []
    for name in names:
        turns = [timing.slowest(of_ranks) for of_ranks in zip(*(of[name]["wall"] for of in per_rank), strict=True)]
        samples = [taken / 1e9 for turn in turns for taken in turn]
        row = report.Row(f"{BYTES} B, {name}", samples, rows[0] if rows else None)
        hundredths = statistics.quantiles(samples, n=100)
        cpu = statistics.median(timing.total([of[name]["cpu"] for of in per_rank]))
        row.cells = {
            "p90 us": report.three_digits(hundredths[89] * 1e6),
            "p99 us": report.three_digits(hundredths[98] * 1e6),
            "p50/min": f"{statistics.median(statistics.median(turn) / min(turn) for turn in turns):.2f}",
            "CPU us": report.three_digits(cpu / 1e3),
        }
        rows.append(row)
    return rows


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--no-mpi", action="store_true", help="leave OpenMPI out")
    args = parser.parse_args()
    with_mpi = not args.no_mpi and ranks.mpirun() is not None
    result = report.Report(__file__, "the smallest all_reduce between the ranks of one host", args)
    if not with_mpi:
        result.say(f"OpenMPI SKIPPED: {'--no-mpi' if args.no_mpi else 'mpi4py or mpirun is not installed'}.")
    names = [*([MPI] if with_mpi else []), GLOO, *BAGUA]
    figure, axes = report.subplots(1, len(args.ranks))
    for world_size, axis in zip(args.ranks, axes, strict=True):
        options = {"names": names, "turns": 2 if args.quick else args.turns, "calls": 500 if args.quick else CALLS}
        per_rank = ranks.run(world_size, options, under_mpirun=with_mpi, timeout_s=1800)
        title = f"{world_size} ranks, shared memory"
        rows = rows_of(names, per_rank)
        result.add(report.Table(title, rows, unit="us", ratio="relative", notes=NOTES))
        report.bars(axis, rows, title, "us", 1e6)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
