#!/usr/bin/env bash
# Build the documentation in site/, without warnings and dead links, and show it at http://127.0.0.1:8000.
# With --build, only build it. The tutorials are executed, which takes a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -x .venv/bin/mkdocs ] || { bash setup/install.sh; .venv/bin/python -m pip install --quiet -e '.[docs]'; }
# Without the variable, Material for MkDocs prints a notice about its successor.
NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
[ "${1:-}" = --build ] || .venv/bin/python -m http.server --directory site --bind 127.0.0.1 8000
