"""Measures an all_reduce between several ranks on one GPU, whose data passes through the host.

2 and 4 processes share one GPU. bagua's tensors are staged: codes are made on the device and cross PCIe to pinned
memory, from which shared memory or TCP carries them. In the same processes, in turns, run gloo, which copies the whole
tensor to the host, and NCCL, which lets ranks share a GPU from 2.30 on (NCCL_MULTI_RANK_GPU_ENABLE=1) and keeps the
data on it. Every result is verified before it is timed.

    .venv/bin/python -m benchmarks.cuda.one_gpu [--sizes 1e6 64e6] [--ranks 2 4] [--tcp] [--quick]
"""

from __future__ import annotations

from benchmarks.lib import contenders, gpus, ranks, report, timing

BAGUA = ("bagua", "bagua bf16", "bagua minmax_uint8")
NCCL_NEEDED = (2, 30)


def measure(device: str, sizes: list[int], names: list[str], repetitions: int) -> dict[str, dict]:
    """Measures on a rank; returns seconds by size and contender."""
    import torch.distributed as dist

    import bagua
    from bagua.replay.systems import destroy, initialise

    where = gpus.use(device)
    initialise()
    groups = {contenders.NCCL: dist.new_group(backend="nccl")} if contenders.NCCL in names else {}
    samples = {}
    for size in sizes:
        samples[str(size)] = timing.interleaved(
            contenders.verified(names, size, where, groups),
            repetitions=repetitions,
            inner=contenders.inner_calls(size),
            barrier=bagua.barrier,
        )
    destroy()
    return samples


def main() -> None:
    parser = gpus.parser(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[64e3, 1e6, 16e6, 64e6], help="bytes of float32")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tcp", action="store_true", help="TCP over loopback instead of shared memory")
    args = parser.parse_args()
    gpus.need(__file__, args.device)
    setup = {"transport": "staged, " + ("tcp over loopback" if args.tcp else "shared memory")}
    result = gpus.Report(__file__, "all_reduce between ranks on one GPU", args, setup)
    env = {"BAGUA_SHARED_MEMORY": "0"} if args.tcp else {}
    names = list(BAGUA)
    if args.device == gpus.CUDA:
        names.insert(0, contenders.GLOO)  # it supports no other device
        version = gpus.nccl_version()
        if version >= NCCL_NEEDED:
            names.append(contenders.NCCL)
            env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        else:
            has = ".".join(map(str, version))
            result.say(f"NCCL SKIPPED: ranks share a GPU from 2.30 on, and torch has {has}.")
    sizes = [int(size) for size in args.sizes]
    options = {"device": args.device, "sizes": sizes, "names": names, "repetitions": 3 if args.quick else 31}
    figure, axes = report.subplots(len(args.ranks))
    for axis, world_size in zip(axes, args.ranks, strict=True):
        per_rank = ranks.run(world_size, options, env=env, timeout_s=1800)
        rows = []
        for size in sizes:
            of_size = [
                report.Row(
                    f"{size / 1e6:g} MB, {name}",
                    timing.slowest([of_rank[str(size)][name]["wall"] for of_rank in per_rank]),
                )
                for name in names
            ]
            for row in of_size[1:]:
                row.baseline = of_size[0]
            rows += of_size
        notes = [f"ratio: the median of {names[0]} over the case's."]
        result.add(report.Table(f"{world_size} ranks on one GPU", rows, notes=notes))
        report.bars(axis, rows, f"{world_size} ranks on one GPU", "ms", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
