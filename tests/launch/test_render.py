"""Rendered job scripts, checked against approved files, with a real shell and with shellcheck."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.config.compose import compose_typed
from bionemo.config.paths import find_source
from tests.launch.stubs import Stubs
from tests.support.launches import BCP, launch

GOLDEN = Path(__file__).parent / "golden"
GPT3 = ["--config-name=pretrain_gpt3_126m", "exp_manager.exp_dir=results/gpt3_126m"]
SLURM = ["cluster=bcm", "cluster.partition=main", "cluster.account=acct"]
CASES: dict[str, list[str]] = {
    "bcm": [*GPT3, *SLURM, "cluster.env_vars={NCCL_DEBUG: INFO}"],
    "bcm_container": [
        *GPT3, *SLURM, "cluster.container_image=/apps/bionemo.sqsh", "cluster.container_mounts=[/fsx:/fsx]",
        "cluster.env_vars={BIONEMO_HOME: /fsx/home, NCCL_DEBUG: INFO}", "cluster.stderr_to_stdout=False",
        "cluster.additional_parameters={qos: high, cpus-per-task: 8, nice: 0}",
    ],
    "bcm_chain": [*GPT3, *SLURM, "do_preprocessing=True", "do_testing=True", "trainer.accelerator=cpu"],
    "bcm_benchmark": [*GPT3, *SLURM, "exp_manager.resume_if_exists=False", "cluster.account=null"],
    "bcp": [*BCP, "trainer.devices=8", "trainer.num_nodes=2", "cluster.workspaces=[W:/data:RW]", "cluster.labels=[ml]",
            "cluster.secrets=[wandb:WANDB_API_KEY]", "cluster.datasets=[17:/raw]", "do_preprocessing=True"],
    "bcp_jupyter": [*BCP, "trainer.devices=8", "trainer.num_nodes=2", "cluster.interactive=jupyter"],
    "mpi": ["cluster=mpi", "cluster.hostfile=hosts", "trainer.devices=8", "trainer.num_nodes=2",
            "cluster.mpirun_args=[--allow-run-as-root]", "cluster.env_vars={NCCL_DEBUG: INFO}", "name=esm"],
    "ray": ["cluster=ray", "trainer.devices=8", "trainer.num_nodes=2", "cluster.env_vars={A: b}", "name=esm"],
    "local": ["cluster=local", "trainer.devices=8", "name=esm", "do_testing=True"],
}  # fmt: skip


def rendered(text: str, here: Path) -> str:
    """Return the output of --dry-run without the configuration and with machine-specific paths replaced."""
    for place, name in ((str(here), "HERE"), (sys.executable, "PYTHON"), (str(Path(sys.argv[0])), "LAUNCH")):
        text = text.replace(place, name)
    files = text.split("\n# HERE/")
    return "\n# HERE/".join(file for file in files if "_hydra.yaml\n" not in file.partition("\n")[0] + "\n")


@pytest.mark.parametrize("case", CASES)
def test_scripts_equal_the_approved_files(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To approve changes, run with BIONEMO_APPROVE=1 and review the diff."""
    monkeypatch.delenv("BIONEMO_HOME", raising=False)
    assert launch(monkeypatch, tmp_path, *CASES[case], "--dry-run") == 0
    assert not list(tmp_path.iterdir())
    found = rendered(capsys.readouterr().out, tmp_path)
    file = GOLDEN / f"{case}.txt"
    if os.environ.get("BIONEMO_APPROVE"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(found)
    assert found == file.read_text()


MINE = """
defaults: [bcm, _self_]
container_image: /apps/mine.sqsh
container_mounts: ["/fsx:/fsx"]
srun_args: [--export=ALL, --mpi=pmix]
env_vars: {LD_LIBRARY_PATH: /fsx/lib}
"""


def test_a_cluster_file_of_the_user_needs_no_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    (tmp_path / "conf" / "cluster" / "mine.yaml").write_text(MINE)
    arguments = [f"--config-dir={tmp_path / 'conf'}", "cluster=mine", "--dry-run"]
    assert launch(monkeypatch, tmp_path, *arguments) == 0
    out, err = capsys.readouterr()
    for text in ("--container-image=/apps/mine.sqsh", "/fsx:/fsx", "--mpi=pmix", "LD_LIBRARY_PATH=/fsx/lib"):
        assert text in out
    assert launch(monkeypatch, tmp_path, *arguments, "--trust-config") == 0
    note = "note: --trust-config has no effect: configuration files may set every key\n"
    assert capsys.readouterr().err == f"{note}{err}"


@pytest.mark.parametrize("case", CASES)
def test_scripts_pass_shellcheck(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs = Stubs(tmp_path / "bin")
    for name in ("sbatch", "ngc", "mpirun", "bash"):
        stubs.add(name, "print(17)")
    (tmp_path / "hosts").write_text("# comment\n\nnode7 slots=8\n")
    monkeypatch.setattr("bionemo.launch.slurm.Path.exists", lambda _: True)
    monkeypatch.setattr("bionemo.launch.ray.find_spec", lambda _: True)
    assert launch(monkeypatch, tmp_path, *CASES[case], path=stubs.directory) == 0
    monkeypatch.undo()
    scripts = list(tmp_path.rglob("*.sh"))
    assert len(scripts) == (3 if case == "bcm_chain" else 1)
    for script in scripts:
        assert os.access(script, os.X_OK)
        for command in (["bash", "-n"], ["shellcheck"]):
            checked = subprocess.run([*command, script], capture_output=True, text=True, check=False)
            assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"--gpus-per-node=4", "--gres=gpu:4"}),
        (["cluster.gpus_per_node=8"], {"--gpus-per-node=8", "--gres=gpu:8"}),  # a node has more GPUs than are used
        (["cluster.gres=gpu:a100:8"], {"--gres=gpu:a100:8"}),
        (["cluster.gpus_per_node=null"], {"--gres=gpu:4"}),
        (["cluster.gres=null"], {"--gpus-per-node=4"}),
        (["cluster.gpus_per_node=8", "cluster.gres=gpu:a100:8"], {"--gpus-per-node=8", "--gres=gpu:a100:8"}),
        (["trainer.devices=[0,2]"], {"--gpus-per-node=2", "--gres=gpu:2"}),
        (["trainer.accelerator=cpu"], set()),
    ],
)
def test_slurm_jobs_request_the_gpus_of_the_run(
    arguments: list[str], expected: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    devices = [] if "devices" in str(arguments) else ["trainer.devices=4"]
    assert launch(monkeypatch, tmp_path, *SLURM, *devices, *arguments, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    options = {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH --g")}
    assert options == expected
    assert f"#SBATCH --ntasks-per-node={2 if '[0,2]' in str(arguments) else 4}" in lines


HOSTILE = "a b'c\"d$(touch owned)`touch owned`;touch owned\\ #&|>x"


def started(calls: list[list[str]], program: str) -> list[list[str]]:
    return [call[1:] for call in calls if call[0] == program]


def test_srun_arguments_of_the_user_keep_their_container_env(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = "cluster.srun_args=['--container-env=A,B',--container-writable]"
    image = [*SLURM, "trainer.devices=8", "cluster.container_image=org/image:1", given]
    assert launch(monkeypatch, tmp_path, *image, "cluster.env_vars={NCCL_DEBUG: INFO}", "--dry-run") == 0
    script = capsys.readouterr().out
    assert "    --container-env=NCCL_DEBUG,A,B \\\n    --container-writable \\\n" in script


def run_all(tmp_path: Path, stubs: Stubs) -> None:
    """Run every script in a shell, like the program that receives it."""
    environment = {**os.environ, "PATH": f"{stubs.directory}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    for script in tmp_path.rglob("*.sh"):
        subprocess.run(["bash", script], env=environment, check=True, cwd=tmp_path, capture_output=True)


@pytest.mark.parametrize("kind", ["bcm", "mpi", "local"])
def test_shell_metacharacters_are_passed_through_and_not_executed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, directories, variables and options reach the program unchanged."""
    here = tmp_path / HOSTILE.replace("/", "")
    here.mkdir()
    stubs = Stubs(tmp_path / "bin")
    python = stubs.directory / "python 3"
    for name in ("srun", "mpirun", python.name):
        stubs.add(name, "print(os.environ.get('MINE'))")
    stubs.add("sbatch", "print(17)")
    monkeypatch.setattr("bionemo.launch.job.sys.executable", str(python))
    quoted = "'" + HOSTILE.replace("'", "\\'") + "'"
    arguments = [f"cluster={kind}", f"name={quoted}", f"cluster.env_vars={{MINE: {quoted}}}", "trainer.devices=1",
             "exp_manager.exp_dir=out dir"]  # fmt: skip
    arguments += (
        ["cluster.job_name_prefix='p q '", "cluster.srun_args=['--x=$(touch owned)']"] if kind == "bcm" else []
    )
    arguments += ["cluster.mpirun_args=['--x=$(touch owned)']"] if kind == "mpi" else []
    assert launch(monkeypatch, here, *arguments, path=stubs.directory) == 0
    if kind == "bcm":
        run_all(here, stubs)
    settings = f"{here}/out dir/{HOSTILE}_hydra.yaml"
    command = ["-u", "-m", "bionemo.pretrain", f"--config-path={here}/out dir", f"--config-name={HOSTILE}_hydra.yaml",
               "do_preprocessing=False", "do_training=True", "do_testing=False"]  # fmt: skip
    program = {"bcm": "srun", "mpi": "mpirun", "local": python.name}[kind]
    (call,) = stubs.calls(program)
    assert call[-8:] == command
    assert kind == "local" or "--x=$(touch owned)" in call
    where = find_source(Path(settings).name, Path(settings).parent)
    assert compose_typed(where, [])[0].name == HOSTILE
    logs = [path for path in here.rglob("*.out") if kind != "bcm"]
    assert [path.read_text() for path in logs] == [f"{HOSTILE}\n" for _ in logs]
    assert not list(tmp_path.rglob("owned"))


def test_shell_metacharacters_on_base_command_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values pass through the shell that calls ngc, that of the job, and that of every process."""
    stubs = Stubs(tmp_path / "bin")
    for name in ("ngc", "bcprun", "python"):
        stubs.add(name)
    hydra = "desc='" + HOSTILE.replace("'", "\\'") + "\nCOMMAND\n'"
    assert launch(monkeypatch, tmp_path, *BCP, "trainer.devices=2", hydra, path=stubs.directory) == 0
    (ngc,) = stubs.calls("ngc")
    environment = {**os.environ, "PATH": f"{stubs.directory}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", ngc[ngc.index("--commandline") + 1]], env=environment, check=True, cwd=tmp_path)
    (bcprun,) = stubs.calls("bcprun")
    subprocess.run(["bash", "-c", bcprun[bcprun.index("--cmd") + 1]], env=environment, check=True, cwd=tmp_path)
    (python,) = stubs.calls("python")
    assert hydra in python
    assert not list(tmp_path.rglob("owned"))


def test_shellcheck_is_installed() -> None:
    assert shutil.which("shellcheck")


@pytest.mark.parametrize("kind", ["bcm", "local", "mpi"])
def test_a_variable_without_value_is_unset(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"cluster={kind}", "trainer.devices=1", "name=esm", "cluster.env_vars={A: null, B: 010}"]
    assert launch(monkeypatch, tmp_path, *arguments, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"unset A", "export B=010"} <= set(lines)
    script = "\n".join(line for line in lines if line in ("unset A", "export B=010")) + "\necho ${A-none} $B"
    environment = os.environ | {"A": "inherited"}
    found = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout == "none 010\n"


OPEN_MPI = ["-np", "4", "--map-by", "ppr:2:node", "--bind-to", "none", "--hostfile", "hosts", "-mine"]
MPICH = ["-n", "4", "-ppn", "2", "-hosts", "node7,node8", "-mine"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("mpirun (Open MPI) 5.0.8", OPEN_MPI),
        ("HYDRA build details:\n    Version:    5.0.2", MPICH),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626", MPICH),
    ],
)
@pytest.mark.parametrize(
    "hosts", ["node7 slots=2\nnode8 slots=2\n", "# ours\n\nnode7:2\nnode8:2", "node7\n" * 2 + "node8"]
)
def test_mpirun_gets_the_options_of_its_implementation(
    version: str, expected: list[str], hosts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("mpirun", "print(os.environ['MASTER_ADDR'], os.environ.get('I_MPI_PIN'))", version)
    (tmp_path / "hosts").write_text(hosts)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    where = ["cluster=mpi", "cluster.hostfile=hosts", "cluster.mpirun_args=[-mine]", "cluster.env_vars={A: b}"]
    sizes = ["trainer.devices=2", "trainer.num_nodes=2", "name=esm"]
    assert launch(monkeypatch, tmp_path, *where, *sizes, path=stubs.directory) == 0
    (call,) = stubs.calls("mpirun")
    python = call.index(sys.executable)
    forwarded = call[1 + len(expected) : python]
    assert call[1 : 1 + len(expected)] == expected
    if expected == MPICH:
        assert forwarded == []  # it forwards all variables
    else:
        assert set(forwarded[::2]) == {"-x"}
        assert {"PATH", "MASTER_ADDR", "A"} <= set(forwarded[1::2])
    (log,) = tmp_path.rglob("log-*.out")
    assert log.read_text() == f"node7 {'off' if expected == MPICH else None}\n"


def test_another_mpirun_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("mpirun", version="HPE MPT 2.28")
    assert launch(monkeypatch, tmp_path, "cluster=mpi", "trainer.devices=2", path=stubs.directory) == 1
    assert "error: mpirun is not that of Open MPI, MPICH or Intel MPI: put one of them first" in capfd.readouterr().err
    assert stubs.calls() == []
