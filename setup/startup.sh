#!/usr/bin/env bash
# What a container starts with: a shell, Jupyter Lab, or any command.
#
#   startup.sh             a shell
#   startup.sh jupyter     Jupyter Lab at port 8888, with its token in the output
#   startup.sh COMMAND...  that
set -euo pipefail

case "${1:-bash}" in
    jupyter)
        shift
        command -v jupyter > /dev/null || { echo "error: Jupyter is not installed: pip install jupyterlab" >&2; exit 1; }
        exec jupyter lab --allow-root --ip='*' --port=8888 --no-browser --notebook-dir=/ "$@"
        ;;
    bash) exec bash "${@:2}" ;;
    *) exec "$@" ;;
esac
