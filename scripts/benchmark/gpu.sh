#!/usr/bin/env bash
# Compare gradients of one GPU with those of the CPU and measure speed, in at most ten minutes; every result is written to
# a new section of RESULTS.md when it is there, the most important first. No network. Needs torch 2.11 or newer, pytest,
# hypothesis and the dependencies of the project except NeMo and RDKit. transformers is the peer, if it is installed.
#
#     bash scripts/benchmark/gpu.sh [--minutes=10] [--before=CHECKOUT] [--output=FILE] [--device=cpu]
#
# --before measures the ESM2-650M of another checkout in turn with this one. --device=cpu rehearses with tiny models.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-${TMPDIR:-/tmp}/inductor-$UID}
export PYTORCH_ALLOC_CONF=expandable_segments:True
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
exec "$python" scripts/benchmark/gpu.py "$@"
