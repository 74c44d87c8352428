#!/usr/bin/env bash
# GPT-3 5b on two nodes, 20 steps. Further arguments are overrides, such as cluster.partition=gpu or --dry-run.
set -euo pipefail
#export UNIQUE_OUTPUT_DIR=1

MODEL_SIZE=5b NUM_NODES=2 MAX_STEPS=20 exec bash "$(dirname "${BASH_SOURCE[0]}")/1.bmk-pretrain-gpt3.sh" \
    model.activations_checkpoint_granularity=full model.activations_checkpoint_method=block \
    model.activations_checkpoint_num_layers=1 "$@"
