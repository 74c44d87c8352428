"""Every user error is one line with exit status 1, and no job is submitted."""

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.launch.stubs import Stubs
from tests.support.launches import BCP, launch

SLURM = ["cluster=bcm", "trainer.devices=8"]
WRONG: dict[str, tuple[list[str], str]] = {
    "a cluster that there is not": (["cluster=slurmm"], r"slurmm.*bcm, bcp, k8s, local, mpi, ray"),
    "a key of another cluster": (["cluster=mpi", "cluster.partition=gpu"], r"cluster.partition"),
    "a sweep": (["-m", "model.optim.lr=1e-3,1e-4"], r"-m: only one run can be launched at a time"),
    "several machines": (["trainer.num_nodes=2"], r"trainer.num_nodes=2, but cluster=local uses this machine only"),
    "a number of devices": ([*SLURM, "trainer.devices=auto"], r"trainer.devices=auto: set the number of devices"),
    "devices of a node": (
        [*SLURM, "trainer.devices=16", "cluster.gpus_per_node=8"], r"=16, but a node has cluster.gpus_per_node=8"
    ),
    "a number of GPUs": ([*SLURM, "cluster.gpus_per_node=many"], r"cluster.gpus_per_node"),
    "a signal": ([*SLURM, "cluster.signal='B:SIGUSR1@90'"], r"cluster.signal is 'B:SIGUSR1@90', expected a value"),
    "an option twice": ([*SLURM, "+cluster.additional_parameters.time=1"], r"parameters.time: set cluster.time"),
    "an option of ours": ([*SLURM, "+cluster.additional_parameters.job-name=x"], r"job-name: it is already set"),
    "no option": ([*SLURM, "cluster.additional_parameters={_x: 1}"], r"additional_parameters._x: .* another option"),
    "two lines": ([*SLURM, "cluster.account='a\nb'"], r"sbatch --account is 'a\\nb', expected one line of text"),
    "a variable's name": ([*SLURM, "cluster.env_vars={A-B: 1}"], r"cluster.env_vars.A-B: this is not a valid name"),
    "an unset variable": ([*SLURM, "cluster.account=${oc.env:NOT_SET_HERE}"], r"NOT_SET_HERE"),
    "a missing image": ([*SLURM, "cluster.container_image=/no/image.sqsh"], r"image=/no/image.sqsh: the file does"),
    "a missing mount": ([*SLURM, "cluster.container_image=org/image:1", "cluster.container_mounts=[/no/fsx:/fsx]"],
                        r"cluster.container_mounts: /no/fsx does not exist"),
    "a missing hostfile": (["cluster=mpi", "cluster.hostfile=nowhere"], r"cluster.hostfile=nowhere: the file"),
    "no instance": (["cluster=bcp"], r"missing value: set cluster.instance=..., which BCP req"),
    "too few GPUs": ([*BCP, "trainer.devices=16"], r"=16, but cluster.instance=dgxa100.80g.8.norm has 8"),
    "a priority": ([*BCP, "cluster.priority=MEDIUM"], r"cluster.priority is 'MEDIUM', expected .*NORMAL"),
    "an array type": ([*BCP, "cluster.array_type=MPIRUN"], r"cluster.array_type is 'MPIRUN', .*did you mean MPI"),
    "an order": ([*BCP, "cluster.order=100"], r"cluster.order is 100, expected from 1 to 99"),
    "a secret by its value": ([*BCP, "cluster.secrets=['a b']"], r"cluster.secrets\[0\] must be the NAME"),
    "a secret": ([*SLURM, "cluster.env_vars={WANDB_API_KEY: 0123456789}"], r"env_vars.WANDB_API_KEY contains a s"),
}  # fmt: skip


def error_of(captured: pytest.CaptureFixture[str]) -> str:
    lines = captured.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("case", WRONG)
def test_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, expected = WRONG[case]
    stubs = Stubs(tmp_path / "bin")
    for name in ("sbatch", "ngc", "mpirun"):
        stubs.add(name)
    assert launch(monkeypatch, tmp_path, *arguments, path=stubs.directory) == 1
    assert re.search(expected, error_of(capsys))
    assert stubs.calls() == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (SLURM, "sbatch was not found: submit from a login node"),
        (["cluster=mpi"], "mpirun was not found: install it"),
        (BCP, "ngc was not found: install the NGC CLI"),
        (["cluster=ray"], r"cluster=ray requires the extra 'ray' of bionemo: pip install 'ray\[train\]"),
    ],
)
def test_missing_programs(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr("bionemo.launch.ray.find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launch(monkeypatch, tmp_path, *arguments) == 1
    assert re.search(expected, error_of(capsys))


def test_the_configuration_of_a_queued_job_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch", "print('17;mini')")
    results = tmp_path / "results"
    used = []
    for rate in ("1e-4", "2e-4", "2e-4", "1e-4"):
        job = [*SLURM, "name=esm", f"exp_manager.exp_dir={results}", f"model.optim.lr={rate}"]
        assert launch(monkeypatch, tmp_path, *job, path=stubs.directory) == 0
        name = re.findall(r"--config-name=(\S+)", (results / "nemo-megatron-esm_submission.sh").read_text())[0]
        used.append(name)
        assert yaml.safe_load((results / name).read_text())["model"]["optim"]["lr"] == float(rate)
    assert used[0] == used[3] == "esm_hydra.yaml"
    assert used[1] == used[2] != used[0]
    assert {path.name for path in results.glob("*.yaml")} == {*used}


REFUSES = """\
if sys.argv[-1].endswith("_test_submission.sh"):
    print("sbatch: error: invalid partition\\nsbatch: error: Batch job submission failed", file=sys.stderr)
    sys.exit(1)
print(16 + len(open(calls.name).readlines()), "mini", sep=";")
"""


def test_a_job_chain_is_submitted_completely_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch", REFUSES)
    stubs.add("scancel")
    chain = [*SLURM, "do_preprocessing=True", "name=esm", "exp_manager.exp_dir=results/esm"]
    assert launch(monkeypatch, tmp_path, *chain, path=stubs.directory) == 0
    results, head = tmp_path / "results" / "esm", "nemo-megatron-esm"
    assert capsys.readouterr().out.splitlines() == [
        "esm_prepare: submitted batch job 17", "esm: submitted batch job 18", f"logs and results: {results}",
    ]  # fmt: skip
    assert (results / "launcher.log").read_text() == "Submitted batch job 17\nSubmitted batch job 18\n"
    assert stubs.calls() == [
        ["sbatch", "--parsable", f"{results}/{head}_prepare_submission.sh"],
        ["sbatch", "--parsable", "--dependency=singleton,afterok:17", "--kill-on-invalid-dep=yes",
         f"{results}/{head}_submission.sh"],
    ]  # fmt: skip
    assert launch(monkeypatch, tmp_path, *chain, "do_testing=True", path=stubs.directory) == 1
    error = capsys.readouterr().err
    message = r"sbatch: error: invalid partition sbatch: error: Batch job submission failed"
    assert re.fullmatch(rf"error: sbatch refused \S+_test_submission.sh: {message}\n", error)
    assert stubs.calls("scancel") == [["scancel", "19", "20"]]


BANNER = """\
print("-----\\n   Welcome to node 7\\n--> Verifying (2026)...OK")
number = 16 + len(open(calls.name).readlines())
"""


@pytest.mark.parametrize("line", ["number", "f'{number};mini'", "f'Submitted batch job {number} on cluster mini'"])
def test_the_job_number_is_found_after_a_banner(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch", f"{BANNER}print({line})")
    chain = [*SLURM, "do_testing=True", "name=esm", "exp_manager.exp_dir=results/esm"]
    assert launch(monkeypatch, tmp_path, *chain, path=stubs.directory) == 0
    log = tmp_path / "results" / "esm" / "launcher.log"
    assert log.read_text() == "Submitted batch job 17\nSubmitted batch job 18\n"
    assert stubs.calls()[1][2] == "--dependency=singleton,afterok:17"


def test_a_missing_job_number_and_a_failed_scancel_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch", f"{BANNER}print(number) if number == 17 else None")
    stubs.add("scancel", "print('scancel: error: no controller', file=sys.stderr); sys.exit(1)")
    chain = [*SLURM, "do_testing=True", "name=esm", "exp_manager.exp_dir=results/esm"]
    assert launch(monkeypatch, tmp_path, *chain, path=stubs.directory) == 1
    error = error_of(capsys)
    assert "sbatch printed no job number for" in error
    assert "'----- Welcome to node 7 --> Verifying (2026)...OK'" in error
    assert (
        "the jobs 17 are still queued, because scancel failed (scancel: error: no controller): `scancel 17`" in error
    )


def test_an_error_of_ngc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("ngc", "print('Error: Invalid org.\\nTry again.', file=sys.stderr); sys.exit(1)")
    assert launch(monkeypatch, tmp_path, *BCP, path=stubs.directory) == 1
    assert error_of(capsys) == f"error: ngc refused {tmp_path}/ngc-launch.sh: Error: Invalid org. Try again."


def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch")
    arguments = [*SLURM, f"exp_manager.exp_dir={tmp_path}/file/below"]
    assert launch(monkeypatch, tmp_path, *arguments, path=stubs.directory) == 1
    assert "cannot be written (Not a directory): choose another exp_manager.exp_dir" in error_of(capsys)
    assert stubs.calls() == []


def test_the_exit_status_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("mpirun", "sys.exit(3)")
    assert launch(monkeypatch, tmp_path, "cluster=mpi", "do_testing=True", path=stubs.directory) == 3
    assert len(stubs.calls()) == 1  # a run that cannot train is not tested
    (log,) = tmp_path.rglob("log-*.out")
    assert os.path.getsize(log) == 0
