#!/usr/bin/env bash
# Benchmark GPT-3 on mock text on a Slurm cluster, without validation and checkpoints. Arguments are overrides.
#
#   MODEL_SIZE         126m, 350m, 760m, 1.3b, 2.7b or 5b (126m)
#   NUM_NODES          number of nodes (2)
#   MAX_STEPS          number of steps (40)
#   WORKSPACE          directory of results/gpt3_SIZE (the current directory)
#   UNIQUE_OUTPUT_DIR  1: results-TIME/gpt3_SIZE instead
set -euo pipefail

: "${MODEL_SIZE:=126m}" "${NUM_NODES:=2}" "${MAX_STEPS:=40}" "${WORKSPACE:=$PWD}"
conf="$(cd "$(dirname "${BASH_SOURCE[0]}")/../conf" && pwd)"

exec python -m bionemo.launch --config-path="$conf" --config-name="pretrain_gpt3_$MODEL_SIZE" cluster=bcm \
    data@model.data=mock_text trainer.num_nodes="$NUM_NODES" trainer.max_steps="$MAX_STEPS" \
    trainer.val_check_interval="$MAX_STEPS" trainer.limit_val_batches=0.0 \
    exp_manager.create_checkpoint_callback=False exp_manager.resume_if_exists=False \
    "exp_manager.exp_dir='$WORKSPACE/results/gpt3_$MODEL_SIZE'" "$@"
