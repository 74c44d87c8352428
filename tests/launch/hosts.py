"""Two simulated hosts with their own names and addresses: network namespaces on one bridge. Needs root."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir

from tests.conftest import ROOT

AVAILABLE = os.geteuid() == 0 and all(map(shutil.which, ("ip", "nsenter", "unshare")))
_ENTER = """
hostname "$0" && mount --bind "$1" /etc/hosts && mount --bind /dev/null /etc/resolv.conf && shift && exec "$@"
"""


CONTROLLER = 254  # this machine, in the network of the hosts


def address(number: int | str) -> str:
    """Return the address of host 1 or 2, or of this machine."""
    return f"10.77.0.{number}"


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[list[str]]]:
    """Create the hosts, once at a time; yield, for each, the command prefix that runs a command on it."""
    tag = "bionemo"  # interface names have at most 15 characters
    names = directory / "hosts"
    names.write_text("127.0.0.1 localhost\n" + "".join(f"{address(n)} node{n}\n" for n in (1, 2)))
    lock = os.open(Path(gettempdir()) / "two_hosts.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _remove(tag)  # of a test that was killed: its bridge would receive the packets of the new one
    try:
        _ip(f"link add {tag} type bridge", f"link set {tag} up", f"addr add {address(CONTROLLER)}/24 dev {tag}")
        for n in (1, 2):
            space, here = f"{tag}n{n}", f"{tag}v{n}"
            _ip(
                f"netns add {space}", f"link add {here} type veth peer name e0 netns {space}",
                f"link set {here} master {tag} up", f"-n {space} addr add {address(n)}/24 dev e0",
                f"-n {space} link set e0 up", f"-n {space} link set lo up",
                f"-n {space} route add default dev e0",  # programs find their own address through the default route
            )  # fmt: skip
        yield [
            ["nsenter", f"--net=/run/netns/{tag}n{n}", "unshare", "--mount", "--uts", "--propagation", "private",
             "sh", "-c", _ENTER, f"node{n}", str(names)]
            for n in (1, 2)
        ]  # fmt: skip
    finally:
        _remove(tag)
        os.close(lock)


@contextmanager
def ray_cluster(
    directory: Path,
) -> Iterator[tuple[list[list[str]], dict[str, str], list["subprocess.Popen[bytes]"]]]:
    """Start Ray on two simulated hosts: Ray distinguishes nodes by their addresses.

    Yields the command prefixes of the hosts, the environment of a command, and the processes that run Ray.
    """
    token = {"RAY_TMPDIR": "/tmp", "RAY_AUTH_TOKEN_PATH": str(directory / "token"), "RAY_PORT": "6379"}
    environment = {
        **os.environ, **token, "MASTER_ADDR": address(1), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    script = ["bash", str(ROOT / "scripts" / "start_ray_cluster.sh"), "--num-cpus=2"]
    with two_hosts(directory) as hosts:
        members = [
            subprocess.Popen(
                [*host, *script, f"--node-ip-address={address(number)}"], cwd=directory, start_new_session=True,
                env={**environment, "GROUP_RANK": str(number - 1)},
            )
            for number, host in enumerate(hosts, 1)
        ]  # fmt: skip
        try:
            yield hosts, environment, members
        finally:
            for member in members:
                with suppress(ProcessLookupError):
                    os.killpg(member.pid, 9)


def _ip(*commands: str) -> None:
    for arguments in commands:
        subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def _remove(tag: str) -> None:
    for arguments in (f"netns del {tag}n1", f"netns del {tag}n2", f"link del {tag}"):
        subprocess.run(["ip", *arguments.split()], check=False, capture_output=True)
