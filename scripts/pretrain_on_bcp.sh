#!/usr/bin/env bash
# Pretrain a model of an example on Base Command Platform: write ngc-launch.sh and submit it.
#
#   pretrain_on_bcp.sh DIRECTORY CONFIG_NAME [--dry-run] [key=value ...]
#
# Environment variables: BIONEMO_IMAGE, INSTANCE, TIME_LIMIT (6H), NGC_ARRAY_SIZE (2), NGC_GPUS_PER_NODE (8), ACE, ORG,
# TEAM, WORKSPACE (an ID, mounted at DATA_MOUNT), DATASET_ID (mounted read-only at /data_raw), DATA_MOUNT (/data),
# DATA_PATH (data of the run), RESULTS_PATH (/result/NAME), LABEL, WANDB_SECRET_NAME (name of the platform's secret with
# the API key of Weights & Biases).
set -euo pipefail

cd "$1"
name="${CONFIG_NAME:-$2}"
shift 2
: "${BIONEMO_IMAGE:?set it to the image, as in ORG/TEAM/bionemo:1.0}"
: "${INSTANCE:=dgxa100.80g.8.norm}" "${TIME_LIMIT:=6H}" "${NGC_ARRAY_SIZE:=2}" "${NGC_GPUS_PER_NODE:=8}"
: "${DATA_MOUNT:=/data}" "${RESULTS_PATH:=/result/$name}"

words=("cluster.image=$BIONEMO_IMAGE" "cluster.instance=$INSTANCE" "cluster.total_runtime=$TIME_LIMIT"
    "trainer.num_nodes=$NGC_ARRAY_SIZE" "trainer.devices=$NGC_GPUS_PER_NODE" "exp_manager.exp_dir=$RESULTS_PATH")
[ -z "${ACE:-}" ] || words+=("cluster.ace=$ACE")
[ -z "${ORG:-}" ] || words+=("cluster.org=$ORG")
[ -z "${TEAM:-}" ] || words+=("cluster.team=$TEAM")
[ -z "${LABEL:-}" ] || words+=("cluster.labels=[$LABEL]")
[ -z "${WORKSPACE:-}" ] || words+=("cluster.workspaces=['$WORKSPACE:$DATA_MOUNT']")
[ -z "${DATASET_ID:-}" ] || words+=("cluster.datasets=['$DATASET_ID:/data_raw']")
[ -z "${DATA_PATH:-}" ] || words+=("model.data.dataset_path=$DATA_PATH")
[ -z "${WANDB_SECRET_NAME:-}" ] || words+=("cluster.secrets=['$WANDB_SECRET_NAME']" exp_manager.create_wandb_logger=True)

exec python -m bionemo.launch --config-path=conf --config-name="$name" cluster=bcp "${words[@]}" "$@"
