"""The scripts of the examples and in setup/: commands that they run, checked with stub programs."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launch.stubs import Stubs

FAMILIES = {
    "protein/esm1nv": "pretrain_small", "protein/esm2nv": "pretrain_esm2_650M", "protein/prott5nv": "pretrain_small",
    "molecule/megamolbart": "pretrain_small_span_aug",
}  # fmt: skip
SCRIPTS = sorted(
    path for place in ("scripts", "setup", "examples", ".ci") for path in (ROOT / place).rglob("*")
    if path.is_file() and (path.suffix == ".sh" or path.parent.name == ".ci")
)  # fmt: skip


def run_script(*arguments: str | Path, here: Path, **environment: str) -> tuple[int, str]:
    """Run a script with its own environment; return the exit status and the output."""
    full = {"PATH": os.environ["PATH"], "HOME": str(here), **environment}
    done = subprocess.run(
        ["bash", *arguments],
        cwd=here,
        env=full,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_all_scripts_pass_shellcheck() -> None:
    assert len(SCRIPTS) > 15
    checked = subprocess.run(["shellcheck", *SCRIPTS], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert not [path for path in SCRIPTS if not os.access(path, os.X_OK)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_submitted_to_slurm_and_bcp(family: str, tmp_path: Path) -> None:
    scripts, name = ROOT / "examples" / family / "scripts", FAMILIES[family]
    settings = {"PARTITION": "gpu", "NUM_NODES": "4", "GPUS_PER_NODE": "2", "TIME_LIMIT": "1-00:00:00",
                "DATA_PATH": "/data/a b", "MOUNTS": "/a:/a,/b:/b", "RESULTS_PATH": "out"}  # fmt: skip
    status, output = run_script(
        scripts / "pretrain_slurm.sh", "--dry-run", "model.micro_batch_size=3", here=tmp_path, **settings
    )
    assert status == 0, output
    for line in ("--gres=gpu:2", "--nodes=4", "--ntasks-per-node=2", "--partition=gpu", "--time=1-00:00:00"):
        assert f"#SBATCH {line}\n" in output
    paths = ("dataset_path: /data/a b", "- /a:/a", "- /b:/b", f"exp_dir: {tmp_path}/out")
    for line in (*paths, "micro_batch_size: 3"):
        assert f"{line}\n" in output
    settings = {"BIONEMO_IMAGE": "host:5000/org/bionemo:1.0", "WORKSPACE": "W", "DATASET_ID": "17",
                "LABEL": "a,b", "DATA_PATH": "/data/x", "ACE": "us", "ORG": "o",
                "WANDB_SECRET_NAME": "wandb:WANDB_API_KEY"}  # fmt: skip
    status, output = run_script(scripts / "pretrain_bcp.sh", "--dry-run", here=tmp_path, **settings)
    assert status == 0, output
    options = ("--image=host:5000/org/bionemo:1.0", "--workspace=W:/data", "--datasetid=17:/data_raw", "--label=a",
               "--label=b", "--secret=wandb:WANDB_API_KEY", "--ace=us", "--org=o", "--total-runtime=6H")  # fmt: skip
    for line in options:
        assert f"    {line} \\\n" in output
    assert f"--workdir /workspace/bionemo/examples/{family} " in output
    assert f"--config-path=conf --config-name={name} " in output
    assert "model.data.dataset_path=/data/x" in output
    status, output = run_script(scripts / "pretrain_bcp.sh", "--dry-run", here=tmp_path)
    assert status == 1
    assert "BIONEMO_IMAGE: set it to the image" in output


def test_the_gpt3_benchmark_is_submitted_with_the_documented_files(tmp_path: Path) -> None:
    """tests/launch/test_slurm.py also checks the files of the job itself."""
    stubs = Stubs(tmp_path / "bin")
    stubs.add("sbatch", "print(17)")
    script = ROOT / "examples" / "gpt3" / "scripts" / "bmk-pretrain-gpt3-126m2.sh"
    status, output = run_script(script, here=tmp_path, PATH=f"{stubs.directory}:{os.environ['PATH']}")
    assert status == 0, output
    results = tmp_path / "results" / "gpt3_126m"
    assert {path.name for path in results.iterdir()} == {
        "gpt3_126m_hydra.yaml", "launcher_cmd.log", "launcher.log", "nemo-megatron-gpt3_126m_submission.sh",
    }  # fmt: skip
    assert (results / "launcher.log").read_text() == "Submitted batch job 17\n"
    [call] = stubs.calls("sbatch")
    assert call[-1] == str(results / "nemo-megatron-gpt3_126m_submission.sh")


@pytest.mark.parametrize("family", FAMILIES)
def test_quick_run_scripts(family: str, tmp_path: Path) -> None:
    script = ROOT / "examples" / family / "scripts" / "pretrain_quick.sh"
    stubs = Stubs(tmp_path / "bin")
    stubs.add("python")
    environment = {"PATH": f"{stubs.directory}:{os.environ['PATH']}", "DATA_MOUNT": "/data", "WANDB_OFFLINE": "TRUE"}
    assert run_script(script, "preprocess", "-a", "a=1", here=tmp_path, **environment) == (0, "")
    assert run_script(script, "train", "-f", "x000", "-c", "mine", "--args", "b=2", here=tmp_path, **environment) == (
        0,
        "",
    )
    first, second = stubs.calls("python")
    name = FAMILIES[family].replace("650M", "8M")
    data = "model.data.dataset_path='/data'"
    assert first[1:] == ["pretrain.py", f"--config-name={name}", "do_training=False", data, "a=1"]
    assert second[1:4] == ["pretrain.py", "--config-name=mine", "do_training=True"]
    assert {f"exp_manager.exp_dir='{tmp_path}/results/mine'", "model.data.dataset.train=x000", data, "b=2",
            "exp_manager.wandb_logger_kwargs.offline=True"} <= set(second)  # fmt: skip
    wrong = {"go": "error: 'go': expected preprocess or train", "train -x 1": "error: -x: expected -f, -c or -a"}
    for arguments, error in wrong.items():
        status, output = run_script(script, *arguments.split(), here=tmp_path, **environment)
        assert status == 2
        assert error in output


LAUNCH = ROOT / "setup" / "launch.sh"


def test_a_container_gets_secrets_by_name_and_env_is_not_executed(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("docker", "print(os.environ.get('WANDB_API_KEY'))")
    env = tmp_path / ".env"
    env.write_text(
        "# settings\n\nBIONEMO_IMAGE='host:5000/org/bionemo:1.0'\nexport WANDB_API_KEY=canary$(touch owned)\n"
        f'PROJECT_PATH="{tmp_path}"\nBIONEMO_PATH=/code\nDATA_PATH=/a b\r\nJUPYTER_PORT=1\n'
    )
    arguments = {
        "here": tmp_path,
        "PATH": f"{stubs.directory}:{os.environ['PATH']}",
        "ENV_FILE": str(env),
        "JUPYTER_PORT": "9",
    }
    for command in (
        ["pull"],
        ["build", "-p", "-c"],
        ["push", "-v", "2", "-a", "new"],
        ["dev", "-c", "ls"],
        ["attach"],
    ):
        assert (
            run_script(LAUNCH, *command, **arguments)[1].splitlines()[-1] == "canary$(touch owned)"
        )  # only in its environment
    status, output = run_script(LAUNCH, "info", **arguments)
    assert status == 0
    assert "WANDB_API_KEY is set" in output
    assert "NGC_API_KEY is not set" in output
    image = "host:5000/org/bionemo:1.0"
    calls = [call[1:] for call in stubs.calls("docker")]
    assert calls[0] == ["pull", "--", image]
    assert calls[1][:5] == ["build", "--pull", "--no-cache", "--tag", image]
    second, new = "host:5000/org/bionemo:2", "host:5000/org/bionemo:new"
    assert calls[2:5] == [["push", "--", image], ["tag", "--", image, second], ["push", "--", second]]
    assert calls[5:7] == [["tag", "--", image, new], ["push", "--", new]]
    run = calls[7]
    assert run[-5:] == ["--", image, "bash", "-c", "ls"]
    assert {f"{tmp_path}:/code", "/a b:/data", "9:8888", "BIONEMO_HOME=/code", "WANDB_API_KEY"} <= set(run)
    assert "canary" not in output + str(stubs.calls())
    assert not list(tmp_path.rglob("owned"))


def test_a_container_gets_only_known_names_from_env(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path / "bin")
    stubs.add("docker", "print('inherited:', os.environ.get('LD_DEBUG'), os.environ.get('PYTHONPATH'))")
    env = tmp_path / ".env"
    env.write_text("LD_DEBUG=statistics\nPYTHONPATH=/canary\nPATH=/canary\nBIONEMO_IMAGE=mine\nHF_TOKEN=x\n")
    path = f"{stubs.directory}:{os.environ['PATH']}"
    status, output = run_script(LAUNCH, "pull", here=tmp_path, PATH=path, ENV_FILE=str(env))
    assert status == 0
    assert output.splitlines() == [
        f"note: {env}: ignored, as {LAUNCH} has no such settings: LD_DEBUG PYTHONPATH PATH",
        "inherited: None None",
    ]
    assert stubs.calls("docker")[0][1:] == ["pull", "--", "mine"]


@pytest.mark.parametrize("command", ["pull", "build", "push", "dev", "attach", "info"])
@pytest.mark.parametrize(
    "setting",
    [
        "BIONEMO_IMAGE=--privileged", "BIONEMO_IMAGE=a b", "BIONEMO_CONTAINER=--privileged", "BIONEMO_CONTAINER=a/b",
        "JUPYTER_PORT=0.0.0.0:1", "JUPYTER_PORT=-p", "PROJECT_PATH=/:/host", "BIONEMO_PATH=/a:ro", "DATA_PATH=data",
        "DATA_PATH=--privileged", "RESULTS_PATH=/etc:/etc",
    ],
)  # fmt: skip
def test_settings_of_a_container_are_not_parsed_as_options(command: str, setting: str, tmp_path: Path) -> None:
    env = tmp_path / ".env"
    env.write_text(setting + "\n")
    status, output = run_script(LAUNCH, "--dry-run", command, here=tmp_path, ENV_FILE=str(env))
    assert status == 1
    assert output.startswith(f"error: {setting}: expected ")
    assert output.count("\n") == 1


def test_a_tag_is_not_parsed_as_an_option(tmp_path: Path) -> None:
    status, output = run_script(LAUNCH, "--dry-run", "push", "-v", "-x y", here=tmp_path)
    assert (status, output) == (1, "error: tag=-x y: expected the tag of an image\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (["fly"], {}, "error: 'fly' is no command"),
        (["info"], {"ENV_FILE": "/no/.env"}, "error: there is no /no/.env"),
        (["--dry-run", "dev"], {"PROJECT_PATH": "/no"}, "error: PROJECT_PATH=/no is no directory"),
        (["pull"], {"PATH": "/usr/bin:/bin"}, "error: there is no docker here"),
    ],
)
def test_errors_of_launch_sh(arguments: list[str], environment: dict[str, str], expected: str, tmp_path: Path) -> None:
    if "PATH" in environment:  # a docker in the standard directories would be found
        (tmp_path / "bin").mkdir()
        for name in ("bash", "dirname", "sed"):
            (tmp_path / "bin" / name).symlink_to(f"/usr/bin/{name}")
        environment = {"PATH": str(tmp_path / "bin")}
    status, output = run_script(LAUNCH, *arguments, here=tmp_path, **environment)
    assert status == 1
    assert output.splitlines()[-1] == expected


def test_the_package_needs_no_compilation(tmp_path: Path) -> None:
    status, output = run_script(ROOT / "setup" / "recompile_megatron_helper.sh", here=tmp_path, PYTHON="python")
    assert status == 0
    assert len(output.splitlines()) == 1
    assert output.startswith("nothing to compile: runs do not need Megatron's helpers")


def test_a_container_starts_with_the_configured_command(tmp_path: Path) -> None:
    startup = ROOT / "setup" / "startup.sh"
    assert run_script(startup, "echo", "a b", here=tmp_path) == (0, "a b\n")
    assert run_script(startup, "bash", "-c", "echo $0", here=tmp_path) == (0, "bash\n")
    stubs = Stubs(tmp_path / "bin")
    stubs.add("jupyter")
    run_script(startup, "jupyter", "--x", here=tmp_path, PATH=f"{stubs.directory}:{os.environ['PATH']}")
    assert stubs.calls("jupyter")[0][-1] == "--x"
