#!/usr/bin/env bash
# A job that is submitted in the shell of another Slurm job takes over options of that job, such as the order of ranks.
#
# Package:   Slurm 22.05.8 (slurm-wlm of Debian 12)
# Expected:  sbatch starts a job with the options of its script and command line, wherever it is called.
# What is:   salloc and srun give the shell variables (SLURM_DISTRIBUTION, SLURM_CPU_BIND, SLURM_GPUS), sbatch passes
#            its environment to the job, and srun in the job reads them as its own options. Submitted in the shell of
#            `salloc --distribution=cyclic`, ranks 0 and 1 of the job are on different nodes. No warning.
# Met by:    Training that is submitted in an interactive job, as clusters ask for whose login nodes are small. Ranks
#            that share tensors are on different nodes: the run is slow, or wrong if it computes the number of the
#            node from the rank. Remedy: unset SLURM_* before sbatch, as bionemo launch does, or give every option.
# Source:    man srun, INPUT ENVIRONMENT VARIABLES, and man sbatch, --export (ALL by default).
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
version=22.05.8-4+deb12u3
debian_packages slurmctld=$version slurmd=$version slurm-client=$version slurm-wlm-basic-plugins=$version \
    libhwloc15=2.9.0-1 libnuma1=2.0.16-1 liblz4-1=1.9.4-1
libraries="$work/debian/usr/lib/x86_64-linux-gnu"
export PATH="$work/debian/usr/sbin:$PATH" LD_LIBRARY_PATH="$libraries:$libraries/slurm-wlm"
export SLURM_CONF="$work/slurm.conf"
unset "${!SBATCH_@}"

# a controller and two nodes on this machine
port=$(python3 -c 'import random; print(random.randint(20000, 30000))')
mkdir "$work/state"
cat >"$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/none
CredType=cred/none
PluginDir=$libraries/slurm-wlm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmdParameters=config_overrides
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool-%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
NodeName=node[1-2] NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + 2))] CPUs=8 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
trap 'kill $(cat "$work"/*.pid) 2>/dev/null; sleep 1; rm -rf "$work"' EXIT
(
    cd "$work"
    slurmctld-wlm
    for node in node1 node2; do slurmd-wlm -N "$node" -d "$work/debian/usr/sbin/slurmstepd-wlm"; done
) 2>"$work/daemons"
for _ in $(seq 600); do
    [ "$(sinfo -h -o %T 2>"$work/daemons")" = idle ] && break
    sleep 0.1
done

cat >"$work/job.sh" <<JOB
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --output=$work/out
srun bash -c 'echo "  rank \$SLURM_PROCID: node \$SLURM_NODEID"'
JOB
{
    sbatch --version
    echo "submitted in a shell without a job:"
    sbatch --wait --quiet "$work/job.sh"
    sort "$work/out"
    rm "$work/out"
    echo "submitted in the shell of a job with --distribution=cyclic:"
    salloc --quiet --nodes=1 --ntasks=1 --distribution=cyclic sbatch --wait --quiet "$work/job.sh"
    sort "$work/out"
} >"$work/seen"
compare <<'END'
slurm-wlm 22.05.8
submitted in a shell without a job:
  rank 0: node 0
  rank 1: node 0
  rank 2: node 1
  rank 3: node 1
submitted in the shell of a job with --distribution=cyclic:
  rank 0: node 0
  rank 1: node 1
  rank 2: node 0
  rank 3: node 1
END
