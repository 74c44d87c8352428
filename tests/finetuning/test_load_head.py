# SPDX-License-Identifier: Apache-2.0
"""Loaded heads: predictions for new sequences equal those of the training run."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import EsmForTokenClassification

import bionemo
from bionemo.cli.analysis import main
from bionemo.common.errors import UserError
from bionemo.finetuning.heads import Head, SequenceHead, TokenHead
from bionemo.finetuning.load_head import predict_labels, read_records, read_trained_head
from tests.inference.molecules import trained
from tests.support.huggingface import theirs

HEADS: dict[str, tuple[Any, list[str]]] = {
    "tokens": (lambda: TokenHead(32, 3, 8), ["C", "E", "H"]),
    "classes": (lambda: SequenceHead(32, 3, (16, 8)), ["one", "three", "two"]),
    "numbers": (lambda: SequenceHead(32, 1, (16,)), []),
    "a layer": (lambda: SequenceHead(32, 1, ()), []),
    "standardised": (lambda: standardised(SequenceHead(32, 1, (16,))), []),
}
PROTEINS = {"a": "MKTAYIAKQR", "b": "G", "c": "ACDEFGHIKLMNPQRSTVWY" * 3}


def standardised(head: Head) -> Head:
    rng = np.random.default_rng(0)
    head.fit_statistics(rng.standard_normal((9, 32)).astype(np.float32) * 3 + 1, np.arange(9, dtype=np.float32))
    return head


def kept(path: Path, name: str, encoder: Path) -> Head:
    torch.manual_seed(0)
    make, classes = HEADS[name]
    head: Head = make()
    weights = bionemo.load(encoder, "cpu").weights_checksum if encoder.exists() else ""
    kind = "token-level-classification" if name == "tokens" else "classification" if classes else "regression"
    task = {"classes": classes, "task_type": kind, "encoder": str(encoder), "wild_type": None,
            "encoder_weights": weights, "run": ""}  # fmt: skip
    save_file(head.state_dict(), path, {"task": json.dumps(task)})
    return head


@pytest.mark.parametrize("name", HEADS)
def test_predictions_equal_those_of_the_training_run(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, classes = kept(tmp_path / "head.safetensors", name, model), HEADS[name][1]
    (tmp_path / "x.fasta").write_text("".join(f">{key}\n{text}\n" for key, text in PROTEINS.items()))
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", f"--head={tmp_path}/head.safetensors",
                                      f"--input={tmp_path}/x.fasta", f"--output={tmp_path}/x.csv"])  # fmt: skip
    main()
    assert "3 sequences" in capsys.readouterr().out
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["id"] for row in rows] == list(PROTEINS)
    ours = bionemo.load(model)
    for row, text in zip(rows, PROTEINS.values(), strict=True):
        with torch.no_grad():
            if name == "tokens":
                prediction = head(ours.hidden_states([text])[0], [len(text)]).argmax(1)
                assert row["prediction"] == "".join(classes[number] for number in prediction)
            else:
                prediction = head(ours.embed([text]), [1])[0]
                if classes:
                    assert row["prediction"] == classes[int(prediction.argmax())]
                    assert float(row["probability"]) == pytest.approx(float(prediction.softmax(0).max()), abs=1e-4)
                else:
                    assert float(row["prediction"]) == pytest.approx(float(prediction), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", HEADS)
def test_predictions_do_not_depend_on_the_other_sequences(name: str, model: Path, tmp_path: Path) -> None:
    kept(tmp_path / "head.safetensors", name, model)
    trained, ours = read_trained_head(tmp_path / "head.safetensors"), bionemo.load(model)
    generator = np.random.default_rng(0)
    texts = ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), 20)) for _ in range(40)]
    together = predict_labels(ours, trained, texts)
    assert together == [predict_labels(ours, trained, [text])[0] for text in texts]


def test_formats_of_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    for text, ids in (
        (">a x\nMK\nTA\n>b\nGSHM\n", ["a", "b"]),
        ("id,sequence\na,MKTA\nb,GSHM\n", ["a", "b"]),
        ("smiles,zinc_id\nMKTA,a\nGSHM,b\n", ["a", "b"]),
        ("seq,label\nMKTA,1\nGSHM,2\n", ["0", "1"]),
    ):
        path.write_text(text)
        assert read_records(path) == (ids, ["MKTA", "GSHM"])
    note = f"note: {path}: no column of ids is known, and rows are numbered from 0: rename the column of the ids to"
    assert capsys.readouterr().err.count(note) == 1  # of the last table
    path.write_text("Drug,Target,Y\nCCO,MKTA,1\n")
    assert [read_records(path, proteins)[1] for proteins in (True, False)] == [["MKTA"], ["CCO"]]
    smiles = tmp_path / "x.smi"
    smiles.write_text("SMILES Name\nCCO\tethanol, pure\n\nc1ccccc1\n")
    assert read_records(smiles) == (["ethanol, pure", "1"], ["CCO", "c1ccccc1"])
    smiles.write_text("1\tCCO\n2\tCCN\n")
    assert read_records(smiles) == (["1", "2"], ["CCO", "CCN"])
    path.write_text("id,x\na,1\n")
    with pytest.raises(
        UserError, match="x has the columns 'id', 'x': rename the column of the sequences to 'sequence'"
    ):
        read_records(path)


def test_a_missing_encoder_is_reported_with_the_head(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path / "head.safetensors", "tokens", tmp_path / "moved")
    (tmp_path / "x.fasta").write_text(">a\nMKT\n")
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", f"--head={tmp_path}/head.safetensors",
                                      f"--input={tmp_path}/x.fasta", f"--output={tmp_path}/x.csv"])  # fmt: skip
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err.strip()
    assert error.endswith(f"; {tmp_path}/head.safetensors was trained with this model: give another MODEL")


def test_molecules_that_rdkit_rejects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "model")
    kept(tmp_path / "head.safetensors", "classes", tmp_path / "model")
    (tmp_path / "x.smi").write_text("SMILES Name\nCCO ethanol, pure\nC1CC( b\nCCN\n")
    note = f"{tmp_path}/x.smi: RDKit cannot read 1 of 3 SMILES (the first is record 1, 'C1CC(')"

    def label(*more: str) -> list[str]:
        arguments = [f"--head={tmp_path}/head.safetensors", f"--input={tmp_path}/x.smi", f"--output={tmp_path}/x.csv"]
        monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", *arguments, "--overwrite", *more])
        main()
        with (tmp_path / "x.csv").open(newline="") as file:
            return [row["id"] for row in csv.DictReader(file)]

    assert label() == ["ethanol, pure", "2"]
    assert f"note: {note}; their records are dropped\n" in capsys.readouterr().err
    assert label("--on-invalid=keep") == ["ethanol, pure", "b", "2"]
    assert f"note: {note}; they are used unchanged\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        label("--on-invalid=error")
    assert f"{note}: correct them, or set --on-invalid to skip or keep" in capsys.readouterr().err


def test_molecules_are_truncated_and_left_out_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A molecule that is too long for the model, for RDKit, or without a known token does not end the command."""
    trained(tmp_path / "model")
    kept(tmp_path / "head.safetensors", "classes", tmp_path / "model")
    length = bionemo.load(tmp_path / "model", "cpu").network.config.max_position_embeddings
    (tmp_path / "x.smi").write_text(f"CCO a\n{'C' * (length + 9)} b\n[Hg+2] c\n{'C' * 30_000} d\n{'C' * length} e\n")
    arguments = [f"--head={tmp_path}/head.safetensors", f"--input={tmp_path}/x.smi", f"--output={tmp_path}/x.csv"]
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", *arguments])
    main()
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = {row.pop("id"): row for row in csv.DictReader(file)}
    assert [*rows] == ["a", "b", "d", "e"] and rows["b"] == rows["d"]
    notes = capsys.readouterr().err
    assert f"{tmp_path}/x.smi: the model knows no token of 1 of 5 SMILES (the first is record 2, '[Hg+2]')" in notes
    assert f"{tmp_path}/x.smi: b and " in notes and "24 tokens without begin and end, truncated" in notes
    origin = json.loads((tmp_path / "x.csv.json").read_text())
    assert (origin["longer"], origin["max_tokens"], origin["model"]) == (2, 24, str(tmp_path / "model"))
    assert origin["settings"]["head"] == f"{tmp_path}/head.safetensors"


def test_invalid_heads_are_rejected(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(UserError, match="cannot be read"):
        read_trained_head(path)
    path.write_bytes(b"no head")
    with pytest.raises(UserError, match="is not the head of a fine-tuning run"):
        read_trained_head(path)
    for weights, metadata in ({"x": torch.zeros(2)}, {}), ({"x": torch.zeros(2)}, {"classes": [], "encoder": "x"}):
        save_file(weights, path, {"task": json.dumps(metadata)} if metadata else None)
        with pytest.raises(UserError, match=r"is not the head of a fine-tuning run .*: give RUN/head.safetensors"):
            read_trained_head(path)
    kept(path, "tokens", model)
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(UserError, match="is not the head"):
        read_trained_head(path)


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    """A model of transformers with a linear classifier of residues."""
    theirs(tmp_path / "hf")
    torch.manual_seed(1)
    labels = dict(enumerate("HEC"))
    other = EsmForTokenClassification.from_pretrained(tmp_path / "hf", num_labels=3, id2label=labels)
    torch.nn.init.normal_(other.classifier.weight)
    torch.nn.init.normal_(other.classifier.bias)
    other.save_pretrained(tmp_path / "classifier")
    return tmp_path / "classifier"


def test_classifiers_of_transformers(classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.fasta").write_text("".join(f">{key}\n{text}\n" for key, text in PROTEINS.items()))
    arguments = [f"--head={classifier}", f"--input={tmp_path}/x.fasta", f"--output={tmp_path}/x.csv"]
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "label", *arguments])
    main()
    other, ours = EsmForTokenClassification.from_pretrained(classifier).eval(), bionemo.load(classifier, "cpu")
    with (tmp_path / "x.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    trained = read_trained_head(classifier)
    for row, text in zip(rows, PROTEINS.values(), strict=True):
        (ids,) = ours.ids([text])
        with torch.no_grad():
            logits = other(torch.tensor([[0, *ids.tolist(), 2]])).logits[0, 1:-1]
            found = trained.head(ours.hidden_states([text])[0], [len(text)])
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5 * float(logits.abs().max()))
        assert row["prediction"] == "".join("HEC"[number] for number in logits.argmax(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architectures": ["EsmForSequenceClassification"]}, "EsmForSequenceClassification.*: give RUN/head.safe"),
        (
            {"id2label": {"0": "helix", "1": "strand", "2": "coil"}},
            "id2label has helix, strand, coil: give each class",
        ),
    ],
)
def test_other_classifiers(classifier: Path, settings: dict[str, Any], message: str) -> None:
    found = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps(found | settings))
    with pytest.raises(UserError, match=message):
        read_trained_head(classifier)
