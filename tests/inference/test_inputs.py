# SPDX-License-Identifier: Apache-2.0
"""Equivalent files of every input format are read equally."""

from pathlib import Path

import pytest

from tests.inference.samples import go, same, sequences


@pytest.mark.parametrize(
    "kind", ["csv", "named.csv", "molecules.csv", "upper.csv", "prepared.csv", "tsv", "v1.csv", "shards"]
)
def test_input_formats_are_equivalent(kind: str, model: Path, fasta: Path, tmp_path: Path) -> None:
    go(model, fasta, tmp_path / "one.npz")
    rows = list(enumerate(sequences()))
    overrides, path = [], tmp_path / f"x.{kind}"
    match kind:
        case "csv":
            path.write_text("name,sequence,id\n" + "".join(f"-,{text},p{n}\n" for n, text in rows))
        case "named.csv":
            path.write_text("protein,letters\n" + "".join(f"p{n},{text}\n" for n, text in rows))
            overrides = ["model.data.data_fields_map.sequence=letters", "model.data.data_fields_map.id=protein"]
        case "molecules.csv":
            path.write_text("zinc_id,smiles\n" + "".join(f"p{n},{text}\n" for n, text in rows))
        case "upper.csv":
            path.write_text("id,SMILES,label\n" + "".join(f"p{n},{text},1\n" for n, text in rows))
        case "prepared.csv":
            path.write_text("record_id,record_name,sequence\n" + "".join(f"{n},p{n},{text}\n" for n, text in rows))
        case "tsv":
            path.write_text("id\tsequence\n" + "".join(f"p{n}\t{text}\n" for n, text in rows))
        case "v1.csv":
            path.write_text("a,b,c\n" + "".join(f"p{n},,{text}\n" for n, text in rows))
            overrides = ["model.data.data_impl=csv_fields_mmap",
                     "model.data.data_impl_kwargs.csv_fields_mmap.data_fields={id: 0, sequence: 2}"]  # fmt: skip
        case "shards":
            for shard in range(5):
                lines = "".join(f"p{n},{text}\n" for n, text in rows[2 * shard : 2 * shard + 2])
                (tmp_path / f"s{shard}.csv").write_text("id,sequence\n" + lines)
            path = tmp_path / "s[0..4].csv"
    go(model, path, tmp_path / "two.npz", *overrides)
    assert same(tmp_path / "one.npz", tmp_path / "two.npz")


def test_sequences_of_another_kind_are_noted(
    model: Path, fasta: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(model, fasta, tmp_path / "proteins.npz")
    assert "unknown" not in capsys.readouterr().err
    (tmp_path / "x.smi").write_text("c1ccccc1O\nCC(=O)Oc1ccccc1\n")
    go(model, tmp_path / "x.smi", tmp_path / "molecules.npz")
    # O and C are amino acids, in upper and lower case: brackets, bonds and digits are unknown
    error = capsys.readouterr().err
    assert "x.smi: letters unknown to the model, each read as an unknown residue: '1' 4, '(' 1," in error
    assert "in 2 of 2 sequences, the first 0)" in error
    assert "the model reads proteins" in error
