#!/usr/bin/env bash
# Sets everything up and pretrains a small ESM-2nv on a synthetic protein language whose best possible loss is known.
# Further arguments are passed on, e.g. trainer.max_steps=100
set -euo pipefail
cd "$(dirname "$0")/.."
bash setup/install.sh
cd examples/protein/esm2nv
exec ../../../.venv/bin/python pretrain.py --config-name=pretrain_esm2_mock "$@"
