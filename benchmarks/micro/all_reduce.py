"""Measures an all_reduce between processes of one host, compared with gloo and OpenMPI.

float32, 8 bytes to 100 MB, 2 and 4 ranks: memory of bagua.empty (as in all buckets of with_bagua), ordinary tensors,
two codecs, and TCP instead of shared memory. All contenders take turns in the same processes; a sample is the slowest
rank's time. OpenMPI takes part if mpi4py can be imported and mpirun is found.

    .venv/bin/python -m benchmarks.micro.all_reduce [--ranks 2 4] [--sizes 8 1000 16e6] [--no-mpi] [--quick]
"""

from __future__ import annotations

from bagua.replay.systems import destroy, initialise
from benchmarks.lib import contenders, ranks, report, timing
from benchmarks.lib.contenders import GLOO, MPI

SIZES = (8, 256, 1_000, 4_000, 32_000, 256_000, 1_000_000, 16_000_000, 100_000_000)
SHM = ("bagua shared memory", "bagua ordinary tensor", "bagua bf16", "bagua minmax_uint8")
TCP = ("bagua tcp", "bagua bf16", "bagua minmax_uint8")
NOTES = ["ratio: gloo's median over the case's. CPU ms: user and system time of one call, all ranks together."]
_COLOURS = {name: f"C{i}" for i, name in enumerate((GLOO, MPI, *SHM, "bagua tcp"))}


def measure(sizes: list[int], names: list[str], repetitions: int) -> dict[str, dict]:
    """Measures on a rank; returns samples by size and contender."""
    import bagua

    initialise()
    samples = {}
    for size in sizes:
        # Short calls are cheap to repeat and most affected by noise.
        samples[str(size)] = timing.interleaved(
            contenders.verified(names, size),
            repetitions=repetitions * (3 if size <= 100_000 else 1),
            inner=contenders.inner_calls(size),
            barrier=bagua.barrier,
        )
    destroy()
    return samples


def rows_of(size: int, per_rank: list[dict]) -> list[report.Row]:
    """Returns one row per contender, with gloo first as the baseline."""
    rows: list[report.Row] = []
    for name in per_rank[0][str(size)]:
        samples = timing.slowest([of_rank[str(size)][name]["wall"] for of_rank in per_rank])
        row = report.Row(f"{spell(size)}, {name}", samples, rows[0] if rows else None)
        cpu = report.Row("", timing.total([of_rank[str(size)][name]["cpu"] for of_rank in per_rank])).p50
        row.cells = {"GB/s": report.three_digits(size / row.p50 / 1e9), "CPU ms": report.three_digits(cpu * 1e3)}
        rows.append(row)
    return rows


def spell(size: int) -> str:
    """Formats a size, such as 8 B, 4 KB, 100 MB (decimal)."""
    for unit, factor in (("MB", 1_000_000), ("KB", 1_000)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"


def plot(axis, title: str, names: list[str], sizes: list[int], rows: list[report.Row]) -> None:
    """Draws time over size, a line for each contender."""
    for position, name in enumerate(names):
        medians = [row.p50 * 1e3 for row in rows[position :: len(names)]]
        style = {"color": _COLOURS[name], "ls": "--" if name in (GLOO, MPI) else "-"}
        axis.plot(sizes, medians, marker="o", markersize=3, label=name, **style)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("bytes")
    axis.set_ylabel("ms, median of the slowest rank")
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--no-mpi", action="store_true", help="leave OpenMPI out")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes]
    repetitions = 3 if args.quick else 11
    result = report.Report(__file__, "all_reduce between the ranks of one host", args)
    with_mpi = not args.no_mpi and ranks.mpirun() is not None
    if not with_mpi:
        result.say(f"OpenMPI SKIPPED: {'--no-mpi' if args.no_mpi else 'mpi4py or mpirun is not installed'}.")

    figure, axes = report.subplots(2, len(args.ranks))
    for world_size in args.ranks:
        for transport, own in (("shared memory", SHM), ("tcp over loopback", TCP)):
            is_shm = own is SHM
            use_mpi = with_mpi and is_shm
            names = [GLOO, *([MPI] if use_mpi else []), *own]
            per_rank = ranks.run(
                world_size,
                {"sizes": sizes, "names": names, "repetitions": repetitions},
                env={} if is_shm else {"BAGUA_SHARED_MEMORY": "0"},
                under_mpirun=use_mpi,
                timeout_s=1800,
            )
            title = f"{world_size} ranks, {transport}"
            rows = [row for size in sizes for row in rows_of(size, per_rank)]
            result.add(report.Table(title, rows, notes=NOTES))
            plot(axes.pop(0), title, names, sizes, rows)
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
