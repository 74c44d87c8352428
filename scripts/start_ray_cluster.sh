#!/usr/bin/env bash
# Start a Ray cluster on the machines of a job: the head node on the first machine, workers on the others. Run this script
# once on each machine, in the background of the job; it ends with the job or with `ray stop`. Arguments are additional
# options of `ray start`, such as --num-cpus=64.
#
#   bcprun -no_redirect --npernode 1 --cmd 'bash scripts/start_ray_cluster.sh' &
#   srun --ntasks-per-node=1 bash scripts/start_ray_cluster.sh &
#   python -m bionemo.launch --config-name=pretrain_esm2_650M cluster=ray trainer.num_nodes=2 trainer.devices=8
#
# The machines authenticate with a token: $RAY_AUTH_TOKEN, from a secret of the platform, or the file
# $RAY_AUTH_TOKEN_PATH (~/.ray/auth_token), which the head node creates in the shared home directory.
set -euo pipefail

node=${NGC_REPLICA_ID:-${NGC_ARRAY_INDEX:-${SLURM_NODEID:-${GROUP_RANK:-0}}}}
first=${NGC_MASTER_ADDR:-${MASTER_ADDR:-}}
if [ -z "$first" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
fi
port=${RAY_PORT:-6379}
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}

command -v ray > /dev/null || { echo "error: Ray is not installed: pip install 'ray[train]'" >&2; exit 1; }
if [ "$node" = 0 ]; then
    if [ "$RAY_AUTH_MODE" = token ] && [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "$token" ]; then
        mkdir -p "$(dirname "$token")"
        (umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > "$token")
    fi
    exec ray start --head --port="$port" --disable-usage-stats --include-dashboard=false --block "$@"
fi
[ -n "$first" ] || { echo "error: the first machine is unknown: set MASTER_ADDR to its name" >&2; exit 1; }
for _ in $(seq 60); do # the head may take its time
    if [ -n "${RAY_AUTH_TOKEN:-}" ] || [ -s "$token" ] || [ "$RAY_AUTH_MODE" != token ]; then
        if ray health-check --address "$first:$port" > /dev/null 2>&1; then
            exec ray start --address="$first:$port" --disable-usage-stats --block "$@"
        fi
    fi
    sleep 2
done
echo "error: $(hostname) cannot join a Ray cluster at $first:$port: check that the name and port can be reached, and that \$RAY_AUTH_TOKEN or $token is the same on all machines" >&2
exit 1
