#!/usr/bin/env bash
# Build, publish and run a container with this project.
#
#   bash setup/launch.sh pull               pull the image
#   bash setup/launch.sh build [-p] [-c]    build the image; -p: pull the base image, -c: without cache
#   bash setup/launch.sh push [-v VERSION] [-a TAG]   push the image to its registry, also as VERSION and TAG
#   bash setup/launch.sh dev [-d] [-c COMMAND]        start a shell in a new container; -d: in the background
#   bash setup/launch.sh attach             start another shell in the container
#   bash setup/launch.sh info               print the settings
#
# --dry-run before the command prints what would be run. Settings are read from the environment or from .env in the
# checkout, with one NAME=VALUE per line (ENV_FILE selects another file). Only the names below and secrets are read from
# the file, and nothing in it is executed. Secrets are WANDB_API_KEY, NGC_API_KEY, NGC_CLI_API_KEY and HF_TOKEN; they are
# passed to the container by name.
#
#   BIONEMO_IMAGE   name and tag of the image (bionemo)
#   PROJECT_PATH    the code to mount (this checkout), at BIONEMO_PATH in the container (/workspace/bionemo)
#   DATA_PATH, RESULTS_PATH   directories to mount at /data and /result; all paths are absolute and contain no colon
#   JUPYTER_PORT    port of this machine for port 8888 of the container (8888)
#   BIONEMO_CONTAINER  name of the container (bionemo)
set -euo pipefail

checkout="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
settings=(BIONEMO_IMAGE PROJECT_PATH BIONEMO_PATH DATA_PATH RESULTS_PATH JUPYTER_PORT BIONEMO_CONTAINER)
secrets=(WANDB_API_KEY NGC_API_KEY NGC_CLI_API_KEY HF_TOKEN)

die() { echo "error: $*" >&2; exit 1; }

read_env() { # a name that is set in the environment keeps that value
    local line name ignored=()
    while IFS= read -r line || [ -n "$line" ]; do
        line="${line%$'\r'}"
        [[ "$line" =~ ^[[:space:]]*(#|$) ]] && continue
        [[ "$line" =~ ^(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)$ ]] || die "$1: '${line%%=*}' is no NAME=VALUE"
        name="${BASH_REMATCH[2]}" line="${BASH_REMATCH[3]}"
        [[ "$line" =~ ^\"(.*)\"$ || "$line" =~ ^\'(.*)\'$ ]] && line="${BASH_REMATCH[1]}"
        case " ${settings[*]} ${secrets[*]} " in
            *" $name "*) [ -n "${!name+set}" ] || export "$name=$line" ;;
            *) ignored+=("$name") ;;
        esac
    done < "$1"
    [ "${#ignored[@]}" = 0 ] || echo "note: $1: ignored, as $0 has no such settings: ${ignored[*]}" >&2
}

check() { # NAME REGULAR_EXPRESSION EXPECTED: no value may be taken for an option of docker or for part of another one
    [[ "${!1}" =~ ^($2)$ ]] || die "$1=${!1}: expected $3"
}

run() {
    if [ "$dry_run" = 1 ]; then printf '%q ' "$@"; echo; else "$@"; fi
}

docker_is_there() {
    [ "$dry_run" = 1 ] || command -v docker > /dev/null || die "there is no docker here"
}

usage() { sed -n '2,/^set /{s/^# \{0,1\}//;/^set /d;p;}' "${BASH_SOURCE[0]}"; }

dry_run=0
if [ "${1:-}" = --dry-run ]; then dry_run=1; shift; fi
command="${1:-}"
[ $# -gt 0 ] && shift
env_file="${ENV_FILE:-$checkout/.env}"
if [ -f "$env_file" ]; then read_env "$env_file"; elif [ -n "${ENV_FILE:-}" ]; then die "there is no $ENV_FILE"; fi
: "${BIONEMO_IMAGE:=bionemo}" "${PROJECT_PATH:=$checkout}" "${BIONEMO_PATH:=/workspace/bionemo}"
: "${JUPYTER_PORT:=8888}" "${BIONEMO_CONTAINER:=bionemo}" "${DATA_PATH:=}" "${RESULTS_PATH:=}"
check BIONEMO_IMAGE '[A-Za-z0-9][A-Za-z0-9._/:@-]*' "the name of an image, such as host:5000/bionemo:1.0"
check BIONEMO_CONTAINER '[A-Za-z0-9][A-Za-z0-9_.-]*' "a name of letters, digits, '_', '.' and '-'"
check JUPYTER_PORT '[1-9][0-9]{0,4}' "the number of a port"
for name in PROJECT_PATH BIONEMO_PATH; do check "$name" '/[^:]*' "an absolute path without ':'"; done
for name in DATA_PATH RESULTS_PATH; do check "$name" '(/[^:]*)?' "an absolute path without ':'"; done

build() {
    local options=() option
    while getopts pc option; do
        case "$option" in
            p) options+=(--pull) ;;
            c) options+=(--no-cache) ;;
            *) exit 2 ;;
        esac
    done
    docker_is_there
    run docker build "${options[@]}" --tag "$BIONEMO_IMAGE" --file "$checkout/setup/Dockerfile" "$checkout"
}

push() {
    local tags=() option repository="${BIONEMO_IMAGE%:*}" tag
    case "${BIONEMO_IMAGE##*/}" in *:*) ;; *) repository="$BIONEMO_IMAGE" ;; esac # a colon may belong to a port
    while getopts v:a: option; do
        case "$option" in
            v | a) tag="$OPTARG" && check tag '[A-Za-z0-9_][A-Za-z0-9_.-]*' "the tag of an image" && tags+=("$tag") ;;
            *) exit 2 ;;
        esac
    done
    docker_is_there
    run docker push -- "$BIONEMO_IMAGE"
    for tag in "${tags[@]}"; do
        run docker tag -- "$BIONEMO_IMAGE" "$repository:$tag"
        run docker push -- "$repository:$tag"
    done
}

dev() {
    local options=(--interactive --rm) words=() detached=false option name
    while getopts dc: option; do
        case "$option" in
            d) detached=true ;;
            c) words=(bash -c "$OPTARG") ;;
            *) exit 2 ;;
        esac
    done
    if $detached; then
        options=(--detach --rm)
        [ "${#words[@]}" -gt 0 ] || words=(sleep infinity)
    elif [ -t 0 ]; then
        options+=(--tty)
    fi
    [ -d "$PROJECT_PATH" ] || die "PROJECT_PATH=$PROJECT_PATH is no directory"
    options+=(--name "$BIONEMO_CONTAINER" --shm-size=8g --publish "$JUPYTER_PORT:8888" --workdir "$BIONEMO_PATH")
    options+=(--volume "$PROJECT_PATH:$BIONEMO_PATH" --env "BIONEMO_HOME=$BIONEMO_PATH")
    [ -z "$DATA_PATH" ] || options+=(--volume "$DATA_PATH:/data")
    [ -z "$RESULTS_PATH" ] || options+=(--volume "$RESULTS_PATH:/result")
    if command -v nvidia-smi > /dev/null; then options+=(--gpus all); fi
    for name in "${secrets[@]}"; do
        if [ -n "${!name:-}" ]; then options+=(--env "$name"); fi
    done
    docker_is_there
    run docker run "${options[@]}" -- "$BIONEMO_IMAGE" "${words[@]:-bash}"
}

info() {
    local name
    for name in "${settings[@]}"; do echo "$name=${!name}"; done
    for name in "${secrets[@]}"; do
        if [ -n "${!name:-}" ]; then echo "$name is set"; else echo "$name is not set"; fi
    done
}

case "$command" in
    pull) docker_is_there; run docker pull -- "$BIONEMO_IMAGE" ;;
    build) build "$@" ;;
    push) push "$@" ;;
    dev) dev "$@" ;;
    attach) docker_is_there; run docker exec --interactive --tty -- "$BIONEMO_CONTAINER" bash ;;
    info) info ;;
    -h | --help | help) usage ;;
    *) usage >&2; die "'$command' is no command" ;;
esac
