#!/usr/bin/env bash
# GPT-3 126m on two nodes, 40 steps. Further arguments are overrides, such as cluster.partition=gpu or --dry-run.
set -euo pipefail
#export UNIQUE_OUTPUT_DIR=1

MODEL_SIZE=126m NUM_NODES=2 MAX_STEPS=40 exec bash "$(dirname "${BASH_SOURCE[0]}")/1.bmk-pretrain-gpt3.sh" "$@"
