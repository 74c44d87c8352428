#!/usr/bin/env bash
# Copy the raw UniRef50/90 data to the local disk, prepare them there, and copy the result back.
#
#   DATASET_DIR            name of the directory of raw data, such as uniref50_90_202104_esm2nv_v1.0
#   DATA_DIR_IN_REMOTE_HD  parent of that directory, such as /ngc_workspace_mount/data_from_ngc
#   DATA_DIR_IN_LOCAL_HD   directory on the local disk, such as /workspace/data_from_ngc
#   DRY_RUN                True: print what would be done
#   BIONEMO_HOME           the checkout (default: the one that contains this script)
#
# Arguments are overrides of the configuration, such as model.data.preprocessing.on_unknown=skip.
# The last line of the output is the path of the result, ${DATA_DIR_IN_REMOTE_HD}/${DATASET_DIR}_preproc.
set -euo pipefail

: "${DATASET_DIR:?set it to the name of the directory of raw data}"
: "${DATA_DIR_IN_REMOTE_HD:?set it to the directory that holds ${DATASET_DIR}}"
: "${DATA_DIR_IN_LOCAL_HD:?set it to a directory on the local disk}"
BIONEMO_HOME="${BIONEMO_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../../../.." && pwd)}"

raw="${DATA_DIR_IN_REMOTE_HD}/${DATASET_DIR}"
work="${DATA_DIR_IN_LOCAL_HD}/${DATASET_DIR}"
result="${DATA_DIR_IN_REMOTE_HD}/${DATASET_DIR}_preproc"

run() {
    case "${DRY_RUN:-}" in
        "" | 0 | [Ff]alse | no) "$@" ;;
        *) printf 'would run:'; printf ' %q' "$@"; printf '\n' ;;
    esac
}

copy() { # whole or not at all: what was interrupted is copied again
    if [[ -d "$2" ]]; then
        echo "$2 exists"
        return
    fi
    echo "copying $1 to $2"
    run rm -rf "$2.partial"
    run mkdir -p "$(dirname "$2")"
    run cp -r "$1" "$2.partial"
    run mv "$2.partial" "$2"
}

[[ -d "${raw}" ]] || { echo "error: ${raw} is not a directory: check DATA_DIR_IN_REMOTE_HD and DATASET_DIR" >&2; exit 1; }
if [[ ! -d "${result}" ]]; then
    copy "${raw}" "${work}"
    run python "${BIONEMO_HOME}/examples/protein/esm2nv/pretrain.py" --config-name=pretrain_esm2_8M \
        do_preprocessing=True do_training=False model.data.dataset_path="${work}" "$@"
fi
copy "${work}" "${result}"
run python -m bionemo.preprocess --verify "${result}"
echo "${result}"
