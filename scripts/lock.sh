#!/usr/bin/env bash
# Write setup/requirements/: versions and hashes of the packages for Python 3.10 to 3.13. base.txt has those that bionemo
# requires, all.txt and dev.txt those that the extras `all` and `dev` add. torch is not in them: its build depends on the
# machine. Versions in the files are kept if pyproject.toml allows them; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/../setup/requirements"
command -v uv > /dev/null || { echo "error: uv was not found: pip install uv" >&2; exit 1; }
excluded=$(mktemp)
trap 'rm -f "$excluded"' EXIT
echo torch > "$excluded"

# lock NAME [ARGUMENT...]: write NAME.txt
lock() {
    local name=$1
    shift
    uv pip compile ../../pyproject.toml --quiet --universal --python-version 3.10 --generate-hashes --no-header --no-annotate \
        --excludes "$excluded" --output-file "$name.txt" "$@"
}
lock base "$@"
in_base=(--constraint base.txt)
while read -r package; do in_base+=(--no-emit-package "$package"); done < <(sed -n 's/==.*//p' base.txt | sort -u)
lock all --extra all "${in_base[@]}" "$@"
lock dev --extra dev "${in_base[@]}" --constraint all.txt "$@"
