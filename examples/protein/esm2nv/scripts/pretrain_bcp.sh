#!/usr/bin/env bash
# Pretrain ESM-2nv on Base Command Platform; settings: scripts/pretrain_on_bcp.sh.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_on_bcp.sh" "$here" pretrain_esm2_650M "$@"
