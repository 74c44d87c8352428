"""Canary secrets in the environment and in overrides do not occur in files, output or arguments of any launcher."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.stubs import Stubs
from tests.support.launches import BCP, launch

CANARIES = {
    name: f"canary-{number}-{name.lower()}"
    for number, name in enumerate(
        ["WANDB_API_KEY", "NGC_API_KEY", "NGC_CLI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"]
    )
}
WAYS = {"bcm": ["cluster=bcm", "trainer.devices=8"], "bcp": BCP, "mpi": ["cluster=mpi"], "ray": ["cluster=ray"],
        "local": []}  # fmt: skip
BY_NAME = "exp_manager.wandb_logger_kwargs.notes=${{oc.env:WANDB_API_KEY}}"
PROGRAMS = ("sbatch", "srun", "ngc", "bcprun", "mpirun", "python")


def written(directory: Path) -> str:
    return "\n".join(path.read_text() for path in directory.rglob("*") if path.is_file() and "bin" not in path.parts)


@pytest.mark.parametrize("way", WAYS)
def test_no_secret_of_the_environment_is_written(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launched processes inherit the secrets in their own environment, as intended."""
    stubs = Stubs(tmp_path / "bin")
    for name in PROGRAMS:
        stubs.add(name, "open(sys.argv[0] + '.saw', 'w').write(os.environ.get('WANDB_API_KEY', '')); print(17)")
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("bionemo.launch.job.sys.executable", str(stubs.directory / "python"))
    monkeypatch.setattr("bionemo.launch.ray.find_spec", lambda _: True)
    assert launch(monkeypatch, tmp_path, *WAYS[way], path=stubs.directory) == 0
    environment = {**os.environ, "SLURM_JOB_ID": "17"}
    for script in tmp_path.rglob("*submission.sh" if way == "bcm" else "ngc-launch.sh"):
        subprocess.run(["bash", script], env=environment, check=True, cwd=tmp_path)
    seen = written(tmp_path) + str(stubs.calls()) + "".join(capfd.readouterr())
    assert stubs.calls()
    for value in CANARIES.values():
        assert value not in seen
    starter = {"bcm": "srun", "bcp": "ngc", "ray": "python", "local": "python"}.get(way, way + "run")
    assert (stubs.directory / f"{starter}.saw").read_text() == CANARIES["WANDB_API_KEY"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "word",
    [
        "+exp_manager.wandb_logger_kwargs.settings={{api_key: {value}}}",
        "cluster.env_vars={{WANDB_API_KEY: {value}}}",
        "cluster.env_vars={{INNOCENT: {value}}}",
        "desc={value}",
        "desc='see https://user:{value}@host'",
        BY_NAME,
    ],
)
def test_a_secret_on_the_command_line_is_refused(
    way: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stubs = Stubs(tmp_path / "bin")
    for name in PROGRAMS:
        stubs.add(name)
    value = CANARIES["WANDB_API_KEY"]
    monkeypatch.setenv("WANDB_API_KEY", value)
    monkeypatch.setattr("bionemo.launch.ray.find_spec", lambda _: True)
    status = launch(monkeypatch, tmp_path, *WAYS[way], word.format(value=value), path=stubs.directory)
    shown = "".join(capfd.readouterr())
    if (way, word) == ("bcp", BY_NAME):  # resolved only in the job
        assert status == 0
        assert value not in written(tmp_path) + shown + str(stubs.calls())
        return
    assert status == 1
    assert "contains a secret" in shown or "the value of $WANDB_API_KEY would be written" in shown
    assert value not in written(tmp_path) + shown
    assert stubs.calls() == []
