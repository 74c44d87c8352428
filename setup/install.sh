#!/usr/bin/env bash
# Create .venv in the checkout and install the package and its development tools. Does nothing if they are installed.
# PYTHON selects the interpreter (3.10 to 3.13).
set -euo pipefail
cd "$(dirname "$0")/.."

stamp=.venv/installed-from
wanted=$(cat pyproject.toml setup/requirements/dev.txt | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi
python="${PYTHON:-python3}"
version='import sys; print("%d.%d" % sys.version_info[:2]); sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
if [ ! -x .venv/bin/python ]; then
    command -v "$python" > /dev/null || { echo "error: $python was not found: set PYTHON to Python 3.10 to 3.13" >&2; exit 1; }
    found=$("$python" -c "$version") || {
        echo "error: $python is Python ${found:-of an unknown version}: set PYTHON to one of 3.10 to 3.13" >&2
        exit 1
    }
fi
echo "Installing into .venv; this takes a few minutes..." >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip install --quiet --quiet --disable-pip-version-check --no-compile)
# install torch first: otherwise pip may download a second, larger build of it
torch=$(.venv/bin/python -c 'import sys; print("2.13.0" if sys.version_info < (3, 12) else "2.15.0")')
"${pip[@]}" "torch==$torch"
"${pip[@]}" --no-deps --require-hashes -r setup/requirements/dev.txt
"${pip[@]}" --no-deps --editable .
# compile on all cores (pip uses one); errors in files for other Python versions are harmless
.venv/bin/python -m compileall -q -j 0 .venv/lib > /dev/null 2>&1 || true
echo "$wanted" > "$stamp"
