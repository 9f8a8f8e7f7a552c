"""Compares the speed of the codecs with memcpy on one core.

encode, decode and decode_add of every registered codec, and of some with other than default options, are timed on 64 MB
and 1 MB of float32, in turns with memcpy of the same tensor (copy_ into an existing one). The rate is bytes of float32
per second. encode and decode return new memory on every call; to exclude the system's page faults, malloc is configured
to keep freed memory, so that the buffers are warm from the second call on.

    .venv/bin/python -m benchmarks.micro.codecs [--sizes 64e6 1e6] [--codecs bf16 qsgd:bits=4] [--quick]
"""

from __future__ import annotations

import os
from collections.abc import Callable

from benchmarks.lib import ranks, report, timing

MEMCPY = "memcpy"
_CHUNKS = ("topk:chunk=4096,k=64,bits=2", "topk:chunk=4096,dct=1")
WITH_OPTIONS = ("qsgd:bits=4", "qsgd:bits=2", "topk:k=8", "topk:k=256", *_CHUNKS)
# Makes glibc use no mmap, whose memory is returned when it is freed, and return no memory from the heap's end.
_WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def measure(sizes: list[int], names: list[str], repetitions: int) -> dict[str, dict]:
    """Measures in a separate process, bound to one core; returns samples by size and operation."""
    import torch

    import bagua

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    samples = {}
    for size in sizes:
        x = torch.randn(size // 4, generator=torch.Generator().manual_seed(7))
        copy = torch.zeros_like(x)
        contenders = {MEMCPY: timing.Contender(lambda copy=copy, x=x: copy.copy_(x))}
        for name in names:
            for operation, run in _operations(bagua.codecs.get(name), x).items():
                contenders[f"{name} {operation}"] = timing.Contender(run)
        inner = max(1, 64_000_000 // size // 4)
        samples[str(size)] = timing.interleaved(contenders, repetitions=repetitions, inner=inner)
    return samples


def _operations(codec, x) -> dict[str, Callable[[], object]]:
    """Returns the timed operations, after checking each against the codec's bound."""
    import torch

    encoded = codec.encode(x)
    decoded = codec.decode(encoded, x.numel(), x.dtype)
    if not bool(((decoded.double() - x.double()).abs() <= codec.error_bound(x)).all()):
        raise RuntimeError(f"{codec.spec}: a decoded value is further from the input than the codec's bound")
    operations = {
        "encode": lambda: codec.encode(x),
        "decode": lambda: codec.decode(encoded, x.numel(), x.dtype),
    }
    if hasattr(codec, "decode_add"):
        total = torch.ones_like(x)
        codec.decode_add(encoded, total)
        if not torch.allclose(total, 1 + decoded, rtol=1e-6, atol=1e-6):  # a fused multiply-add rounds once less
            raise RuntimeError(f"{codec.spec}: decode_add differs from decode and add")
        operations["decode_add"] = lambda: codec.decode_add(encoded, total)
    return operations


def rows_of(size: int, samples: dict[str, dict]) -> list[report.Row]:
    """Returns rows, with memcpy first as the baseline."""
    rows: list[report.Row] = []
    for name, values in samples.items():
        row = report.Row(f"{size / 1e6:g} MB, {name}", values["wall"], rows[0] if rows else None)
        cpu = report.Row("", values["cpu"]).p50
        row.cells = {"GB/s of f32": report.three_digits(size / row.p50 / 1e9), "CPU ms": report.three_digits(cpu * 1e3)}
        rows.append(row)
    return rows


def main() -> None:
    import bagua

    parser = report.parser(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[64e6, 1e6], help="bytes of float32")
    parser.add_argument("--codecs", nargs="+", default=[*bagua.codecs.available(), *WITH_OPTIONS])
    args = parser.parse_args()
    result = report.Report(__file__, "codecs, compared with memcpy on one core", args)
    for name in args.codecs:
        if not hasattr(bagua.codecs.get(name), "decode_add"):
            result.say(f"{name} decode_add SKIPPED: the codec offers no decode_add to Python.")
    sizes = [int(size) for size in args.sizes]
    options = {"sizes": sizes, "names": list(args.codecs), "repetitions": 5 if args.quick else 31}
    (samples,) = ranks.run(1, options, env=_WARM)
    figure, axes = report.subplots(len(sizes))
    for axis, size in zip(axes, sizes, strict=True):
        rows = rows_of(size, samples[str(size)])
        notes = ["ratio: memcpy's median over the case's, that is the rate as a part of memcpy's."]
        result.add(report.Table(f"{size / 1e6:g} MB of float32", rows, notes=notes))
        report.bars(axis, rows, f"{size / 1e6:g} MB of float32", "ms", 1e3)
    figure.tight_layout()
    result.write(figure)


if __name__ == "__main__":
    ranks.main(measure, main)
