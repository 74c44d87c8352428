# SPDX-License-Identifier: Apache-2.0
"""Every command on the pages of the documentation runs, is rendered or composed by a test, or needs a cluster."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.inference.molecules import trained
from tests.support import finetuning
from tests.support.adapters import adapt
from tests.support.huggingface import theirs
from tests.support.proteingym import write_suite

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that need a cluster, the hub or an object store, follow a job, or install packages
NOT_RUN = re.compile(r".*(hf|s3)://|srun |squeue|tail -f|bash scripts/|bcprun |pip install|mpirun |cd /workspace/")
SMALL = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=64",
         "model.micro_batch_size=4", "model.data.num_workers=0"]  # fmt: skip
FINE_TUNE = ("--config-name=downstream_flip_sec_str model.restore_encoder_path=MODEL "
             "model.data.preprocessed_data_path=FLIP trainer.max_epochs=1")  # fmt: skip


def commands(page: Path) -> list[str]:
    """Return the commands of a page; a change of the directory is part of the following command."""
    found: list[str] = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
        change = ""
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line.startswith("cd examples/"):
                change = f"{line} && "
            elif line.strip():
                found.append(change + line.partition("  #")[0].strip())
    return found


ALL = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)]
LAUNCHED = [
    (page, command) for page, command in ALL if re.search(r"bionemo[. ]launch|^(\S+=\S+ )*bash examples/", command)
]
COMPOSED = [(page, command) for page, command in ALL if "pretrain.py" in command and not NOT_RUN.match(command)]
RUN = [each for each in ALL if each not in LAUNCHED and each not in COMPOSED and not NOT_RUN.match(each[1])]


def test_all_kinds_of_commands_are_found() -> None:
    assert len(ALL) > 50
    assert len(LAUNCHED) >= 12
    assert len(COMPOSED) >= 6  # composed by tests/test_readme.py
    assert len(RUN) >= 20


@pytest.mark.parametrize(("page", "command"), LAUNCHED)
def test_a_launch_can_be_rendered(page: str, command: str) -> None:
    environment = os.environ | {"NGC_ARRAY_SIZE": "2", "NGC_GPUS_PER_NODE": "8"}
    line = command if "--dry-run" in command else f"{command} --dry-run"
    hosts = "cluster.hostfile=" in line  # must exist
    line = line.replace("cluster.hostfile=hosts", f"cluster.hostfile={os.devnull}") if hosts else line
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{page}: {command}: {done.stderr}"
    assert "trainer:" in done.stdout or "ngc batch run" in done.stdout


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the commands of the pages name, of small models and data."""
    directory = tmp_path_factory.mktemp("workspace")
    rng = np.random.default_rng(0)
    proteins = ["M" + "".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), rng.integers(8, 18))) for _ in range(60)]
    fasta = "".join(f">p{number} hydrophobic={number}\n{text}\n" for number, text in enumerate(proteins))
    for name in ("x.fasta", "proteins.fasta", "train.fasta", "val.fasta"):
        (directory / name).write_text(fasta)
    subprocess.run(["gzip", "--keep", directory / "proteins.fasta"], check=True)
    (directory / "wild_type.fasta").write_text(f">w\n{proteins[0]}\n")
    wild = proteins[0]
    (directory / "variants.csv").write_text(f"variant\n{wild[2]}3W\n{wild[4]}5P\n")
    (directory / "labels.csv").write_text(
        "sequence,stability\n" + "".join(f"{text},{text.count('A') + len(text) / 9:.3f}\n" for text in proteins)
    )
    tox21 = "".join(
        f"{text},{number % 2},{number % 3 % 2},{number // 2 % 2}\n" for number, text in enumerate(proteins)
    )
    (directory / "tox21.csv").write_text(f"sequence,NR-AR,NR-ER,SR-p53\n{tox21}")
    carbons = "".join(f"{'C' * number}O\n" for number in range(1, 30))
    (directory / "molecules.csv").write_text(f"smiles\n{carbons}")
    (directory / "x.smi").write_text("CCO\nc1ccccc1\nCC(=O)O\n")
    theirs(directory / "hf", size=8)  # with a contact head
    (directory / "esm2_t12_35M_UR50D").symlink_to("hf")
    adapt(directory / "ADAPTER", directory / "hf")
    trained(directory / "molecules")
    (directory / "ProteinGym").mkdir()
    write_suite(directory / "ProteinGym", 3)
    finetuning.written(directory / "FLIP")
    log = directory / "results" / "first"
    bionemo(directory, "pretrain", "--config-name=pretrain_esm2_mock", *SMALL, "trainer.max_steps=2",
            "trainer.val_check_interval=2", "trainer.log_every_n_steps=1", f"exp_manager.exp_dir={log}")  # fmt: skip
    shutil.copytree(log, directory / "results" / "second")
    (directory / "esm2.nemo").symlink_to(next(log.glob("checkpoints/*.nemo")))
    (directory / "RUN" / "checkpoints").mkdir(parents=True)
    for checkpoint in log.glob("checkpoints/*"):
        if checkpoint.suffix != ".nemo":
            (directory / "RUN" / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    (directory / "RUN" / "checkpoints" / "NAME-last").symlink_to(next(log.glob("checkpoints/*-last")))
    bionemo(directory, "finetune", *shlex.split(fill(FINE_TUNE)), "exp_manager.exp_dir=head")
    (directory / "RUN" / "head.safetensors").symlink_to(directory / "head" / "head.safetensors")
    return directory


def environment(directory: Path) -> dict[str, str]:
    programs = directory / "bin"
    if not programs.exists():
        programs.mkdir()
        for name, code in (("bionemo", f'exec {sys.executable} -m bionemo.cli "$@"'),
                           ("python", f'exec {sys.executable} "$@"')):  # fmt: skip
            (programs / name).write_text(f"#!/bin/sh\n{code}\n")
            (programs / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "BIONEMO_HOME": str(directory),
    }  # fmt: skip


def bionemo(directory: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["bionemo", *arguments], cwd=directory, env=environment(directory), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def fill(command: str, model: str = "esm2.nemo") -> str:
    """Replace the placeholders of a command."""
    return re.sub(r"(?<![\w./])MODEL\b", model, command.replace("model.data.preprocessed_data_path=FLIP",
                                                              "model.data.dataset_path=FLIP"))  # fmt: skip


@pytest.mark.slow
def test_commands_run(workspace: Path) -> None:
    """In the order of the pages, since some use the output of others."""
    failed = []
    for page, command in RUN:
        model = "molecules" if "x.smi" in command else "hf" if re.search("contacts|evaluate", command) else "esm2.nemo"
        line = fill(command.replace(" ... ", f" {FINE_TUNE} "), model).replace("freeze_layers=4", "freeze_layers=1")
        if "pretrain" in line and "bionemo plan" not in line:
            given = SMALL[4:] if "pretrain esm2_t12" in line else SMALL  # the sizes are those of the model
            line = f"{line} {' '.join(given)}".replace("examples/own_model", str(ROOT / "examples/own_model"))
        if "finetune" in line and "exp_dir" not in line:
            line += f" exp_manager.exp_dir=fine_tuned/{RUN.index((page, command))}"
        if "evaluate compare" in line:
            shutil.copytree(workspace / "results" / "esm2", workspace / "results" / "esm2-hf")
        done = subprocess.run(
            ["bash", "-c", line], cwd=workspace, env=environment(workspace), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            failed.append(f"{page}: {line}\n{done.stderr[-1000:]}")
    assert not failed, "\n".join(failed)
