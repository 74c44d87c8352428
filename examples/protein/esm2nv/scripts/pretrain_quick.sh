#!/usr/bin/env bash
# Prepare the data of ESM-2nv or pretrain it on this machine; settings: scripts/pretrain_quick.sh.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_quick.sh" "$here" pretrain_esm2_8M "$@"
