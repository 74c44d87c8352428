#!/usr/bin/env bash
# Prepare the data of an example or train on it, on this machine.
#
#   pretrain_quick.sh DIRECTORY CONFIG_NAME preprocess|train [-f FILES] [-c CONFIG_NAME] [-a key=value] ...
#
#   -f, --data-files   a range of shards (x_OP_000..049_CL_)
#   -c, --config       another configuration
#   -a, --args         an override; can be repeated
#
# Environment variables: DATA_MOUNT (model.data.dataset_path), OUTPUT_MOUNT (results/NAME in the current
# directory), WANDB_OFFLINE (TRUE writes the Weights & Biases run to disk).
set -euo pipefail

name="$2" work="${3:-}" files="${DATA_FILES_SELECTED:-x_OP_000..049_CL_}" results="${OUTPUT_MOUNT:-}" words=()
here="$PWD"
cd "$1"
[ $# -ge 3 ] && shift 3
while [ $# -gt 0 ]; do
    [ $# -ge 2 ] || { echo "error: $1 requires a value" >&2; exit 2; }
    case "$1" in
        -f | --data-files) files="$2" ;;
        -c | --config) name="$2" ;;
        -a | --args) words+=("$2") ;;
        *) echo "error: $1: expected -f, -c or -a" >&2; exit 2 ;;
    esac
    shift 2
done
[ -z "${DATA_MOUNT:-}" ] || words=("model.data.dataset_path='$DATA_MOUNT'" "${words[@]}")
case "$work" in
    preprocess) words=(do_training=False "${words[@]}") ;;
    train)
        words=(do_training=True "exp_manager.exp_dir='${results:-$here/results/$name}'"
            "model.data.dataset.train=$files" "model.data.dataset.val=$files" "model.data.dataset.test=$files" "${words[@]}")
        case "${WANDB_OFFLINE:-}" in
            [Tt][Rr][Uu][Ee] | 1)
                words+=(exp_manager.create_wandb_logger=True exp_manager.wandb_logger_kwargs.offline=True) ;;
        esac
        ;;
    *) echo "error: '$work': expected preprocess or train" >&2; exit 2 ;;
esac
exec python pretrain.py --config-name="$name" "${words[@]}"
