#!/usr/bin/env bash
# Pretrains ESM-1nv under Slurm; scripts/pretrain_on_slurm.sh says what can be set.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_on_slurm.sh" "$here" pretrain_small "$@"
