# SPDX-License-Identifier: Apache-2.0
"""An invalid prediction is reported in one line before anything is written."""

import os
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from tests.inference.samples import go


def mistake(model: Path, data: Path, output: Path, *overrides: str) -> str:
    """Return the one-line error; check that no file remains."""
    before = sorted(output.parent.iterdir()) if output.parent.exists() else None
    with pytest.raises(UserError) as caught:
        go(model, data, output, *overrides)
    after = sorted(output.parent.iterdir()) if before is not None else None
    assert after == before
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.fasta", ">a\nMKT\n>b\n123\n", "b (record 1) contains no letter of the vocabulary ('123')"),
        ("x.csv", "id,sequence\na,MKT\nb,\n", "a record without a sequence|b (record 1) is empty"),
        ("x.csv", "id,sequence\na,\nb,\n", "a record without a sequence|a (record 0) is empty"),
        ("x.csv", "id,letters\na,MKT\n", "has no column 'sequence', but 'id', 'letters': set "),
        ("x.csv", "id,sequence\n", "contains no records: check header_lines"),
        ("x.fasta", "id,sequence\na,MKT\n", "text before the first '>': is this a FASTA file?"),
        ("x.fasta", ">a\nMKT>b\nMKT\n", "x.fasta:2: a '>' within a sequence: put a line end before the record"),
        ("x.pdb", "ATOM\n", "unknown file format, expected .fasta, .fa"),
        ("x.csv.gz", "MKT", "unknown file format"),
    ],
)
def test_files_of_the_wrong_type(name: str, content: str, expected: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    (tmp_path / "out").mkdir()
    message = mistake(model, tmp_path / name, tmp_path / "out" / "x.npz")
    assert any(part in message for part in expected.split("|")), message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.data.long_sequences=error"], "p6 (record 6) has 130 tokens, but the model accepts at most 94"),
        (
            ["model.downstream_task.outputs=[hidden]"],
            "model.downstream_task.outputs is ['hidden'], expected one of embeddings, begin, ",
        ),
        (["model.data.output_format=xlsx"], "model.data.output_format is 'xlsx', expected one of npz"),
        (
            ["model.data.output_format=csv", "model.downstream_task.outputs=[hiddens]"],
            "a CSV file cannot hold hiddens",
        ),
        (
            ["model.data.output_format=h5_by_id", "model.downstream_task.outputs=[embeddings,hiddens]"],
            "output_format=h5_by_id holds one array for each id, not embeddings, hiddens: set a single output",
        ),
        (["trainer.num_nodes=2"], "no launcher started this process"),
        (["trainer.devices=0"], "trainer.devices=0, but 1 device is available: set it to at most 1"),
        (["model.data.dataset_path=none.fasta"], "none.fasta is missing (model.data.dataset_path)"),
        (["model.downstream_task.restore_from_path=none"], "none: there is no such checkpoint, .nemo archive"),
    ],
)
def test_mistakes(overrides: list[str], message: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert message in mistake(model, fasta, tmp_path / "out" / "x.npz", *overrides)


def test_ids_that_name_the_same_data_set(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for first, second in (("a", "a"), ("a/b", "a_b")):
        (tmp_path / "x.fasta").write_text(f">{first}\nMKV\n>c\nMKV\n>{second} x\nMKL\n")
        given = (model, tmp_path / "x.fasta", tmp_path / "out" / "x.h5", "model.data.output_format=h5_by_id")
        assert f"records 0 and 2 have the same id '{second}'" in mistake(*given)


def test_existing_outputs_are_kept(model: Path, fasta: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    output = tmp_path / "out" / "x.npz"
    output.write_text("mine")
    assert f"{output} exists: choose another" in mistake(model, fasta, output)
    assert output.read_text() == "mine"
    go(model, fasta, output, "model.data.overwrite=True")
    table = tmp_path / "x.csv"
    table.write_text("id,sequence\na,MKTAYIAKQR\n")
    os.link(table, tmp_path / "same.csv")
    for path in (table, tmp_path / "same.csv"):
        csv = "model.downstream_task.outputs=[pseudo_perplexity]"
        assert f"{path} is the input: choose another" in mistake(model, table, path, "model.data.overwrite=True", csv)
    assert table.read_text() == "id,sequence\na,MKTAYIAKQR\n"
    null = ("/dev/null", "model.data.output_format=npz", "model.data.overwrite=True")
    assert "/dev/null is a device or a pipe" in mistake(model, fasta, Path(null[0]), *null[1:])
    assert len(np.load(output)["id"]) == 10
    assert "does not end in one of .npz, .h5, .csv, .parquet, .pkl" in mistake(model, fasta, tmp_path / "out" / "x.pt")
