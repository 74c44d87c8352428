#!/usr/bin/env bash
# Pretrain a model of an example on a Slurm cluster: write a batch script and submit it.
#
#   pretrain_on_slurm.sh DIRECTORY CONFIG_NAME [--dry-run] [key=value ...]
#
# Environment variables: PARTITION, ACCOUNT, NUM_NODES (1), GPUS_PER_NODE (8), TIME_LIMIT (as in 1-00:00:00),
# BIONEMO_IMAGE (image for Pyxis; without it, the Python that submits), MOUNTS (as in /fsx:/fsx,/apps:/apps),
# DATA_PATH (data of the run), RESULTS_PATH (results/NAME in the current directory). All nodes must share both.
set -euo pipefail

name="${CONFIG_NAME:-$2}"
results="$(realpath --canonicalize-missing "${RESULTS_PATH:-results/$name}")"
cd "$1"
shift 2
: "${NUM_NODES:=1}" "${GPUS_PER_NODE:=8}"

words=("trainer.num_nodes=$NUM_NODES" "trainer.devices=$GPUS_PER_NODE" "exp_manager.exp_dir='$results'")
[ -z "${PARTITION:-}" ] || words+=("cluster.partition=$PARTITION")
[ -z "${ACCOUNT:-}" ] || words+=("cluster.account=$ACCOUNT")
[ -z "${TIME_LIMIT:-}" ] || words+=("cluster.time='$TIME_LIMIT'")
[ -z "${BIONEMO_IMAGE:-}" ] || words+=("cluster.container_image='$BIONEMO_IMAGE'")
[ -z "${MOUNTS:-}" ] || words+=("cluster.container_mounts=['${MOUNTS//,/\',\'}']")
[ -z "${DATA_PATH:-}" ] || words+=("model.data.dataset_path='$DATA_PATH'")

exec python -m bionemo.launch --config-path=conf --config-name="$name" cluster=bcm "${words[@]}" "$@"
