#!/usr/bin/env bash
# Write setup/requirements/: versions and hashes of all packages for Python 3.10 to 3.13, without extras (base.txt) and with
# the extras `all` and `dev`. torch is not in the files: its build depends on the machine. Versions in the files are kept if
# pyproject.toml allows them; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/../setup/requirements"
command -v uv > /dev/null || { echo "error: uv was not found: pip install uv" >&2; exit 1; }
excluded=$(mktemp)
limits=$(mktemp)
trap 'rm -f "$excluded" "$limits"' EXIT
echo torch > "$excluded"
echo 'python-dateutil<3' > "$limits" # for botocore, which the extra store needs

# lock NAME [ARGUMENT...]: write NAME.txt
lock() {
    local name=$1
    shift
    uv pip compile ../../pyproject.toml --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
        --excludes "$excluded" --constraint "$limits" --output-file "$name.txt" "$@"
}
lock base "$@"
lock all --extra all --constraint base.txt "$@"
lock dev --extra dev --constraint all.txt "$@"
