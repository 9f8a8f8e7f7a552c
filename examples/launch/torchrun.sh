#!/usr/bin/env bash
# On every host; HOST is the first one.
#
#   HOST=10.0.0.1 NUM_HOSTS=2 RANKS_PER_HOST=4 examples/launch/torchrun.sh train.py
set -euo pipefail

torchrun --nnodes "${NUM_HOSTS:-1}" --nproc-per-node "${RANKS_PER_HOST:-2}" \
  --rdzv-backend c10d --rdzv-endpoint "${HOST:-127.0.0.1}:${PORT:-29500}" --rdzv-id "${JOB:-1}" "$@"
