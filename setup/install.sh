#!/usr/bin/env bash
# Makes .venv in the checkout and installs the package and its tools into it. Does nothing when that is done already.
# PYTHON chooses the interpreter (3.10 to 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-from
wanted=$(cat pyproject.toml setup/constraints.txt | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
python="${PYTHON:-python3}"
version='import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
if [ ! -x .venv/bin/python ]; then
    command -v "$python" > /dev/null || { echo "error: there is no $python: set PYTHON to Python 3.10 to 3.13" >&2; exit 1; }
    found=$("$python" -c "$version") || {
        echo "error: $python is Python ${found:-of an unknown version}: set PYTHON to one of 3.10 to 3.13" >&2
        exit 1
    }
fi
echo "Installing into .venv; this takes some minutes..." >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile)
# torch first: left to the resolver, another package's wish could bring in a second, larger build of it
"${pip[@]}" 'torch==2.13.0'
"${pip[@]}" --constraint setup/constraints.txt --editable '.[dev]'
# on all cores, where pip would use one; files for other versions of Python do not compile, and are not needed
.venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
echo "$wanted" > "$stamp"
