#!/usr/bin/env bash
# Pretrains MegaMolBART on Base Command Platform; scripts/pretrain_on_bcp.sh says what can be set.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_on_bcp.sh" "$here" pretrain_small_span_aug "$@"
