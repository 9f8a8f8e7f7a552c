"""Compares the codecs' kernels with the rate at which the GPU copies memory.

encode, decode, decode_add and the middle step of a compressed all_reduce (reduce_encode: decode the messages of several
ranks, add, encode) of random float32 are timed in turns with a copy of the same tensor inside device memory. Rates are
bytes read and written per second. Time is the device's, by events: the stream is held until the host has enqueued all
calls of a sample. Each case cycles through several tensors, more than the GPU's cache holds. Before timing, each result
is compared with the CPU's, bit by bit. From 64 MB on every case except decode should reach 0.85 of the copy; otherwise
the script ends with 1.

    .venv/bin/python -m benchmarks.cuda.kernels [--sizes 64e6 256e6] [--codecs minmax_uint8] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.lib import gpus, ranks, report

COPY = "copy"
CODECS = ("minmax_uint8", "bf16", "fp16", "qsgd", "qsgd:bits=4", "onebit", "topk")
TARGET, FROM_BYTES = 0.85, 64_000_000
SENDERS = 4  # number of messages that the middle step adds
_BEYOND_CACHES = 512_000_000
_CALLS = range(16, 65)  # minimum and maximum per sample; a stream's queue holds this many
_KEY = 7


class Case(NamedTuple):
    """A case: `run(i)` enqueues one call on the i-th tensors, which must read and write `num_bytes`."""

    run: Callable[[int], object]
    num_bytes: int


def measure(device: str, sizes: list[int], names: list[str], repetitions: int, rotated_bytes: int) -> dict[str, dict]:
    """Measures in a separate process; returns bytes moved and seconds per call, by size and case."""
    import torch

    where = gpus.use(device)
    results: dict[str, dict] = {}
    for size in sizes:
        num_tensors = max(2, -(-rotated_bytes // size))
        generator = torch.Generator().manual_seed(7)
        tensors = [torch.randn(size // 4, generator=generator).to(where) for _ in range(num_tensors)]
        cases = {COPY: _copy(tensors)}
        for name in names:
            cases |= {f"{name} {what}": case for what, case in _cases_of(name, tensors).items()}
        num_calls = min(max(num_tensors, _CALLS.start), _CALLS.stop - 1)
        seconds: dict[str, list[float]] = {name: [] for name in cases}
        for repetition in range(repetitions + 1):  # the first is discarded
            for name, case in cases.items():
                taken = gpus.device_seconds(case.run, num_calls, num_tensors)
                if repetition > 0:
                    seconds[name].append(taken)
        results[str(size)] = {name: {"bytes": case.num_bytes, "seconds": seconds[name]} for name, case in cases.items()}
    return results


def _copy(tensors: list[Any]) -> Case:
    import torch

    target = torch.empty_like(tensors[0])
    return Case(lambda i: target.copy_(tensors[i]), 2 * target.nbytes)


def _cases_of(name: str, tensors: list[Any]) -> dict[str, Case]:
    """Returns the codec's cases, after comparing each with the CPU."""
    import torch

    import bagua

    codec = bagua.codecs.get(name)
    numel, dtype = tensors[0].numel(), tensors[0].dtype
    value_bytes, wire_bytes = tensors[0].nbytes, codec.wire_bytes(numel, dtype)
    messages = [codec.encode(x, key=_KEY) for x in tensors]
    total = torch.ones(numel, device=tensors[0].device)
    # The senders' messages are adjacent rows; consecutive tensors share none of them.
    rows = torch.stack([messages[i % len(messages)] for i in range(SENDERS * len(tensors))])
    stacks = rows.view(len(tensors), SENDERS, wire_bytes)
    cases = {
        "encode": Case(lambda i: codec.encode(tensors[i], key=_KEY), value_bytes + wire_bytes),
        "decode": Case(lambda i: codec.decode(messages[i], numel, dtype), wire_bytes + value_bytes),
        "decode_add": Case(lambda i: codec.decode_add(messages[i], total), wire_bytes + 2 * value_bytes),
        "reduce_encode": Case(
            lambda i: codec.reduce_encode(stacks[i], numel, key=_KEY),
            SENDERS * wire_bytes + codec.wire_bytes(numel, torch.float32),
        ),
    }
    _verify(codec, cases, tensors[0], stacks[0], total)
    return cases


def _verify(codec: Any, cases: dict[str, Case], x: Any, stack: Any, total: Any) -> None:
    """Raises unless every case computes the CPU's bits."""
    import torch

    on_cpu, message = x.cpu(), codec.encode(x.cpu(), key=_KEY)
    sums = torch.ones(on_cpu.numel())
    codec.decode_add(message, sums)
    cases["decode_add"].run(0)
    pairs = {
        "encode": (cases["encode"].run(0), message),
        "decode": (cases["decode"].run(0), codec.decode(message, on_cpu.numel(), on_cpu.dtype)),
        "decode_add": (total, sums),
        "reduce_encode": (
            cases["reduce_encode"].run(0),
            codec.reduce_encode(stack.cpu(), on_cpu.numel(), key=_KEY),
        ),
    }
    for what, (found, expected) in pairs.items():
        if not torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8)):
            raise RuntimeError(f"{codec.spec} {what} of {x.nbytes} bytes: the device's bits are not the CPU's")


def rows_of(size: int, cases: dict[str, dict]) -> tuple[list[report.Row], list[str]]:
    """Returns rows, the copy first, and the cases below the target."""
    rows, missed = [], []
    copy_rate = 0.0
    for name, case in cases.items():
        row = report.Row(f"{size / 1e6:g} MB, {name}", case["seconds"])
        rate = case["bytes"] / row.p50
        copy_rate = rate if name == COPY else copy_rate
        row.cells = {"GB/s read and written": report.three_digits(rate / 1e9), "of the copy": f"{rate / copy_rate:.2f}"}
        rows.append(row)
        is_judged = size >= FROM_BYTES and not name.endswith(" decode")
        if is_judged and rate < TARGET * copy_rate:
            missed.append(row.case)
    return rows, missed


def main() -> None:
    parser = gpus.parser(__doc__)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 16e6, 64e6, 256e6], help="bytes of float32")
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--rotated", type=float, default=_BEYOND_CACHES, help="bytes of the tensors of a case together")
    args = parser.parse_args()
    gpus.need(__file__, args.device)
    result = gpus.Report(__file__, "codecs on a GPU, compared with copying on it", args)
    sizes = [int(size) for size in args.sizes]
    options = {"device": args.device, "sizes": sizes, "names": list(args.codecs), "rotated_bytes": int(args.rotated)}
    (measured,) = ranks.run(1, {**options, "repetitions": 3 if args.quick else 31}, timeout_s=1800)
    figure, axes = report.subplots(len(sizes))
    all_missed = []
    for axis, size in zip(axes, sizes, strict=True):
        rows, missed = rows_of(size, measured[str(size)])
        all_missed += missed
        notes = ["of the copy: bytes read and written per second, over those of the copy."]
        result.add(report.Table(f"{size / 1e6:g} MB of float32", rows, unit="us", notes=notes))
        report.bars(axis, rows, f"{size / 1e6:g} MB of float32", "us", 1e6)
    target = f"{TARGET} of the copy, from {FROM_BYTES / 1e6:g} MB on"
    if max(sizes) >= FROM_BYTES:
        status = gpus.verdict(result, all_missed, target)
    else:
        status = 0
        result.say(f"Nothing is compared with the target, {target}: no size is as large.")
    figure.tight_layout()
    result.write(figure)
    sys.exit(status)


if __name__ == "__main__":
    ranks.main(measure, main)
