"""Runs on a real Slurm cluster of two nodes: job scripts, signals before the time limit, preemption and failures."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.mini_slurm import MISSING, mini_slurm
from tests.support.launches import launch
from tests.support.runs import TEXT, fingerprint, logged, run_on_ranks, tiny

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: there is no {', '.join(MISSING)}")
TWO_NODES = ["cluster=bcm", "trainer.num_nodes=2", "trainer.devices=1"]
PATIENCE = 600  # seconds: four processes may share two cores with other tests


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with mini_slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment | {"MASTER_ADDR": "127.0.0.1"}  # this machine cannot resolve node1


@pytest.fixture
def slurm(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)


def call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def job(number: int) -> dict[str, str]:
    """Return the information of Slurm about a job."""
    return dict(re.findall(r"(\w+)=(\S*)", call("scontrol", "show", "job", str(number))))


def until(condition: Callable[[], object], what: Callable[[], str]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.2)


def ended(number: int) -> dict[str, str]:
    until(lambda: job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), lambda: str(job(number)))
    return job(number)


def submitted(capsys: pytest.CaptureFixture[str]) -> int:
    found = re.search(r"submitted batch job (\d+)", capsys.readouterr().out)
    assert found
    return int(found[1])


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("preempted", [False, True])
def test_an_interrupted_and_requeued_run_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preempted: bool
) -> None:
    """Slurm sends SIGUSR1 before the time limit; a job of higher priority preempts the run with SIGTERM."""
    steps = 800 if preempted else 400  # Slurm needs seconds to preempt a job
    long = [f"trainer.max_steps={steps}", f"trainer.val_check_interval={steps // 2}", "trainer.log_every_n_steps=10"]
    alone = tmp_path / "alone"
    assert [status for status, _ in run_on_ranks(alone, *long, ranks=2)] == [0, 0]

    directory = tmp_path / "results" / "esm"
    arguments = tiny(*long, *TWO_NODES, "name=esm", "cluster.signal=null", f"exp_manager.exp_dir={directory}")
    assert launch(monkeypatch, tmp_path, *arguments) == 0
    number = submitted(capsys)
    console = directory / f"log-nemo-megatron-esm_{number}.out"

    def trains(restarts: int) -> bool:
        starts = console.read_text().split("resuming from") if console.exists() else []
        return len(starts) == restarts + 1 and "\nstep " in starts[-1]

    until(lambda: trains(0), lambda: str(job(number)))
    call("scancel", "--signal=USR1", str(number))
    if preempted:
        until(lambda: trains(1), console.read_text)
        urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 1", f"--output={tmp_path}/urgent")
        call("sbatch", *urgent)
        until(lambda: console.read_text().count("resuming from") == 2, console.read_text)
    assert ended(number)["JobState"] == "COMPLETED"
    assert job(number)["Restarts"] == ("2" if preempted else "1")
    signals = ["SIGUSR1", "SIGTERM"] if preempted else ["SIGUSR1"]
    assert re.findall(r"received (\w+): saving step", console.read_text()) == signals

    results = directory / "results"
    assert fingerprint(results) == fingerprint(alone)
    assert logged(results, "reduced_train_loss") == logged(alone, "reduced_train_loss")
    assert logged(results, "val_loss")[steps] == logged(alone, "val_loss")[steps]


@pytest.mark.slow
def test_a_suspended_run_continues_and_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With SUSPEND,GANG Slurm stops the run until the urgent job ends: for longer than rank_timeout + 20 s."""
    long = ["trainer.max_steps=600", "trainer.val_check_interval=300", "trainer.log_every_n_steps=10",
            "trainer.rank_timeout=00:00:00:30"]  # fmt: skip
    alone, directory = tmp_path / "alone", tmp_path / "results" / "esm"
    assert [status for status, _ in run_on_ranks(alone, *long, ranks=2)] == [0, 0]
    with mini_slurm(tmp_path / "slurm", preemption="SUSPEND") as environment:
        for name, value in (environment | {"MASTER_ADDR": "127.0.0.1"}).items():
            monkeypatch.setenv(name, value)
        arguments = tiny(*long, *TWO_NODES, "name=esm", f"exp_manager.exp_dir={directory}")
        assert launch(monkeypatch, tmp_path, *arguments) == 0
        number = submitted(capsys)
        console = directory / f"log-nemo-megatron-esm_{number}.out"
        until(lambda: console.exists() and "\nstep " in console.read_text(), lambda: str(job(number)))
        assert job(number)["JobState"] == "RUNNING", console.read_text()
        urgent = ("--partition=urgent", "--nodes=2", "--ntasks-per-node=8", f"--output={tmp_path}/urgent")
        show = f"squeue --noheader --jobs={number} --format=%T"
        call("sbatch", "--wait", *urgent, f"--wrap=sleep 5; {show}; sleep 75; {show}")
        assert (tmp_path / "urgent").read_text() == "SUSPENDED\nSUSPENDED\n"
        state = ended(number)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "0"), console.read_text()
    results = directory / "results"
    assert fingerprint(results) == fingerprint(alone)
    assert logged(results, "reduced_train_loss") == logged(alone, "reduced_train_loss")


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_slurm_signals_a_run_before_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is two minutes, the signal comes 30 s earlier; after the requeue the run has the full time again."""
    directory = tmp_path / "results"
    arguments = tiny(*TWO_NODES, "trainer.max_steps=1000000", f"exp_manager.exp_dir={directory}", "cluster.time='2'",
                 "cluster.signal=SIGUSR1@30", "name=esm")  # fmt: skip
    assert launch(monkeypatch, tmp_path, *arguments) == 0
    number = submitted(capsys)
    console = directory / f"log-nemo-megatron-esm_{number}.out"
    until(lambda: console.exists() and "resuming from" in console.read_text(), lambda: str(job(number)))
    call("scancel", str(number))
    output = console.read_text()
    assert "received SIGUSR1: saving step" in output
    assert "DUE TO TIME LIMIT" not in output
    assert ended(number)["JobState"] == "CANCELLED"


@pytest.mark.usefixtures("slurm")
def test_a_rank_that_dies_ends_the_step_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\n[ "$SLURM_PROCID" = 1 ] && exit 3\nexec sleep 3600\n')
    python.chmod(0o755)
    arguments = [*TWO_NODES, f"cluster.python={python}", "trainer.accelerator=cpu", "name=dies"]
    assert launch(monkeypatch, tmp_path, *arguments) == 0
    state = ended(submitted(capsys))
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
    assert "task 1: Exited with exit code 3" in Path(state["StdOut"]).read_text()


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("given", ["", "SBATCH_EXPORT", "export"])
def test_env_vars_reach_the_run_with_every_export(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sites set SBATCH_EXPORT=NONE; srun then starts processes without the variables that the script exports."""
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "task $SLURM_PROCID: ${NCCL_SOCKET_IFNAME-not set}"\n')
    python.chmod(0o755)
    monkeypatch.setenv("SBATCH_EXPORT", "NONE") if given == "SBATCH_EXPORT" else None
    options = ["cluster.additional_parameters.export=NONE"] if given == "export" else []
    arguments = [*TWO_NODES, f"cluster.python={python}", "cluster.env_vars.NCCL_SOCKET_IFNAME=ib0", *options]
    assert launch(monkeypatch, tmp_path, *arguments, "trainer.accelerator=cpu", "name=exports") == 0
    state = ended(submitted(capsys))
    assert sorted(Path(state["StdOut"]).read_text().splitlines()) == ["task 0: ib0", "task 1: ib0"]


@pytest.mark.usefixtures("slurm")
def test_a_job_submitted_in_another_job_does_not_inherit_its_options(tmp_path: Path) -> None:
    """Slurm gives the shell of an interactive job variables that srun of the new job would read as its options."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\necho "task $SLURM_PROCID on node $SLURM_NODEID: ${SLURM_MEM_PER_NODE-all} memory"\n'
    )
    python.chmod(0o755)
    interactive = ["srun", "--nodes=1", "--ntasks=1", "--mem=100", "--gpus=1", "--distribution=cyclic"]
    arguments = [*TWO_NODES, "trainer.devices=2", f"cluster.python={python}", "trainer.accelerator=cpu", "name=inner"]
    command = [*interactive, sys.executable, "-m", "bionemo.launch", "--config-name=pretrain_esm2_8M", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.search(r"submitted batch job (\d+)", done.stdout)
    assert found, done.stderr
    state = ended(int(found[1]))
    lines = sorted(Path(state["StdOut"]).read_text().splitlines())
    assert lines == [f"task {rank} on node {rank // 2}: all memory" for rank in range(4)]


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    "arguments",
    [
        ["trainer.devices=8"],
        ["trainer.devices=8", "cluster.time=1-00:00:00", "cluster.signal=USR1@90", "cluster.mem=12.5"],
        ["trainer.devices=2", "cluster.exclusive=False", "cluster.gpus_per_task=1", "cluster.gpus_per_node=null",
         "cluster.gres=null", "cluster.dependency=null",
         "cluster.additional_parameters={comment: \"it is 'mine'\", nice: 0}"],
    ],
)  # fmt: skip
def test_sbatch_accepts_every_option(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """sbatch --test-only also checks that the job could start: the cluster has two nodes of eight GPUs."""
    place = f"exp_manager.exp_dir='{tmp_path}/a b $(x)'"
    assert launch(monkeypatch, tmp_path, "cluster=bcm", "trainer.num_nodes=2", *arguments, place, "--dry-run") == 0
    (script,) = re.findall(r"\n# \S[^\n]*_submission.sh\n(.*)", capsys.readouterr().out, re.DOTALL)
    (tmp_path / "script.sh").write_text(script)
    answer = subprocess.run(
        ["sbatch", "--test-only", tmp_path / "script.sh"], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    assert "to start at" in answer.stderr


@pytest.mark.usefixtures("slurm")
def test_errors_of_sbatch_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(monkeypatch, tmp_path, *TWO_NODES, "cluster.partition=nowhere") == 1
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: sbatch refused \S+: sbatch: error: .*invalid partition specified: nowhere.*\n", error)
    assert call("squeue", "--noheader", "--name=nemo-megatron-esm2-8M") == ""


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_the_gpt3_benchmark_writes_the_documented_directories(tmp_path: Path) -> None:
    small = [
        argument
        for argument in tiny(model="gpt3")
        if argument not in TEXT and not argument.startswith("trainer.max_steps")
    ]
    sizes = [*small, "model.global_batch_size=null", "model.optim.sched.constant_steps=0", "trainer.max_time=null"]
    data = ["model.data.mock.num_samples=100", "model.tokenizer.vocab_file=null", "model.tokenizer.merge_file=null"]
    script = ROOT / "examples" / "gpt3" / "scripts" / "bmk-pretrain-gpt3-126m2.sh"
    fewer = ["trainer.devices=1", "trainer.max_steps=4", "trainer.val_check_interval=4"]
    command = ["bash", str(script), *sizes, *data, *fewer]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"submitted batch job (\d+)", done.stdout)
    assert found
    number = int(found[1])
    results = tmp_path / "results" / "gpt3_126m"
    log = results / f"log-nemo-megatron-gpt3_126m_{number}.out"
    assert ended(number)["JobState"] == "COMPLETED", log.read_text()
    assert {path.name for path in results.iterdir()} == {
        "gpt3_126m_hydra.yaml", "launcher_cmd.log", "launcher.log", log.name,
        "nemo-megatron-gpt3_126m_submission.sh", "results",
    }  # fmt: skip
    assert (results / "launcher.log").read_text() == f"Submitted batch job {number}\n"
    names = {re.sub(r"(events.out.tfevents.).*", r"\1*", path.name) for path in (results / "results").iterdir()}
    logs = {f"nemo_log_globalrank-{rank}_localrank-0.txt" for rank in range(2)}
    guide = {"cmd-args.log", "events.out.tfevents.*", "git-info.log", "hparams.yaml", "lightning_logs.txt",
             "nemo_error_log.txt", *logs}  # fmt: skip
    assert guide <= names
    assert set(logged(results / "results", "reduced_train_loss")) == {1, 2, 3, 4}
    assert "step 4 of 4" in log.read_text()
