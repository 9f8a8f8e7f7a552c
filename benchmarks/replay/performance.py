"""Measures every algorithm on four replayed models, on slow and fast networks, with few and many hosts.

Plays the cases of record by `bagua bench replay`, which adds their rows to benchmarks/results/performance.csv, from
which benchmarks/replay/summary.py makes the table of docs/performance.md. Takes more than an hour, and needs root. To
repeat all measurements, move the file away or name another one. `--skip` resumes an interrupted run: pass the number of
commands that it had finished.

    sudo .venv/bin/python -m benchmarks.replay.performance [--csv FILE] [--skip 0] [--quick]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from bagua.replay.command import SYSTEMS
from benchmarks.lib import report
from benchmarks.replay.summary import RECORD

_FEW = "ddp ddp_fp16 ddp_bf16 gradient_allreduce bytegrad qsgd:bits=4"
_SLOW = f"{' '.join(SYSTEMS)} ddp_fp16:bucket_cap_mb=2.5"  # the number of buckets matters to bagua from 1 Gbit/s on
_NODES = " ".join(
    f"{system}hierarchical={value}"
    for system in ("gradient_allreduce:", "bytegrad:", "qsgd:bits=4,")
    for value in (False, True)
)
COMMANDS = (
    f"--profiles vgg16 bert_large gpt_124m resnet50 --scale 0.1 --rates 100 500 --systems {_SLOW}",
    "--profiles vgg16 bert_large gpt_124m --scale 0.1 --rates 1000 2500 5000",
    "--profiles resnet50 --scale 0.1 --rates 1000 1500 2000 2500 5000",
    f"--profiles vgg16 --scale 0.1 --hosts 2 8 --rates 1000 --systems {_SLOW}",
    f"--profiles vgg16 resnet50 --scale 0.1 --hosts 2 --rates 5000 --systems {_FEW}",  # one core per host
    f"--profiles vgg16 --scale 0.1 --hosts 2 --ranks-per-host 2 --rates 1000 5000 --systems ddp ddp_fp16 ddp_bf16 "
    f"ddp_fp16:bucket_cap_mb=2.5 {_NODES}",
    "--profiles vgg16 --hosts 2 --rates 1000",
    f"--profiles vgg16 --hosts 2 --rates 10000 --systems {_FEW}",
    f"--profiles vgg16 bert_large --scale 0.1 --rates 1000 --congestion cubic --systems {_FEW}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=RECORD, help="the file that rows are added to")
    parser.add_argument("--skip", type=int, default=0, help="of the commands, those that are done")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works")
    args = parser.parse_args()
    report.need_hosts("performance")
    for number, options in enumerate(COMMANDS[args.skip :], args.skip):
        print(f"command {number}: bagua bench replay {options}", flush=True)
        command = [sys.executable, "-m", "bagua", "bench", "replay", *options.split(), "--csv", str(args.csv)]
        status = subprocess.run([*command, *(["--quick"] if args.quick else [])], check=False).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    main()
