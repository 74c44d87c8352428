#!/usr/bin/env bash
# Install everything and pretrain a small ESM-2nv on a synthetic protein language whose lowest possible loss is known.
# Arguments are overrides, such as trainer.max_steps=100.
set -euo pipefail
cd "$(dirname "$0")/.."
bash setup/install.sh
cd examples/protein/esm2nv
exec ../../../.venv/bin/python pretrain.py --config-name=pretrain_esm2_mock "$@"
