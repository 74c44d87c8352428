#!/usr/bin/env bash
# Test and measure everything on one GPU in at most 35 minutes, and write a section of RESULTS.md. No network.
# Needs torch 2.11 or newer, pytest, hypothesis and the dependencies of the project except NeMo and RDKit, without which
# resumed runs and MegaMolBART are skipped. transformers is measured as the peer if it is installed.
#
#     bash scripts/benchmark/gpu.sh [--minutes=35] [--output=FILE] [--device=cpu]
#
# --device=cpu runs the same protocol with tiny models, to test it.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/inductor-$UID}  # for the second repeat
export PYTORCH_ALLOC_CONF=expandable_segments:True
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$python" scripts/benchmark/gpu.py "$@"
