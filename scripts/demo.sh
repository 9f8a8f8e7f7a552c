#!/usr/bin/env bash
# The main job: a CNN on scikit-learn's digits, trained by two ranks on this machine with bytegrad, then
# the same with torch's own DDP over gloo, then both summaries side by side.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/demo
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # two ranks share the cores; without it torchrun prints a warning

for algorithm in bytegrad ddp; do
  echo
  echo "== bagua run --nproc-per-node 2 examples/digits.py --algorithm $algorithm"
  .venv/bin/bagua run --nproc-per-node 2 examples/digits.py --algorithm $algorithm 2>&1 |
    tee build/demo/$algorithm.log || [[ $algorithm == ddp ]] # torch may abort at its exit; without a result, see below
done
echo
.venv/bin/python scripts/side_by_side.py build/demo/bytegrad.log build/demo/ddp.log
