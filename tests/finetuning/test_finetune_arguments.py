# SPDX-License-Identifier: Apache-2.0
"""`bionemo finetune MODEL data=labels.csv`: columns and type of the labels are found, the rows divided."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import bionemo
from bionemo.cli.finetune import main
from bionemo.cli.finetune_arguments import one_target_each, replace_table_arguments
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.task_data import read_splits
from tests.finetuning.tables import peptides, write


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
    arguments, found = replace_table_arguments([f"data={path}", "trainer.max_epochs=3"])
    start = f"{path}: sequences in column {sequence!r}, labels in column {target!r}: {task_type}"
    assert found is not None and found.startswith(start)
    assert found.removeprefix(start) in ("", " (1 '0', 1 '1')", " (1 'membrane', 1 'nucleus')")
    cfg = load(arguments[0].removeprefix("--config-name="), arguments[1:], schema=DownstreamConfig)
    data = cfg.model.data
    assert (data.sequence_column, data.target_column, data.task_type) == (sequence, target, task_type)
    assert (data.dataset_path, cfg.name, cfg.trainer.max_epochs) == (str(path), "my_labels_", 3)


def test_keys_of_the_user_are_kept(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", "sequence,a,b\nMKTA,1,2\nMKT,3,4\n")
    given = ["++model.data.target_column=b", "model.data.task_type=regression", "model.data.task_name=mine"]
    arguments, _ = replace_table_arguments([f"data={path}", *given])
    data = load("downstream_table", arguments[1:], schema=DownstreamConfig).model.data
    assert (data.target_column, data.task_type, data.task_name) == ("b", "regression", "mine")


@pytest.mark.parametrize("form", ["{}", "'{}'", "['{}']"])
def test_a_title_may_end_in_a_bracket(form: str, tmp_path: Path) -> None:
    title = "Subcellular location [CC]"
    path = table(tmp_path / "x.csv", f"sequence,{title}\nMKTA,membrane\nMKT,nucleus\n")
    arguments, _ = replace_table_arguments([f"data={path}", f"model.data.target_column={form.format(title)}"])
    found = load("downstream_table", arguments[1:], schema=DownstreamConfig).model.data.target_column
    assert found in (title, [title])


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
            "Drug,Target,Y\nCCO,MKTAYIAK,1\n",
            "has SMILES in column 'Drug' and proteins in column 'Target': set model.data.sequence_column to",
        ),
        (
            "Ligand SMILES,BindingDB Target Chain  Sequence 1,Ki\nCCO,MKTAYIAK,1\n",
            "in column 'Ligand SMILES' and proteins in column 'BindingDB Target Chain  Sequence 1': set ",
        ),
        (None, "x.csv cannot be read \\(No such file or directory\\): check the path"),
    ],
)
def test_mistakes_are_one_line(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=message):
        replace_table_arguments([f"data={path}"])


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
    monkeypatch.setattr(sys, "argv", ["finetune", str(model), f"data={path}", *settings])
    main()
    assert (
        f"note: {path}: sequences in column 'sequence', labels in column 'content': regression"
        in capsys.readouterr().err
    )
    report = json.loads((here / "out" / "report.json").read_text())
    assert report["name"] == "content"
    assert report["test_spearman"] > 0.8
    assert sorted(item.name for item in tmp_path.iterdir()) == ["content.csv", "here"]


def test_a_table_without_titles_is_refused(tmp_path: Path) -> None:
    """Its first record would be lost."""
    rows = [f"{text},{label}\n" for text, label in zip(peptides(6), ["a", "b"] * 3, strict=True)]
    for text in ("".join(rows), "".join(row.replace(",a", ",1.5").replace(",b", ",2.5") for row in rows)):
        with pytest.raises(UserError, match=r"has a record with .* in its first line: add a line with titles"):
            replace_table_arguments([f"data={table(tmp_path / 'x.csv', text)}"])


def test_one_column(tmp_path: Path) -> None:
    path = table(tmp_path / "x.csv", "sequence|label\nMKT|1\n")
    with pytest.raises(UserError, match=r"has a single column .*: separate columns by commas, semicolons or tabs"):
        replace_table_arguments([f"data={path}"])


def test_several_targets(tmp_path: Path) -> None:
    """A sweep has one command line, type of labels and directory for each target."""
    path = table(tmp_path / "x.csv", "sequence,a,b\nMKTAYIAK,0,1.5\nMKT,1,2.5\n")
    given = [f"data={path}", "model=x.nemo", "model.data.target_column=a,b"]
    arguments, found = replace_table_arguments(given)
    assert "labels in columns 'a', 'b': regression" in str(found)
    assert "model.data.target_column=['a','b']" in arguments and given[2] not in arguments
    assert one_target_each(given) == [given]
    runs = [replace_table_arguments(each)[0] for each in one_target_each(["-m", *given])]
    for name, task_type, run in zip("ab", ("classification", "regression"), runs, strict=True):
        assert {f"model.data.task_name='x_{name}'", f"model.data.task_type='{task_type}'"} <= {*run}


def test_labels_of_residues_with_blanks(tmp_path: Path) -> None:
    """DSSP writes loops as blanks; ProtTrans separates residues, labels and digits of the mask by blanks."""
    texts = peptides(30)
    labels = {text: "".join("HE "[(n + k * (n % 7)) // 2 % 3] for k in range(20)) for n, text in enumerate(texts)}
    forms = {
        "dssp": [(text, labels[text], "1" * 20) for text in texts],
        "spaced": [(" ".join(text), " ".join(labels[text].replace(" ", "-")), "1.0 " * 20) for text in texts],
        "stop": [(f"{text}*", labels[text].replace(" ", "-"), "1" * 20) for text in texts],
    }
    for form, rows in forms.items():
        path = write(tmp_path / f"{form}.csv", "sequence,label,mask", rows)
        arguments, _ = replace_table_arguments([f"data={path}", "model.data.target_column=label"])
        assert "model.data.task_type='token-level-classification'" in arguments
        config = load("downstream_table", [*arguments[1:], "model.data.mask_column=mask"], schema=DownstreamConfig)
        data = read_splits(config.model.data, "k", ["train", "val", "test"])
        assert data.classes == ((" ", "E", "H") if form == "dssp" else ("-", "E", "H"))
        for text, target in zip(data.splits["train"].texts, data.splits["train"].targets, strict=True):
            expected = labels["".join(text.split()).rstrip("*")]
            assert [" EH"[number] for number in target] == [*expected]


def test_a_sweep_over_targets_has_a_report_for_each(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty BIONEMO_HOME counts as unset: the results are in the working directory."""
    rows = [(text, n / 7, n % 2) for n, text in enumerate(peptides(40))]
    path = write(tmp_path / "two.csv", "sequence,tm,soluble", rows)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("BIONEMO_HOME", "")
    settings = ["trainer.accelerator=cpu", "trainer.max_epochs=1", "model.data.target_column=tm,soluble"]
    monkeypatch.setattr(sys, "argv", ["finetune", "-m", f"data={path}", f"model={model}", *settings])
    main()
    reports = {name: next((here / f"results/nemo_experiments/two_{name}").rglob("report.json"))
               for name in ("tm", "soluble")}  # fmt: skip
    for (name, found), kind in zip(reports.items(), ("regression", "classification"), strict=True):
        data = json.loads(found.read_text())["data"]
        assert (data["target_column"], data["task_type"], data["split"]) == (name, kind, "random")
        assert data["dataset_path"] == str(path) and sum(data["rows"].values()) == 40 and data["notes"] == []


@pytest.mark.parametrize("is_frozen", [True, False])
def test_the_report_says_how_the_rows_were_divided_and_what_was_truncated(
    is_frozen: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = bionemo.load(model, "cpu").network.config.max_position_embeddings
    texts = [*peptides(30), "M" * (longest + 1)]
    splits = ["train"] * 20 + ["val"] * 5 + ["test"] * 6
    rows = [f"{text},{number / 8},{split}" for number, (text, split) in enumerate(zip(texts, splits, strict=True))]
    path = table(tmp_path / "x.csv", "\n".join(["sequence,label,part", *rows]) + "\n")
    settings = ["trainer.accelerator=cpu", "trainer.max_epochs=1", f"exp_manager.exp_dir={tmp_path}/run",
                f"model.encoder_frozen={is_frozen}", "model.micro_batch_size=8"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["finetune", str(model), f"data={path}", *settings])
    main()
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert len(report["epochs"]) == 1  # also of 20 sequences in batches of 8
    data = report["data"]
    assert (data["split"], data["rows"]) == ("column part", {"train": 20, "val": 5, "test": 6})
    truncated = f"test: 1 of 6 sequences are longer than {longest - 2} tokens without begin and end and truncated"
    assert data["notes"] == [f"{path}: column 'part' divides the rows: 20 train, 5 val, 6 test", truncated]
