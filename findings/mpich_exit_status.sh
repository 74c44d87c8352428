#!/usr/bin/env bash
# mpiexec of MPICH and Intel MPI ends with the bitwise "or" of the statuses of its processes: 85 and 42 make 127.
#
# Package:   mpich 5.0.2 and impi-rt 2021.18.1 (Intel MPI); Open MPI 4.1.4 (Debian 12) returns the status of a process
# Expected:  A launcher ends with the status of one of the processes, as srun (the highest), or with a status of its
#            own, as torchrun (1).
# What is:   The statuses of all processes are combined bit by bit. The result may be one that no process returned:
#            85 ("requeue me") and 42 become 127 (command not found), 1 and 2 become 3. Or it hides one: 143 (saved
#            after SIGTERM) and 1 (failed) become 143.
# Met by:    Job scripts that requeue or resubmit by status: a run of which one process failed is requeued as if it
#            had been preempted. Remedy: end all processes with one status, or decide by a file that rank 0 writes;
#            -print-all-exitcodes of MPICH lists them.
# Source:    MPICH, src/pm/hydra/mpiexec/mpiexec.c, and pmodels/mpich issue 586.
# shellcheck source=common.sh
source "$(dirname "$0")/common.sh"
python_packages mpich mpich==5.0.2
python_packages intel impi-rt==2021.18.1

cat >"$work/rank" <<'SH'
#!/bin/sh
if [ "$PMI_RANK" = 0 ]; then exit "$1"; else exit "$2"; fi
SH
chmod +x "$work/rank"

for kind in mpich intel; do
    for pair in "0 3" "1 2" "85 42" "143 1"; do
        read -r first second <<<"$pair"
        status=0
        "$work/$kind/bin/mpiexec" -n 2 "$work/rank" "$first" "$second" >"$work/log" 2>&1 || status=$?
        echo "$kind: $first and $second -> $status"
    done
done >"$work/seen"
compare <<'END'
mpich: 0 and 3 -> 3
mpich: 1 and 2 -> 3
mpich: 85 and 42 -> 127
mpich: 143 and 1 -> 143
intel: 0 and 3 -> 3
intel: 1 and 2 -> 3
intel: 85 and 42 -> 127
intel: 143 and 1 -> 143
END
