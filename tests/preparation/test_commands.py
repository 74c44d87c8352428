# SPDX-License-Identifier: Apache-2.0
"""Preparation from the command line: the examples' commands, `python -m bionemo.preprocess`, and the BCP script."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bionemo.preparation.manifest import verify
from tests.conftest import EXAMPLES, ROOT


def run(*arguments: str, status: int = 0, **environment: str) -> str:
    """Run a command with the given environment variables only; return its standard output and standard error."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    known = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": os.environ["HOME"], **environment}
    done = subprocess.run(arguments, env=known, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def write_fasta(path: Path, prefix: str, number: int) -> None:
    path.write_text("".join(f">{prefix}_{index}\nMKV{'LAG' * (index % 5)}\n" for index in range(number)))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Raw UniRef50/90 files."""
    directory = tmp_path / "remote" / "uniref_v1"
    directory.mkdir(parents=True)
    write_fasta(directory / "uniref50_train_filt.fasta", "UniRef50", 6)
    write_fasta(directory / "uniref50_valid.fasta", "Held", 3)
    write_fasta(directory / "uniref90membersandreps_ur50trainfiltreps.fasta", "UniRef90", 12)
    lines = [f"UniRef50_{i}\tUniRef90_{i},UniRef90_{i + 6}\t2\n" for i in range(6)]
    (directory / "mapping.tsv").write_text("UniRef50_ID\tUniRef90_members\tcluster_size\n" + "".join(lines))
    return directory


def test_esm1nv_prepares_data_with_do_training_false(tmp_path: Path) -> None:
    write_fasta(tmp_path / "all.fasta", "protein", 40)
    key = "model.data.preprocessing"
    command = [sys.executable, str(EXAMPLES / "esm1nv" / "pretrain.py"), "do_training=False",
               f"model.data.dataset_path={tmp_path / 'out'}", f"{key}.source={tmp_path / 'all.fasta'}",
               f"{key}.val_size=4", f"{key}.test_size=2", f"{key}.num_csv_files=2"]  # fmt: skip
    assert "40 records read, 40 written to val/ and test/ and train/" in run(*command)
    assert "is prepared already" in run(*command)
    verify_command = [sys.executable, "-m", "bionemo.preprocess", "--verify", str(tmp_path / "out")]
    assert "agree with the manifest" in run(*verify_command)
    (tmp_path / "out" / "train" / "x001.csv").write_text("record_id,record_name,sequence_length,sequence\n")
    output = run(*verify_command, status=1)
    assert output.startswith("error: ")
    assert "train/x001.csv has changed since it was written" in output
    assert output.count("\n") == 1


@pytest.mark.slow
def test_bcp_script(tmp_path: Path, raw: Path) -> None:
    script = str(EXAMPLES / "esm2nv" / "scripts" / "preprocess_esm2_bcp.sh")
    places = {"DATASET_DIR": raw.name, "DATA_DIR_IN_REMOTE_HD": str(raw.parent)}
    places["DATA_DIR_IN_LOCAL_HD"] = str(tmp_path / "local")
    result = raw.parent / f"{raw.name}_preproc"
    assert "would run: python" in run(script, DRY_RUN="True", **places)
    assert not result.exists()
    assert not (tmp_path / "local").exists()

    for output in (run(script, **places), run(script, **places)):  # the second run finds a complete data set
        assert str(result) in output.splitlines()
    tree = {"manifest.json", "uf50", "uf90", *(path.name for path in raw.iterdir())}
    assert {path.name for path in result.iterdir()} == tree
    assert verify(result) == []
    assert "DATA_DIR_IN_LOCAL_HD: set it to" in run(script, **dict(list(places.items())[:2]), status=1)


def test_downstream_flip(tmp_path: Path) -> None:
    source = tmp_path / "FLIP" / "gb1"
    source.mkdir(parents=True)
    (source / "two_vs_rest.fasta").write_text(">a TARGET=1e-3 SET=train VALIDATION=False\nMKV\n")
    command = [sys.executable, str(EXAMPLES / "downstream" / "downstream_flip.py"), "model.data.task_name=gb1"]
    overrides = [
        f"++model.data.preprocessed_data_path={tmp_path / 'out'}",
        f"model.data.preprocessing.source={source.parent}",
    ]
    run(*command, "do_training=False", *overrides)
    assert (tmp_path / "out" / "gb1" / "train" / "x000.csv").read_text() == "id,sequence,target\na,MKV,1e-3\n"
    assert "missing value: give MODEL, or model.restore_encoder_path=" in run(*command, *overrides, status=1)
