"""Tests whether a stream could wait for work that the host has not enqueued yet.

A staged operation is enqueued as its bytes arrive, so `wait()` blocks the host until they have. It need not if the
program's stream waited for a value in memory (cuStreamWaitValue32) that the core's thread sets at the end. That only
works if the core's thread can use the device meanwhile, whatever the program does. The script makes the default stream
wait for such a value, has one thread do what programs do, and checks that another thread can work on another stream.
Needs nvcc.

    .venv/bin/python -m benchmarks.cuda.waiting_streams [--out FOLDER]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.lib import gpus, report

SOURCE = Path(__file__).with_suffix(".cu")


def measure() -> list[tuple[str, str, float]]:
    """Returns the program's action, the other thread's, and its milliseconds (-1: blocked until the stream resumed)."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, SOURCE.stem)
        subprocess.run(["nvcc", "-std=c++17", "-O1", "-arch=native", "-o", binary, SOURCE], check=True)
        run = subprocess.run([binary], check=True, stdout=subprocess.PIPE, text=True, timeout=120)
    lines = (line.split("\t") for line in run.stdout.splitlines())
    return [(program, other, float(took)) for program, other, took in lines]


def main() -> None:
    args = gpus.parser(__doc__).parse_args()
    gpus.need(__file__, args.device)
    if args.device == gpus.EMULATED or shutil.which("nvcc") is None:
        print(f"{__file__} SKIPPED: needs a GPU and nvcc.")
        sys.exit(report.SKIPPED)
    result = gpus.Report(__file__, "what another thread can do while the program's stream waits for its value", args)
    cases = measure()
    others = list(dict.fromkeys(other for _, other, _ in cases))
    took = {(program, other): milliseconds for program, other, milliseconds in cases}
    rows = [["the program's thread", *(f"{other}, ms" for other in others)]]
    for program in dict.fromkeys(program for program, _, _ in cases):
        times = (took[program, other] for other in others)
        rows.append([program, *(f"{one:.2f}" if one >= 0 else "stands" for one in times)])
    result.say(*report.aligned(rows))
    num_standing = sum(milliseconds < 0 for _, _, milliseconds in cases)
    result.say(f"stands: not done before the stream resumed after 0.3 s. {num_standing} of {len(cases)}.")
    result.write()


if __name__ == "__main__":
    main()
