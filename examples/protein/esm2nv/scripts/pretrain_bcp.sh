#!/usr/bin/env bash
# Pretrains ESM-2nv on Base Command Platform; scripts/pretrain_on_bcp.sh says what can be set.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_on_bcp.sh" "$here" pretrain_esm2_650M "$@"
