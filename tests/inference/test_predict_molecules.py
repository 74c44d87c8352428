# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.predict` with text outputs writes the generated molecules in order in every format."""

import csv
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import bionemo
from bionemo.cli.predict import predict
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import InferConfig
from bionemo.formats.convert import convert
from bionemo.inference import predict_files as running
from bionemo.inference.text_outputs import summarize_matches
from bionemo.inference.writers import FORMATS
from tests.conftest import ROOT
from tests.inference.molecules import KNOWN
from tests.support.huggingface import theirs

TEXTS = [*KNOWN, "CCN", "c1ccncc1O", "O", "CC(C)(C)C"]
BOTH = ["model.downstream_task.outputs=[reconstruction,embeddings,samples]",
        "model.downstream_task.sampling.num_samples=3", "model.downstream_task.sampling.scaled_radius=3"]  # fmt: skip


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_LETTERS", dict.fromkeys(running._LETTERS, 20))


@pytest.fixture
def smiles(tmp_path: Path) -> Path:
    path = tmp_path / "x.smi"
    path.write_text("".join(f"{text}\tm{number}\n" for number, text in enumerate(TEXTS)))
    return path


def overrides(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    return [f"model.downstream_task.restore_from_path={model}", f"model.data.dataset_path={data}",
            f"model.data.output_fname={output}", "trainer.accelerator=cpu", *more]  # fmt: skip


def go(model: Path, data: Path, output: Path, *more: str) -> None:
    predict(load("predict", overrides(model, data, output, *more), schema=InferConfig))


def lists(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in ("id", "reconstruction", "samples")}


def from_npz(path: Path) -> dict[str, Any]:
    found = np.load(path)
    return {name: found[name].tolist() for name in ("id", "reconstruction", "samples")}


def from_h5(path: Path) -> dict[str, Any]:
    with h5py.File(path) as file:
        return {name: file[name].asstr()[:].tolist() for name in ("id", "reconstruction", "samples")}


def from_csv(path: Path) -> dict[str, Any]:
    options = pyarrow.csv.ConvertOptions(strings_can_be_null=False)
    table = pyarrow.csv.read_csv(path, convert_options=options)
    assert table.column_names[:3] == ["id", "tokens", "reconstruction"]
    assert table.column_names[-3:] == ["samples_0", "samples_1", "samples_2"]
    columns = zip(*(table[f"samples_{i}"].to_pylist() for i in range(3)), strict=True)
    names = {name: table[name].to_pylist() for name in ("id", "reconstruction")}
    return {**names, "samples": [list(each) for each in columns]}


READERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "npz": from_npz, "h5": from_h5, "csv": from_csv,
    "parquet": lambda path: lists(pyarrow.parquet.read_table(path).to_pylist()),
    "pkl": lambda path: lists(pickle.loads(path.read_bytes())),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_contains_the_generated_molecules(
    kind: str, writer: Path, smiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go(writer, smiles, tmp_path / f"x.{kind}", *BOTH)
    model = bionemo.load(writer, "cpu")
    assert READERS[kind](tmp_path / f"x.{kind}") == {
        "id": [f"m{number}" for number in range(len(TEXTS))],
        "reconstruction": model.reconstruct(TEXTS),
        "samples": model.sample(TEXTS, num_samples=3, scaled_radius=3.0),
    }
    first, one, many = capsys.readouterr().out.splitlines()
    assert first == f"10 sequences: {tmp_path / 'x'}.{kind}"
    assert one.startswith("reconstruction: 10 molecules, ")
    assert one.endswith("equal to the input")
    assert many.startswith("samples: 30 molecules, ")


@pytest.mark.slow
def test_text_outputs_do_not_depend_on_processes_or_batches(writer: Path, smiles: Path, tmp_path: Path) -> None:
    """Two processes, batches of one token and omitted molecules change no output."""
    go(writer, smiles, tmp_path / "one.npz", *BOTH)
    more = [*BOTH, "trainer.devices=2", "model.data.tokens_per_batch=1"]
    command = [sys.executable, "-m", "bionemo.predict", *overrides(writer, smiles, tmp_path / "two.npz", *more)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, two = np.load(tmp_path / "one.npz"), np.load(tmp_path / "two.npz")
    assert all(np.array_equal(one[key], two[key]) for key in one.files)
    smiles.write_text(smiles.read_text().replace(f"\n{TEXTS[1]}\t", f"\n{'C' * 30}\t"))
    go(writer, smiles, tmp_path / "less.npz", *BOTH, "model.data.long_sequences=drop")
    less = np.load(tmp_path / "less.npz")
    assert np.array_equal(np.delete(one["samples"], 1, 0), less["samples"])


def test_resuming_reuses_only_parts_with_equal_options(
    writer: Path, smiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute, computed = running._compute_part, []

    def stop(prediction: Any, number: int, *rest: Any) -> None:
        if len(computed) == 2:
            computed.append(-1)
            raise SystemError
        computed.append(number)
        compute(prediction, number, *rest)

    monkeypatch.setattr(running, "_compute_part", stop)
    with pytest.raises(SystemError):
        go(writer, smiles, tmp_path / "x.npz", *BOTH)
    go(writer, smiles, tmp_path / "x.npz", *BOTH)
    assert computed[:3] == [0, 1, -1]
    assert computed[3:] == list(range(2, 2 + len(computed[3:])))
    assert from_npz(tmp_path / "x.npz")["reconstruction"][:6] == KNOWN
    with pytest.raises(SystemError):
        computed.clear()
        go(writer, smiles, tmp_path / "y.npz", *BOTH)
    go(writer, smiles, tmp_path / "y.npz", *BOTH, "model.downstream_task.sampling.seed=7")
    assert "holds parts of another prediction: they are removed" in capsys.readouterr().err
    assert from_npz(tmp_path / "x.npz")["samples"] != from_npz(tmp_path / "y.npz")["samples"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["sampling.sampling_method=beam"], "sampling.sampling_method is 'beam', expected one of greedy-perturbate"),
        (["sampling.num_samples=0"], "model.downstream_task.sampling.num_samples is 0, expected at least 1"),
        (["sampling.top_p=2"], "model.downstream_task.sampling.top_p is 2.0, expected from 0 to 1"),
        (["reconstruction_beam_size=0"], "model.downstream_task.reconstruction_beam_size is 0, expected at least 1"),
        (["sampling.topk=3"], "unknown key model.downstream_task.sampling.topk"),
    ],
)
def test_mistakes(more: list[str], message: str, writer: Path, smiles: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        go(writer, smiles, tmp_path / "x.npz", *BOTH, *(f"model.downstream_task.{word}" for word in more))
    assert message in str(caught.value)
    assert not list(tmp_path.glob("x.npz*"))


def test_long_molecules_are_not_split_into_windows(writer: Path, smiles: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reconstruction is not available for pieces of sequences: set"):
        go(writer, smiles, tmp_path / "x.npz", *BOTH, "model.data.long_sequences=split")


def test_a_model_without_a_decoder_has_no_text_outputs(smiles: Path, tmp_path: Path) -> None:
    theirs(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "model")
    with pytest.raises(UserError, match="ESM2nv has no decoder, which reconstruction needs"):
        go(tmp_path / "model", smiles, tmp_path / "x.npz", *BOTH)


INVALID = ["CCO\ta", "C1CC(\tb", "CC(C)(C)(C)(C)C\tc", "c1ccccc1\td", "c1ccccc\te", "hello\tf", "CCN"]
NOTE = "RDKit cannot read 4 of 7 SMILES (the first is record 1, 'C1CC('); "


def test_molecules_that_rdkit_rejects_are_left_out_kept_or_refused(
    writer: Path, smiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smiles.write_text("\n".join(INVALID))
    go(writer, smiles, tmp_path / "skip.npz")
    skipped = np.load(tmp_path / "skip.npz")
    assert skipped["id"].tolist() == ["a", "d", "6"]
    expected = bionemo.load(writer, "cpu").embed(["CCO", "c1ccccc1", "CCN"])
    np.testing.assert_array_equal(skipped["embeddings"], expected)
    assert f"note: {smiles}: {NOTE}their records are dropped\n" in capsys.readouterr().err
    go(writer, smiles, tmp_path / "keep.npz", "model.data.on_invalid=keep")
    assert np.load(tmp_path / "keep.npz")["id"].tolist() == ["a", "b", "c", "d", "e", "f", "6"]
    assert f"note: {smiles}: {NOTE}they are used unchanged\n" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"RDKit cannot read 1 .* 'C1CC\('\): correct them, or set model.data.on_inv"):
        go(writer, smiles, tmp_path / "error.npz", "model.data.on_invalid=error")
    assert not list(tmp_path.glob("error.npz*"))
    smiles.write_text("C1CC( a\n")
    with pytest.raises(UserError, match="no SMILES in column 1 of"):
        go(writer, smiles, tmp_path / "none.npz")
    smiles.write_text("CC(C)(C)(C)(C)C a\n")
    with pytest.raises(UserError, match=r"all sequences were dropped: set model.data.on_invalid to keep"):
        go(writer, smiles, tmp_path / "none.npz")


def test_molecules_without_a_known_token_and_texts_behind_a_smiles(
    writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other molecules keep their results; a name or an extension in the cell of a SMILES is not read."""
    path = tmp_path / "x.csv"
    path.write_text("smiles;id\nCCO |o1:1|;a\n[Hg+2];b\n;c\nc1ccccc1 benzene;d\n")
    go(writer, path, tmp_path / "skip.npz")
    found = np.load(tmp_path / "skip.npz")
    assert found["id"].tolist() == ["a", "d"]
    np.testing.assert_array_equal(found["embeddings"], bionemo.load(writer, "cpu").embed(["CCO", "c1ccccc1"]))
    notes = capsys.readouterr().err
    assert f"note: {path}: RDKit cannot read 1 of 4 SMILES (the first is record 2, ''); their records" in notes
    assert f"{path}: the model knows no token of 1 of 4 SMILES (the first is record 1, '[Hg+2]'); their" in notes
    assert "text after white space, not part of a SMILES, not read: '|o1:1|' 1, 'benzene' 1 (in 2 of 4" in notes
    path.write_text(path.read_text().replace("\n;c", ""))
    go(writer, path, tmp_path / "keep.npz", "model.data.on_invalid=keep")
    assert np.load(tmp_path / "keep.npz")["id"].tolist() == ["a", "b", "d"]
    with pytest.raises(UserError, match=r"knows no token of 1 of . SMILES .*: correct them, or set model.data.on_inv"):
        go(writer, path, tmp_path / "error.npz", "model.data.on_invalid=error")


def test_a_table_of_molecules_and_proteins(writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model reads the molecules; if it should read the proteins, the message names their column."""
    path = tmp_path / "x.csv"
    path.write_text("Drug,Target,Y\nCCO,MKTAYIAK,1\nc1ccccc1,GSHMKTW,2\n")
    go(writer, path, tmp_path / "x.npz")
    found = np.load(tmp_path / "x.npz")
    assert found["id"].tolist() == ["0", "1"]
    np.testing.assert_array_equal(found["embeddings"], bionemo.load(writer, "cpu").embed(["CCO", "c1ccccc1"]))
    note = f"{path}: no column of ids is known, and rows are numbered from 0: model.data.data_fields_map.id selects"
    assert capsys.readouterr().err.count(note) == 1
    with pytest.raises(UserError, match="all sequences were dropped"):
        go(writer, path, tmp_path / "y.npz", "model.data.data_fields_map.sequence=Target")
    named = "SMILES of column 'Target', which model.data.data_fields_map.sequence selects (the first is record 0, "
    assert f"RDKit cannot read 2 of 2 {named}" in capsys.readouterr().err


def test_names_of_smiles_files_are_kept(writer: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.smiles"
    path.write_text('SMILES Name \nCCO  ethanol\nCCN 1,2-"x" y\nCC\n')
    go(writer, path, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="") as file:
        assert [(row["id"], row["tokens"]) for row in csv.DictReader(file)] == [
            ("ethanol", "3"), ('1,2-"x" y', "3"), ("2", "2")
        ]  # fmt: skip
    path.write_text("name\traw\ncharged\tCC[NH3+]\nneutral\tCCN\n")
    go(writer, path, tmp_path / "y.npz", "model.data.data_fields_map.sequence=raw")
    assert np.load(tmp_path / "y.npz")["id"].tolist() == ["charged", "neutral"]


def test_exact_match_of_the_first_k_candidates() -> None:
    """Three candidates for each of five targets; the fragments of a candidate may be in any order."""
    pairs = [
        ("CCN.CC(=O)O", ["OC(C)=O.NCC", "CCN", "C"]),  # the first
        ("CCO", ["C(C", "CCN", "OCC"]),  # the third, after an invalid one
        ("C[C@H](N)O", ["C[C@@H](N)O", "CC(N)O", "N[C@@H](C)O"]),  # stereo counts: the third
        ("c1ccccc1", ["C1=CC=CC=C1", "c1ccccc1", "c1ccccc1"]),  # the first, in the Kekule form
        ("CCl", ["", "CCl.C", "c1cc"]),  # none; two are invalid
        ("C(C", ["C(C", "C", "C"]),  # a target that cannot be read
    ]
    assert summarize_matches("samples", iter(pairs)) == (
        "samples: exact match of 5 targets: top-1 40.0 %, top-3 80.0 %; 4 of 18 candidates invalid; 1 targets that "
        "RDKit cannot read are left out"
    )


def test_beams_are_compared_with_the_targets_of_a_table(
    writer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model reconstructs these molecules, so its first beam is the target."""
    path = tmp_path / "x.csv"
    path.write_text("id,reactants,products\n0,OCC,CCO\n1,C1=CC=CC=C1,c1ccccc1\n2,Cl,C1CCNCC1\n")
    beams = ["outputs=[samples]", "sampling.sampling_method=beam-search-single-sample", "sampling.num_samples=2",
             "sampling.scaled_radius=0"]  # fmt: skip
    columns = ["model.data.data_fields_map.sequence=products", "model.data.data_fields_map.target=reactants"]
    settings = [f"model.downstream_task.{each}" for each in beams]
    go(writer, path, tmp_path / "x.npz", *settings, *columns)
    assert "samples: exact match of 3 targets: top-1 66.7 %, top-2 66.7 %; " in capsys.readouterr().out
    by_number = ["model.data.data_impl=csv_fields_mmap",
                 "model.data.data_impl_kwargs.csv_fields_mmap.data_fields={id: 0, sequence: 2}"]  # fmt: skip
    go(writer, path, tmp_path / "y.npz", *settings, *columns, *by_number)
    assert "samples: exact match of 3 targets: top-1 66.7 %, top-2 66.7 %; " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"has no column 'reagents': set model.data.data_fields_map.target"):
        go(writer, path, tmp_path / "z.npz", *settings, columns[0], "model.data.data_fields_map.target=reagents")
