#!/usr/bin/env bash
# A benchmark under Slurm: GPT-3 on made-up text, without validation or checkpoints. Further arguments are overrides.
#
#   MODEL_SIZE         126m, 350m, 760m, 1.3b, 2.7b or 5b (126m)
#   NUM_NODES          (2)
#   MAX_STEPS          (40)
#   WORKSPACE          below which results/gpt3_SIZE appears (here)
#   UNIQUE_OUTPUT_DIR  1: results-TIME/gpt3_SIZE instead, another one every time
set -euo pipefail

: "${MODEL_SIZE:=126m}" "${NUM_NODES:=2}" "${MAX_STEPS:=40}" "${WORKSPACE:=$PWD}"
conf="$(cd "$(dirname "${BASH_SOURCE[0]}")/../conf" && pwd)"

exec python -m bionemo.launch --config-path="$conf" --config-name="pretrain_gpt3_$MODEL_SIZE" cluster=bcm \
    data@model.data=mock_text trainer.num_nodes="$NUM_NODES" trainer.max_steps="$MAX_STEPS" \
    trainer.val_check_interval="$MAX_STEPS" trainer.limit_val_batches=0.0 \
    exp_manager.create_checkpoint_callback=False exp_manager.resume_if_exists=False \
    "exp_manager.exp_dir='$WORKSPACE/results/gpt3_$MODEL_SIZE'" "$@"
