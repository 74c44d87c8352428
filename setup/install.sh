#!/usr/bin/env bash
# Makes .venv in the checkout and installs the package and its tools into it. Does nothing when that is done already.
# PYTHON chooses the interpreter (3.10 or newer).
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-from
wanted=$(cat pyproject.toml setup/constraints.txt | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
echo "Installing into .venv; this takes some minutes..." >&2
[ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile)
# torch first: left to the resolver, another package's wish could bring in a second, larger build of it
"${pip[@]}" 'torch==2.13.0'
"${pip[@]}" --constraint setup/constraints.txt --editable '.[dev]'
# on all cores, where pip would use one; files for other versions of Python do not compile, and are not needed
.venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
echo "$wanted" > "$stamp"
