"""The bcprun substitute supports the platform's options and variables and leaves no process behind."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.stubs import Stubs

BCPRUN = ROOT / "scripts" / "bcprun"


def bcprun(*arguments: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [BCPRUN, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr


def test_rank_variables_of_every_process(tmp_path: Path) -> None:
    names = "RANK LOCAL_RANK GROUP_RANK WORLD_SIZE NGC_ARRAY_INDEX NGC_REPLICA_ID NGC_ARRAY_SIZE NGC_GPUS_PER_NODE"
    shown = " ".join(f"${name}" for name in names.split())
    status, output, noted = bcprun(
        "--nnodes", "2", "--npernode", "2", "--env", "MINE=a b", "--workdir", str(tmp_path), "-no_redirect",
        "--binding", "core-complex", "--debug", "--cmd", f'echo {shown} "$MINE" "$PWD" $NCCL_DEBUG $MASTER_ADDR',
    )  # fmt: skip
    assert status == 0
    assert sorted(output.splitlines()) == [
        f"{rank} {rank % 2} {rank // 2} 4 {rank // 2} {rank // 2} 2 2 a b {tmp_path} INFO 127.0.0.1"
        for rank in range(4)
    ]
    assert noted == "bcprun (a substitute): 2 x 2 processes, all on this machine\n"


def test_nodes_default_to_those_of_the_job() -> None:
    assert len(bcprun("-c", "echo $RANK", NGC_ARRAY_SIZE="3")[1].splitlines()) == 3


def test_a_failed_process_ends_the_others() -> None:
    status, _, noted = bcprun("-n", "2", "-p", "2", "-c", "[ $RANK = 3 ] && exit 7; exec sleep 3600")
    assert status == 7
    assert noted.splitlines()[-1] == "bcprun (a substitute): a process ended with status 7: terminating the others"


def test_other_processes_continue_if_configured() -> None:
    status, output, _ = bcprun("-n", "2", "--async", "-c", "[ $RANK = 1 ] && exit 7; sleep 1; echo done")
    assert (status, output) == (7, "done\n")


def test_another_launcher(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("mpirun")
    path = f"{stubs.directory}:{os.environ['PATH']}"
    status, _, _ = bcprun("-n", "2", "-p", "4", "--launcher", "mpirun --allow-run-as-root", "-c", "x 'y z'", PATH=path)
    assert status == 0
    expected = ["mpirun", "--allow-run-as-root", "-np", "8", "--oversubscribe", "bash", "-c", "x 'y z'"]
    assert stubs.calls() == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "the following arguments are required: -c/--cmd"),
        (["-c", "x", "-n", "0"], "--nnodes and --npernode are 1 or more"),
        (["-c", "x", "-e", "A"], "--env A: expected NAME=VALUE"),
        (["-c", "x", "-w", "/no/where"], "--workdir /no/where: there is no such directory"),
        (["-c", "x", "--binding", "tight"], "invalid choice: 'tight'"),
    ],
)
def test_mistakes(arguments: list[str], expected: str) -> None:
    status, _, noted = bcprun(*arguments)
    assert status == 2
    assert expected in noted.splitlines()[-1]
