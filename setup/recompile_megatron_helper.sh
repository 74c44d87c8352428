#!/usr/bin/env bash
# Builds the compiled helpers of Megatron's own data sets, where they are missing. A run here never uses them: it reads
# its data without compiled code. The script is kept for those who call it before every training.
set -euo pipefail

python="${PYTHON:-python3}"
found="$("$python" -W ignore - <<'PYTHON'
from importlib.util import find_spec

spec = find_spec("megatron.core")
if spec is None or not spec.submodule_search_locations:
    print("missing")
else:
    helpers = find_spec("megatron.core.datasets.helpers_cpp")
    print(helpers.origin if helpers else "source " + spec.submodule_search_locations[0] + "/datasets")
PYTHON
)"
case "$found" in
    missing) echo "error: megatron-core is not installed for $python: bash setup/install.sh" >&2; exit 1 ;;
    source\ *)
        directory="${found#source }"
        if [ ! -f "$directory/Makefile" ]; then
            echo "nothing to compile: no run needs Megatron's helpers, and $directory has no Makefile for them"
        else
            make -C "$directory"
        fi
        ;;
    *) echo "nothing to compile: no run needs Megatron's helpers, and they are there already: $found" ;;
esac
