# SPDX-License-Identifier: Apache-2.0
"""Several targets, several labels of a sequence, and numbers of residues: data, metrics, training, prediction."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

import bionemo
from bionemo.cli.analysis import main as analysis
from bionemo.cli.finetune import main
from bionemo.cli.finetune_arguments import find_task_type, replace_table_arguments
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.data.table import read_table
from bionemo.finetuning import metrics
from bionemo.finetuning.heads import SequenceHead
from bionemo.finetuning.labels import is_labelled
from bionemo.finetuning.load_head import read_trained_head
from bionemo.finetuning.task_data import TaskData, read_splits
from tests.finetuning.tables import peptides, write
from tests.support.runs import logged, run, run_on_ranks

TEXTS = peptides(60)


def numbers_of(text: str) -> list[str]:
    return ["nan" if letter == "W" else f"{ord(letter) / 10:.1f}" for letter in text]


# header and cells by task: two numbers, two truth values (both with missing labels), labels, numbers of residues
TABLES: dict[str, tuple[str, Any]] = {
    "numbers": ("a,b", lambda n, text: (text.count("A") / 3 if n % 4 else "", 100 * text.count("G") + 5)),
    "truths": ("a,b", lambda n, text: (int("A" in text) if n % 4 else "NA", "G" in text)),
    "labels": ("terms", lambda n, text: [";".join(f"GO:{each}" for each in "ACDEG" if each in text) or "GO:M"]),
    "residues": ("bfactor", lambda n, text: [" ".join(numbers_of(text))]),
}
KINDS = {"numbers": "regression", "truths": "multi-label", "labels": "multi-label",
         "residues": "token-level-regression"}  # fmt: skip


def table(directory: Path, name: str) -> Path:
    columns, cells = TABLES[name]
    rows = [(text, *cells(number, text)) for number, text in enumerate(TEXTS)]
    return write(directory / f"{name}.csv", f"sequence,{columns}", rows)


def arguments(path: Path) -> list[str]:
    columns = TABLES[path.stem][0]
    return [f"data={path}", *([f"model.data.target_column={columns}"] if "," in columns else [])]


def read(path: Path, *more: str) -> TaskData:
    found, _ = replace_table_arguments([*arguments(path), *more])
    config = load("downstream_table", found[1:], schema=DownstreamConfig)
    return read_splits(config.model.data, "model.data", ["train", "val", "test"])


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_read(name: str, tmp_path: Path) -> None:
    path = table(tmp_path, name)
    found, note = replace_table_arguments(arguments(path))
    assert f"model.data.task_type='{KINDS[name]}'" in found and KINDS[name] in str(note)
    data = read(path)
    assert sum(len(split.texts) for split in data.splits.values()) == len(TEXTS)
    for split in data.splits.values():
        for text, target in zip(split.texts, split.targets, strict=True):
            number = TEXTS.index(text)
            if name == "residues":
                np.testing.assert_array_equal(target, np.array(numbers_of(text), np.float32))
            elif name == "labels":
                assert data.classes == ("GO:A", "GO:C", "GO:D", "GO:E", "GO:G")
                assert target.tolist() == [int(letter in text) for letter in "ACDEG"]
            else:
                first, second = TABLES[name][1](number, text)
                missing = np.nan if name == "numbers" else -1
                np.testing.assert_allclose(target, [first if number % 4 else missing, second], rtol=1e-6)


def test_lists_in_parquet_and_json(tmp_path: Path) -> None:
    rows = [{"sequence": text, "b": [None if each == "nan" else float(each) for each in numbers_of(text)], "n": None}
            for text in TEXTS]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tables = [read_table(tmp_path / name) for name in ("x.parquet", "x.jsonl")]
    assert tables[0].rows == tables[1].rows == [[text, " ".join(numbers_of(text)), ""] for text in TEXTS]
    arguments, _ = replace_table_arguments([f"data={tmp_path}/x.parquet", "model.data.target_column=b"])
    assert "model.data.task_type='token-level-regression'" in arguments
    (tmp_path / "x.json").write_text("[1, 2]")
    with pytest.raises(UserError, match=r"x.json cannot be read \(.*\): give parquet, or JSON with an object on each"):
        read_table(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (["GO:1;GO:2", "GO:1", "GO:3"], "multi-label"),
        (["GO:1 GO:2", "GO:1", "GO:3"], "multi-label"),
        (["1.1.1.1, 2.7.1.-", "1.1.1.1", "3.4.-.-"], "multi-label"),
        (["Cell membrane; Nucleus", "Nucleus", "Cell membrane"], "multi-label"),
        (["Cell membrane", "Nucleus", "Cell membrane"], "classification"),
        (["GO:1", "GO:2", "GO:1"], "classification"),
        (["[0.1, 0.2, 3]", "1.5 nan 2.5", "0.1 0.2 0.3"], "token-level-regression"),
        (["1 0 1", "0 0 1", "1 1 1"], "token-level-classification"),
    ],
)
def test_types_of_labels(labels: list[str], kind: str) -> None:
    assert find_task_type(["MKT", "GSA", "GGG"], labels, ["x:2", "x:3", "x:4"]) == kind


@pytest.mark.parametrize("separator", ["; ", ",", " "])
def test_separators_of_labels(separator: str, tmp_path: Path) -> None:
    rows = [(text, f'"{separator.join(["E 1" if separator == "; " else "E1", f"F{n % 2}"])}"')
            for n, text in enumerate(TEXTS)]  # fmt: skip
    path = write(tmp_path / "labels.csv", "sequence,terms", rows)
    assert read(path, "model.data.task_type=multi-label").classes[-2:] == ("F0", "F1")
    assert read(path, "model.data.task_type=multi-label").classes[0] == ("E 1" if separator == "; " else "E1")


MISTAKES = {
    "number": ("numbers", 7, (0.5, "many"), r"numbers.csv:9: the target is 'many', expected a number"),
    "truth": (
        "truths",
        7,
        (1, 2),
        r"truths.csv:9: the label '2' is not 0 or 1: correct it, or set model.data.task_type=r",
    ),
    "residues": ("residues", 7, ("0.1 0.2",), r"residues.csv:9: 2 labels for 20 residues: each needs one"),
    "residue": (
        "residues",
        7,
        (" ".join(["x", *["1"] * 19]),),
        r"residues.csv:9: the target is 'x', expected a number",
    ),
    "empty": (
        "numbers",
        None,
        (0.5, ""),
        r"column 'b' of the training split has no labels: remove it from model.data.",
    ),
    "empty truth": (
        "truths",
        None,
        (1, ""),
        r"column 'b' of the training split has no labels: a classifier needs two",
    ),
}


@pytest.mark.parametrize(("name", "row", "cells", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(name: str, row: int | None, cells: tuple[Any, ...], message: str, tmp_path: Path) -> None:
    columns, known = TABLES[name]
    rows = [(text, *(cells if row in (None, n) else known(n, text))) for n, text in enumerate(TEXTS)]
    if row is None:  # labels of `b` only in the test split
        values = [n % 2 if name == "truths" else n / 7 for n in range(len(TEXTS))]
        rows = [(text, value, value if n > 50 else "", "test" if n > 50 else "val" if n > 40 else "train")
                for n, (text, value) in enumerate(zip(TEXTS, values, strict=True))]  # fmt: skip
    path = write(tmp_path / f"{name}.csv", f"sequence,{columns}{'' if row else ',split'}", rows)
    with pytest.raises(UserError, match=message):
        read(path, f"model.data.task_type={KINDS[name]}")


def test_labels_of_other_splits_are_counted(tmp_path: Path) -> None:
    rows = [(text, "GO:1;GO:2" if n % 2 else "GO:2", "test" if n > 50 else "val" if n > 40 else "train")
            for n, text in enumerate(TEXTS)]  # fmt: skip
    path = write(tmp_path / "labels.csv", "sequence,terms,split", [*rows[:-1], (TEXTS[-1], "GO:9", "test")])
    data = read(path, "model.data.target_column=terms")
    assert data.classes == ("GO:1", "GO:2")
    assert data.splits["test"].targets[-1].tolist() == [0, 0]
    assert f"{path}: 1 labels are not in the training split: the head does not predict them" in data.notes


def f_max_by_loops(chances: np.ndarray, true: np.ndarray) -> float:
    best = 0.0
    for step in range(1, 101):
        precisions, recalls = [], []
        for scores, labels in zip(chances, true, strict=True):
            predicted = {number for number, score in enumerate(scores) if score >= step / 100}
            members = {number for number, label in enumerate(labels) if label}
            if predicted:
                precisions.append(len(predicted & members) / len(predicted))
            if members:
                recalls.append(len(predicted & members) / len(members))
        if precisions and sum(precisions) + sum(recalls):
            precision, recall = np.mean(precisions), np.mean(recalls)
            best = max(best, 2 * precision * recall / (precision + recall))
    return float(best)


def test_f_max_by_hand() -> None:
    """At 0.6, the first row predicts {0} of {0, 1}, and the second one nothing of {2}: 2 * 1 * 0.25 / 1.25.

    At 0.3, they predict {0, 1} and {0, 2}: precision 3/4, recall 1. At 0.1, all three: precision 1/2, recall 1.
    """
    chances = torch.tensor([[0.7, 0.4, 0.2], [0.4, 0.2, 0.5]])
    found = metrics.label_set_metrics(chances.logit(), torch.tensor([[1, 1, 0], [0, 0, 1]]))
    assert found["fmax"] == pytest.approx(100 * 2 * 0.75 / 1.75)
    assert f_max_by_loops(chances.double().numpy(), np.array([[1, 1, 0], [0, 0, 1]])) == pytest.approx(1.5 / 1.75)


def test_metrics_of_labels_equal_their_definitions() -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.standard_normal((40, 6)), (rng.random((40, 6)) < 0.3).astype(np.int8)
    targets[:, 4], targets[:, 5] = 0, 1  # without positive or negative rows
    found = metrics.compute_metrics(torch.from_numpy(logits), torch.from_numpy(targets))
    assert found["auprc_micro"] == pytest.approx(100 * average_precision_score(targets.ravel(), logits.ravel()))
    present = [0, 1, 2, 3, 5]
    macro = average_precision_score(targets[:, present], logits[:, present], average="macro")
    assert found["auprc"] == pytest.approx(100 * macro)
    assert found["roc_auc"] == pytest.approx(100 * roc_auc_score(targets[:, :4], logits[:, :4], average="macro"))
    chances = 1 / (1 + np.exp(-logits))
    assert found["fmax"] == pytest.approx(100 * f_max_by_loops(chances, targets))
    loss = -np.where(targets == 1, np.log(chances), np.log(1 - chances)).mean()
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    masked = targets.copy()
    masked[::3, 0] = -1
    each = metrics.target_metrics(torch.from_numpy(logits), torch.from_numpy(masked))
    rows = masked[:, 0] >= 0
    assert each[0]["auprc"] == pytest.approx(100 * average_precision_score(targets[rows, 0], logits[rows, 0]))
    assert each[4] == {} and "roc_auc" not in each[5]
    other = masked.copy()
    other[::3, 0] = -1
    logits[::3, 0] += 5  # of rows without this label
    assert metrics.compute_metrics(torch.from_numpy(logits), torch.from_numpy(other))["loss"] == pytest.approx(
        float(-np.where(targets == 1, np.log(chances), np.log(1 - chances))[masked >= 0].mean()), rel=1e-6
    )


def test_missing_numbers_do_not_count() -> None:
    """The loss is in units of each target's standard deviation, and its gradient is that of standardized targets."""
    rng = np.random.default_rng(1)
    targets = (rng.standard_normal((50, 2)) * [0.01, 300] + [5, -7]).astype(np.float32)
    targets[::4, 0] = np.nan
    torch.manual_seed(0)
    head = SequenceHead(4, 2, ())
    vectors = rng.standard_normal((50, 4)).astype(np.float32)
    head.fit_statistics(vectors, targets)
    mean, scale = np.nanmean(targets, 0, dtype=np.float64), np.nanstd(targets, 0, dtype=np.float64)
    np.testing.assert_allclose(head.target_mean.numpy(), mean, rtol=1e-6)
    np.testing.assert_allclose(head.target_scale.numpy(), scale, rtol=1e-6)
    predictions = head(torch.from_numpy(vectors), [1] * 50)
    loss = metrics.summed_loss(predictions, torch.from_numpy(targets), head.loss_scale)
    loss.backward()
    plain = SequenceHead(4, 2, ())
    plain.load_state_dict(
        {name: value for name, value in head.state_dict().items() if "target" not in name}, strict=False
    )
    standard = torch.from_numpy(((targets - mean) / scale).astype(np.float32))
    errors = (plain(torch.from_numpy(vectors), [1] * 50) - standard)[is_labelled(standard)]
    errors.square().sum().backward()
    assert float(loss) == pytest.approx(float(errors.detach().square().sum()), rel=1e-4)
    for one, two in zip(head.layers.parameters(), plain.layers.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-3, atol=1e-2)  # targets are rounded to fp32
    found = metrics.target_metrics(predictions.detach(), torch.from_numpy(targets))
    rows = ~np.isnan(targets[:, 0])
    expected = np.sqrt(((predictions.detach().numpy() - targets)[rows, 0] ** 2).mean())
    assert found[0]["rmse"] == pytest.approx(expected, rel=1e-4)


WAYS = {"frozen": ["model.encoder_frozen=True"], "whole": ["model.encoder_frozen=False"],
        "lora": ["model.encoder_frozen=False", "model.peft.enabled=True"]}  # fmt: skip
ALWAYS = {("numbers", "whole"), ("labels", "frozen"), ("residues", "lora")}  # the others are marked slow
COMBINATIONS = [
    pytest.param(name, way, marks=[] if (name, way) in ALWAYS else pytest.mark.slow) for name in TABLES for way in WAYS
]  # fmt: skip


def tune(model: Path, path: Path, directory: Path, *more: str) -> dict[str, Any]:
    given = [*arguments(path), f"exp_manager.exp_dir={directory}", "trainer.accelerator=cpu",
             "model.micro_batch_size=8", "model.finetuning_optim.lr=0.01",
             "model.finetuning_optim.sched.warmup_steps=2", *more]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["finetune", str(model), *given])
        main()
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


@pytest.mark.parametrize(("name", "way"), COMBINATIONS)
def test_predictions_of_the_trained_head_have_the_reported_metrics(
    name: str, way: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`label` writes a column for each target, whose metrics over the test sequences are those of the report."""
    path, run = table(tmp_path, name), tmp_path / "run"
    report = tune(model, path, run, "trainer.max_epochs=2", *WAYS[way])
    assert (run / "report.png").stat().st_size > 1000
    split = read(path).splits["test"]
    write(tmp_path / "test.csv", "id,sequence", list(enumerate(split.texts)))
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", f"--head={run}/head.safetensors", "--device=cpu",
                                      f"--input={tmp_path}/test.csv", f"--output={tmp_path}/out.csv"])  # fmt: skip
    analysis()
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = pd.read_csv(run / "test_predictions.csv")
    names = ["a", "b"] if "," in TABLES[name][0] else ["GO:A", "GO:C", "GO:D", "GO:E", "GO:G"]
    if name == "residues":
        predicted = np.concatenate([np.array(row["prediction"].split(), float) for row in rows])
        targets = np.concatenate(split.targets)
        errors = (predicted - targets)[~np.isnan(targets)]
        assert report["test_rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-4)
        assert report["test_mse"] == pytest.approx(report["test_loss"], rel=1e-4)
        assert list(rows[0]) == ["id", "prediction"]
        np.testing.assert_allclose(written["prediction"], predicted[~np.isnan(targets)], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(written["label"], targets[~np.isnan(targets)], rtol=1e-6)
        residues = [np.flatnonzero(~np.isnan(each)) + 1 for each in split.targets]
        assert [*written["residue"]] == [*np.concatenate(residues)]
        return
    predicted, targets = np.array([[float(row[each]) for each in names] for row in rows]), np.stack(split.targets)
    assert list(report["test_targets"]) == names
    kind = "prediction" if name == "numbers" else "probability"
    np.testing.assert_allclose(written[[f"{kind}_{each}" for each in names]], predicted, rtol=1e-3, atol=1e-4)
    labels = np.where(targets == -1, np.nan, targets)
    np.testing.assert_allclose(written[[f"label_{each}" for each in names]], labels, rtol=1e-6)
    for number, each in enumerate(names):
        found, known = report["test_targets"][each], targets[:, number] != -1
        if name == "numbers":
            known = ~np.isnan(targets[:, number])
            errors = (predicted - targets)[known, number]
            assert found["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-3)
        elif "roc_auc" in found:
            area = roc_auc_score(targets[known, number], predicted[known, number])
            assert found["roc_auc"] == pytest.approx(100 * area, abs=10)  # probabilities are rounded
    if name != "numbers":
        assert list(rows[0]) == ["id", "prediction", *names]
        for row, chances in zip(rows, predicted, strict=True):
            assert row["prediction"] == ";".join(each for each, x in zip(names, chances, strict=True) if x >= 0.5)
    metric = "rmse" if name == "numbers" else "auprc"
    values = [found[metric] for found in report["test_targets"].values() if found]
    assert report[f"test_{metric}"] == pytest.approx(np.mean(values))


def test_a_linear_head_learns_numbers_of_residues(model: Path, tmp_path: Path) -> None:
    """The number follows from the letter, which the hidden states contain; longer sequences are truncated."""
    longest = bionemo.load(model, "cpu").network.config.max_position_embeddings
    texts = [*peptides(100), "M" * (longest + 1)]
    rows = [(text, " ".join(numbers_of(text)), "train" if n < 80 else "val" if n < 90 else "test")
            for n, text in enumerate(texts)]  # fmt: skip
    path = write(tmp_path / "residues.csv", "sequence,b,part", rows)
    report = tune(model, path, tmp_path / "run", "model.data.target_column=b", "trainer.max_epochs=20")
    assert report["test_spearman"] > 0.95
    truncated = f"test: 1 of 11 sequences are longer than {longest - 2} tokens without begin and end and truncated"
    assert report["data"]["notes"][-1] == truncated
    head = read_trained_head(tmp_path / "run" / "head.safetensors").head
    assert head.per_token and [layer for layer in head.layers if isinstance(layer, torch.nn.Linear)][1:] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_interrupted_runs_are_resumed(name: str, model: Path, tmp_path: Path) -> None:
    path, given = table(tmp_path, name), [*WAYS["lora"], "trainer.max_epochs=2"]
    whole = tune(model, path, tmp_path / "whole", *given)
    tune(model, path, tmp_path / "two", *given, "trainer.limit_train_batches=5")
    assert tune(model, path, tmp_path / "two", *given)["test_loss"] == whole["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_two_ranks_agree_with_one(name: str, model: Path, tmp_path: Path) -> None:
    """Ranks have different numbers of missing labels; the gradient is divided by their number once."""
    columns = f"[{TABLES[name][0]}]"
    given = [f"model.restore_encoder_path={model}", f"model.data.dataset_path={table(tmp_path, name)}",
             f"model.data.task_type={KINDS[name]}", f"model.data.target_column={columns}",
             "model.encoder_frozen=False",
             "model.data.mask_column=null", "model.data.target_sizes=null", "trainer.max_epochs=1",
             "model.finetuning_optim.lr=0.01"]  # fmt: skip
    status, console = run(tmp_path / "one", *given, "model.micro_batch_size=8", model="task")
    assert status == 0, console
    ended = run_on_ranks(tmp_path / "two", *given, "model.micro_batch_size=4", ranks=2, model="task")
    assert [status for status, _ in ended] == [0, 0], ended
    for key in ("reduced_train_loss", "grad_norm", "val_loss"):
        one, two = logged(tmp_path / "one", key), logged(tmp_path / "two", key)
        assert list(two.values()) == pytest.approx(list(one.values()), rel=1e-4), key
