"""`python -m bionemo.cluster check` with all processes, started by the bcprun substitute, and with missing ones."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bionemo.cli.cluster import main
from bionemo.common.errors import RankError
from bionemo.common.launcher_environment import launched_process
from bionemo.launch.check import check
from tests.conftest import ROOT
from tests.support.runs import FORK

CHECK = [sys.executable, "-m", "bionemo.cluster", "check"]


def environment(**more: object) -> dict[str, str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    return {**os.environ, **place, "OMP_NUM_THREADS": "1", **{name: str(value) for name, value in more.items()}}


def test_all_ranks_are_listed_and_all_reduce_is_correct() -> None:
    arguments = " ".join(CHECK)
    done = subprocess.run(
        [ROOT / "scripts" / "bcprun", "--nnodes", "2", "--npernode", "1", "--cmd", arguments],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    columns, *ranks, _ = done.stdout.splitlines()
    assert columns.split()[:6] == ["rank", "node", "local", "host", "process", "device"]
    found = [rank.split() for rank in ranks]
    assert [rank[:4] for rank in found] == [[node, node, "0", socket.gethostname()] for node in "01"]
    assert {rank[-1] for rank in found} == {"bcprun"}
    assert done.stdout.endswith("all-reduce over 2 processes with gloo: the sum is correct\n")


@pytest.mark.slow
def test_missing_ranks_are_named(tmp_path: Path) -> None:
    """Two of three ranks connect; the third uses another port."""
    first = environment(RANK=0, LOCAL_RANK=0, WORLD_SIZE=3, NODE_RANK=0)
    lost = environment(RANK=2, LOCAL_RANK=0, WORLD_SIZE=3, NODE_RANK=2)
    environments = (first, {**lost, "RANK": "1", "MASTER_PORT": first["MASTER_PORT"]}, lost)
    waiting = [FORK.Process(target=_check, args=(each, tmp_path / f"{n}")) for n, each in enumerate(environments)]
    for process in waiting:
        process.start()
    for process in waiting:
        process.join(600)
    assert waiting[0].exitcode == 1
    error = (tmp_path / "0.err").read_text()
    assert error.splitlines()[-1] == "error: 1 of 3 processes did not connect within 5 s: ranks 2"
    assert len((tmp_path / "0.out").read_text().splitlines()) == 3
    assert waiting[2].exitcode == 1
    assert waiting[1].exitcode == 1
    assert "all-reduce failed" in (tmp_path / "1.err").read_text().splitlines()[-1]


def _check(environment: dict[str, str], output: Path) -> None:
    """Run the command in a process that has imported torch, so that the time to connect does not include it."""
    for number, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(output.with_suffix(suffix), os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(environment)
    sys.argv = ["cluster", "check", "--timeout", "5"]
    main()


def test_a_process_without_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster", "check"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: no launcher started this process: start it with torchrun")


def test_a_local_rank_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, 8 processes on 4 GPUs, or `srun --gpus-per-task=1`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    process = launched_process({"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"})
    assert process is not None
    with pytest.raises(RankError, match="local rank 3, but it can use 1 GPU"):
        check(process, cpu=False, timeout=1)


@pytest.mark.parametrize(("option", "value"), [("--env", "FOO"), ("--env", "=x"), ("--accelerator", "gpuu")])
def test_invalid_options_of_ray(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cluster", "ray", option, value, "--", "true"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert f"argument {option}: " in capsys.readouterr().err
