#!/usr/bin/env bash
# Prepares the data of ESM-2nv, or pretrains it, on this machine; scripts/pretrain_quick.sh says what can be set.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_quick.sh" "$here" pretrain_esm2_8M "$@"
