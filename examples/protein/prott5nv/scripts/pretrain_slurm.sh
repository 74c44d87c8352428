#!/usr/bin/env bash
# Pretrain ProtT5nv on a Slurm cluster; settings: scripts/pretrain_on_slurm.sh.
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
exec bash "$here/../../../scripts/pretrain_on_slurm.sh" "$here" pretrain_small "$@"
