#!/usr/bin/env bash
# Entry point of the container: a shell, Jupyter Lab, or a command.
#
#   startup.sh             a shell
#   startup.sh jupyter     Jupyter Lab at port 8888, and print its token
#   startup.sh COMMAND...  a command
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
