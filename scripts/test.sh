#!/usr/bin/env bash
# Install, lint, check types and run the tests; print how long each took. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
SECONDS=0
bash setup/install.sh
installed=$SECONDS
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
linted=$SECONDS
status=0
.venv/bin/python -m pytest --numprocesses=auto --dist=worksteal "$@" || status=$?
echo "installation $installed s, linting $((linted - installed)) s, tests $((SECONDS - linted)) s"
exit "$status"
