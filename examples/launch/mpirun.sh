#!/usr/bin/env bash
# With Open MPI, which starts the ranks itself; bagua needs to know which one each is. HOSTS as mpirun has it.
#
#   HOSTS=10.0.0.1:4,10.0.0.2:4 NUM_RANKS=8 examples/launch/mpirun.sh train.py
set -euo pipefail

hosts=${HOSTS:-127.0.0.1:${NUM_RANKS:-2}}
export MASTER_ADDR=${hosts%%[:,]*} MASTER_PORT=${PORT:-29500}
# shellcheck disable=SC2016 # the ranks expand it
mpirun ${MPIRUN_OPTIONS:-} -n "${NUM_RANKS:-2}" --host "$hosts" -x MASTER_ADDR -x MASTER_PORT bash -c '
  export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
  export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
  exec python "$@"' rank "$@"
