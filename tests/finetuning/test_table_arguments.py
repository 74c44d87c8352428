# SPDX-License-Identifier: Apache-2.0
"""`bionemo finetune data=labels.csv model=MODEL`: columns and type of the labels are found, the rows divided."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bionemo.cli.finetune import main
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.table_arguments import replace_table_arguments


def table(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "sequence", "target", "task_type"),
    [
        ("id,sequence,label\na,MKTAYIAK,1.5\nb,MKT,2\n", "sequence", "label", "regression"),
        ("Name,Seq,activity\na,MKTAYIAK,1e-3\nb,MKT,2.5\n", "Seq", "activity", "regression"),
        ("sequence,soluble\nMKTAYIAK,0\nMKT,1\n", "sequence", "soluble", "classification"),
        ("sequence,place,y\nMKTAYIAK,a,membrane\nMKT,b,nucleus\n", "sequence", "y", "classification"),
        ("sequence,structure\nMKTA,HHCC\nMKT,CCC\n", "sequence", "structure", "token-level-classification"),
        ("x,z\nMKTAYIAKQR,3.5\nGSHMKTAYIAK,2\n", "x", "z", "regression"),
        ("seq,logS (mol/l)\nCCO,1.5\nCC,2.25\n", "seq", "logS (mol/l)", "regression"),
        ("smiles,expt\nCCO,1.5\nCC,2.25\n", "smiles", "expt", "regression"),
    ],
)
def test_columns_and_type_are_found(text: str, sequence: str, target: str, task_type: str, tmp_path: Path) -> None:
    path = table(tmp_path / "my 'labels'.csv", text)
    arguments, found = replace_table_arguments([f"data={path}", "model=x.nemo", "trainer.max_epochs=3"])
    assert found == f"{path}: sequences in column {sequence!r}, labels in column {target!r}: {task_type}"
    cfg = load(arguments[0].removeprefix("--config-name="), arguments[1:], schema=DownstreamConfig)
    data = cfg.model.data
    assert (data.sequence_column, data.target_column, data.task_type) == (sequence, target, task_type)
    assert (data.dataset_path, cfg.name, cfg.trainer.max_epochs) == (str(path), "my_labels_", 3)
    assert cfg.model.restore_encoder_path == "x.nemo"


def test_keys_of_the_user_are_kept(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", "sequence,a,b\nMKTA,1,2\nMKT,3,4\n")
    given = ["++model.data.target_column=b", "model.data.task_type=regression", "model.data.task_name=mine"]
    arguments, _ = replace_table_arguments([f"data={path}", *given])
    data = load("downstream_table", arguments[1:], schema=DownstreamConfig).model.data
    assert (data.target_column, data.task_type, data.task_name) == ("b", "regression", "mine")


def test_other_command_lines_are_unchanged() -> None:
    arguments = ["--config-name=x", "model.data.task_name=scl"]
    assert replace_table_arguments(arguments) == (arguments, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sequence,a,b\nMKTA,1,2\n", "has the columns 'sequence', 'a', 'b': set model.data.target_column to"),
        ("a,b\nx,1\n", "has the columns 'a', 'b': set model.data.sequence_column to"),
        ("sequence,label\n", "has no rows"),
        (
            "sequence,${oc.env:HOME}\nMKTA,1\n",
            "the name of the column '.{oc.env:HOME}' has special characters: rename it",
        ),
        (None, "does not exist: give a CSV file"),
    ],
)
def test_mistakes_are_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        replace_table_arguments([f"data={path}", "model=x.nemo"])
    with pytest.raises(UserError, match=r"model=PATH needs data=PATH"):
        replace_table_arguments(["model=x.nemo"])


def test_a_table_and_a_model_suffice(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    sequences = ["".join(rng.choice(list("AG"), 20)) for _ in range(200)]
    rows = [f"{text},{text.count('A') / 10}" for text in sequences]
    path = table(tmp_path / "content.csv", "\n".join(["sequence,content", *rows]) + "\n")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    settings = ["exp_manager.exp_dir=out", "trainer.accelerator=cpu", "model.finetuning_optim.lr=0.01"]
    monkeypatch.setattr(sys, "argv", ["finetune", f"data={path}", f"model={model}", *settings])
    main()
    assert (
        f"note: {path}: sequences in column 'sequence', labels in column 'content': regression"
        in capsys.readouterr().err
    )
    report = json.loads((here / "out" / "report.json").read_text())
    assert report["name"] == "content"
    assert report["test_spearman"] > 0.8
    assert sorted(item.name for item in tmp_path.iterdir()) == ["content.csv", "here"]
