#!/usr/bin/env bash
# Build the compiled helpers of Megatron's data sets if they are missing. Runs do not use them; the script remains for v1
# users who call it before every training.
set -euo pipefail

python="${PYTHON:-python3}"
found="$("$python" -W ignore - <<'PYTHON'
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("megatron.core")
if spec is None or not spec.submodule_search_locations:
    print("missing")
else:
    directory = Path(spec.submodule_search_locations[0], "datasets")
    print(next(directory.glob("helpers_cpp.*.so"), f"source {directory}"))  # importing the package takes seconds
PYTHON
)"
case "$found" in
    missing) echo "error: megatron-core is not installed for $python: bash setup/install.sh" >&2; exit 1 ;;
    source\ *)
        directory="${found#source }"
        if [ ! -f "$directory/Makefile" ]; then
            echo "nothing to compile: runs do not need Megatron's helpers, and $directory has no Makefile for them"
        else
            make -C "$directory"
        fi
        ;;
    *) echo "nothing to compile: runs do not need Megatron's helpers, and they exist: $found" ;;
esac
