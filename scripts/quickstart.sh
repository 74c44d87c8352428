#!/usr/bin/env bash
# Install everything and pretrain a small ESM-2nv on a synthetic protein language whose lowest possible loss is known:
# 400 steps, about two minutes on two cores. `scripts/quickstart.sh full` runs 3,500 steps. Further arguments are
# overrides, such as trainer.max_steps=100.
set -euo pipefail
cd "$(dirname "$0")/.."
bash setup/install.sh
run=examples/protein/esm2nv/results
if [ "${1:-}" = full ]; then
    shift
else
    run=$run/quick
    set -- trainer.max_steps=400 trainer.val_check_interval=50 "$@"
fi
.venv/bin/python examples/protein/esm2nv/pretrain.py --config-name=pretrain_esm2_mock "exp_manager.exp_dir=$run" "$@"
cat << END

Look at $run/loss_curve.png, or at the whole run:  .venv/bin/bionemo report $run
Next, in docs/how-to:
  pretrain.md    train on your own sequences:  bionemo pretrain --config-name=pretrain_esm2_8M data@model.data=fasta ...
  apply.md       embed proteins with this model or one of the hub:  bionemo predict MODEL model.data.dataset_path=FASTA
  fine-tune.md   predict labels:  bionemo finetune MODEL data=labels.csv
END
