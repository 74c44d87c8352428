"""A real Slurm cluster of several nodes on this machine without root: a controller, and a daemon for each node."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.launch.hosts import CONTROLLER, address

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin:/sbin")]
_CONFIGURATION = """\
ClusterName=mini
SlurmctldHost={host}({controller})
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=2,sched_interval=2
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode={gang}
ReturnToService=2
KillWait=5
MinJobAge=3600
JobRequeue=1
GresTypes=gpu
StateSaveLocation={directory}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd-%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd-%n.log
NodeName=node[1-{nodes}] NodeAddr={addresses} Port={daemons} CPUs=8 RealMemory=16000 Gres=gpu:8 State=UNKNOWN
PartitionName=DEFAULT Nodes=ALL MaxTime=INFINITE State=UP OverSubscribe={shared}
PartitionName=main Default=YES PriorityTier=5 PreemptMode={preemption} GraceTime=60
PartitionName=urgent PriorityTier=10 PreemptMode=OFF
"""
# any character devices will do: Slurm needs one file per GPU and assigns their numbers
_GPUS = (
    "NodeName=node[1-{nodes}] Name=gpu "
    "File=/dev/null,/dev/zero,/dev/full,/dev/random,/dev/urandom,/dev/tty,/dev/ptmx,/dev/kmsg\n"
)


@contextmanager
def mini_slurm(
    directory: Path, nodes: int = 2, preemption: str = "REQUEUE", hosts: Sequence[Sequence[str]] = ()
) -> Iterator[dict[str, str]]:
    """Run the cluster; yield the environment variables for `sbatch` and the other commands.

    With `hosts` of `two_hosts`, each daemon runs on one of them.

    The spool is elsewhere, because Slurm fails to start jobs if the path of a Unix socket in it exceeds 108 bytes.
    Jobs in `urgent` preempt jobs in `main`: these are requeued or, with `preemption="SUSPEND"`, stopped meanwhile.
    """
    spool = TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True)
    for name in ("state", "run", "log"):
        (directory / name).mkdir(parents=True)
    ports = _free_ports(nodes + 1)
    gang, shared = ("SUSPEND,GANG", "FORCE:1") if preemption == "SUSPEND" else (preemption, "NO")
    (directory / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname(), user=getpass.getuser(), directory=directory, spool=spool.name, nodes=nodes,
            port=ports, preemption=preemption, gang=gang, shared=shared, daemons=f"[{ports + 1}-{ports + nodes}]",
            controller=address(CONTROLLER) if hosts else "127.0.0.1",
            addresses=address(f"[1-{nodes}]") if hosts else "127.0.0.1",
        )
    )  # fmt: skip
    (directory / "gres.conf").write_text(_GPUS.format(nodes=nodes))
    environment = {"SLURM_CONF": str(directory / "slurm.conf"), "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    full = {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM")}, **environment}
    try:
        prefixes = hosts or [()] * nodes
        daemons = ([*prefix, "slurmd", "-N", f"node{number}"] for number, prefix in enumerate(prefixes, 1))
        for command in (["slurmctld"], *daemons):
            subprocess.run(command, env=full, check=True, cwd=directory, capture_output=True)
        _wait(full)
        yield environment
    finally:
        subprocess.run(["scancel", f"--user={getpass.getuser()}"], env=full, check=False, timeout=60)
        until = time.monotonic() + 20  # for the processes of a job, which outlive the daemons
        while subprocess.run(["squeue", "-h"], env=full, check=False, capture_output=True).stdout:
            if time.monotonic() > until:
                break
            time.sleep(0.2)
        for file in (directory / "run").glob("*.pid"):
            with suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        spool.cleanup()


def _wait(environment: dict[str, str], seconds: float = 300) -> None:
    until, states = time.monotonic() + seconds, ""
    while time.monotonic() < until:
        command = ["sinfo", "-h", "-o", "%T"]
        states = subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout
        if set(states.split()) == {"idle"}:
            return
        time.sleep(0.1)
    raise TimeoutError(f"Slurm did not come up: {states}")


def _free_ports(count: int) -> int:
    """Return the first of a range of free ports."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        with suppress(OSError):
            sockets = [socket.create_server(("", first + number)) for number in range(count)]
            for each in sockets:
                each.close()
            return first
    raise OSError("no free ports")
