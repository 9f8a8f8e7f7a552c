#!/usr/bin/env bash
#SBATCH --job-name=bagua
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@150
# One launcher per node, which starts a rank per GPU. Slurm sends SIGUSR1 150 seconds before the time is over, and SIGTERM
# at a preemption; the ranks save then (bagua.preemption). Slurm requeues what it has preempted, this script what has run
# out of time; both go on from the checkpoint.
#
#   sbatch examples/launch/slurm.sh train.py --checkpoint checkpoint
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# A secret of this job, which its ranks prove to each other, in a folder that all nodes share.
export BAGUA_AUTH_TOKEN_FILE=$PWD/bagua-$SLURM_JOB_ID.token
[ -e "$BAGUA_AUTH_TOKEN_FILE" ] || bagua token --output "$BAGUA_AUTH_TOKEN_FILE"

status=0
srun --kill-on-bad-exit=1 bagua run \
  --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-backend c10d --rdzv-endpoint "$first_node:29500" --rdzv-id "$SLURM_JOB_ID" \
  --grace 120 "$@" || status=$?
if [ $status = 138 ]; then # SIGUSR1
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
