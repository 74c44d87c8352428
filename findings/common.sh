# Functions shared by the findings; sourced, not run.
# Sets: $work (temporary folder, removed at exit). Defines: python_packages, debian_packages, compare.
# shellcheck shell=bash
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

# python_packages NAME PACKAGE==VERSION ...: a virtual environment $work/NAME with these packages.
python_packages() {
    python3 -m venv "$work/$1"
    "$work/$1/bin/pip" install --quiet --no-compile "${@:2}"
}

# debian_packages PACKAGE=VERSION ...: unpacks them into $work/debian and puts their programs on PATH.
# Versions are those of Debian 12 (amd64).
debian_packages() {
    mkdir "$work/deb" "$work/debian"
    (cd "$work/deb" && apt-get download --quiet=2 -o APT::Sandbox::User=root "$@")
    local file
    for file in "$work"/deb/*.deb; do dpkg -x "$file" "$work/debian"; done
    export PATH="$work/debian/usr/bin:$PATH" LD_LIBRARY_PATH="$work/debian/usr/lib/x86_64-linux-gnu"
}

# compare < EXPECTED: prints $work/seen and ends with status 1 if it is not EXPECTED.
compare() {
    cat "$work/seen"
    diff - "$work/seen" >"$work/difference" || {
        echo "CHANGED (< recorded, > seen now):"
        cat "$work/difference"
        exit 1
    }
    echo "as recorded"
}
