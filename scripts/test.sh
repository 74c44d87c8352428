#!/usr/bin/env bash
# Sets everything up, checks style and types, and runs the tests. Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash setup/install.sh
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
exec .venv/bin/python -m pytest --numprocesses=auto --dist=worksteal "$@"
