# SPDX-License-Identifier: Apache-2.0
"""`python -m bionemo.analysis` writes tables and figures; a user error is one line and leaves no files."""

import csv
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import h5py
import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.decomposition import PCA

import bionemo
from bionemo.analysis.contacts import fit_contact_head
from bionemo.cli import analysis as command
from bionemo.inference import load as loading
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import AMINO_ACIDS, scan, score_variants
from tests.support.huggingface import theirs

WILD_TYPE = "MKTAYIAKQRQISFVKSHFS"
VARIANTS = ["K2A", "M1A:K2W", "A4G", "S20C", "A4A", "F14L", "H18R"]
Run = Callable[..., str]
load_once = cache(bionemo.load)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "hf"
    theirs(path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> TrainedModel:
    return bionemo.load(path, "cpu")


@pytest.fixture
def run(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in its own directory; return its output, or its one-line error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load", load_once)

    def say(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["bionemo.analysis", *map(str, arguments)])
        try:
            command.main()
        except SystemExit as end:
            assert end.code == 1
            output = capsys.readouterr().err
            assert output.count("\n") == 1, output
            return output
        return capsys.readouterr().out

    return say


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def fasta_of(variants: dict[str, float]) -> str:
    """Return the file in the format of the beta-lactamase set."""
    text = ""
    for number, (variant, score) in enumerate(variants.items()):
        letters = list(WILD_TYPE)
        letters[int(variant[1:-1]) - 1] = variant[-1]
        text += f">{number}|some_protein_{variant}|{score}\n{''.join(letters)}\n"
    return text


def test_variants_of_a_table(run: Run, tmp_path: Path, path: Path, model: TrainedModel) -> None:
    """All columns are copied unchanged; rho is computed over the measured rows."""
    values = ["0.50", "NA", "1.5", "2", "", "-3e-1", "0.7"]
    cells = [[f"a, {n}", variant, value] for n, (variant, value) in enumerate(zip(VARIANTS, values, strict=True))]
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["note", "mutant", "DMS_score"], *cells])
    (tmp_path / "wt.fasta").write_text(f">wt\n{WILD_TYPE[:7]}\n{WILD_TYPE[7:]}\n")
    output = run("variants", "--model", path, "--sequence", "wt.fasta", "--variants", "x.csv", "--column", "mutant",
               "--score-column", "DMS_score", "--output", "new/scores.csv")  # fmt: skip
    header, *rows = rows_of(tmp_path / "new" / "scores.csv")
    assert header == ["note", "mutant", "DMS_score", "zero_shot"]
    assert [row[:3] for row in rows] == cells
    scores = score_variants(model, WILD_TYPE, VARIANTS)
    np.testing.assert_allclose([float(row[3]) for row in rows], scores, rtol=1e-6)
    there = [0, 2, 3, 5, 6]
    rho = spearmanr(scores[there], [float(values[n]) for n in there]).statistic
    assert output == (
        f"7 variants: new/scores.csv\nSpearman's rho {rho:.4f} with 5 measured values of 'DMS_score': new/scores.png\n"
    )
    assert is_picture(tmp_path / "new" / "scores.png")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == [
        "scores.csv", "scores.csv.json", "scores.png"
    ]  # fmt: skip


def test_variants_of_a_fasta_file(
    run: Run, tmp_path: Path, path: Path, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wild type is derived from the variants, in any order; its own score of 0 says nothing about the ranks."""
    notes: list[str] = []
    monkeypatch.setattr("bionemo.cli.analysis_commands.notify", lambda *each: notes.extend(each))
    variants = {"K2A": 0.5, "A4A": 1.0, "S20C": 0.1, "F14L": 0.9}
    (tmp_path / "x.fasta").write_text(fasta_of(variants))
    output = run("variants", "--model", path, "--variants", "x.fasta", "--method", "wild-type-marginal", "--output",
               "scores.csv")  # fmt: skip
    header, *rows = rows_of(tmp_path / "scores.csv")
    assert header == ["index", "name", "variant", "score", "zero_shot"]
    assert [row[:4] for row in rows] == [
        [str(n), "some_protein", variant, str(score)] for n, (variant, score) in enumerate(variants.items())
    ]
    scores = score_variants(model, WILD_TYPE, list(variants), "wild-type-marginal")
    np.testing.assert_allclose([float(row[4]) for row in rows], scores, rtol=1e-6)
    assert notes == ["left out of rho: 1 variant with the sequence of the wild type, which score 0"]
    rho = spearmanr(scores[[0, 2, 3]], [0.5, 0.1, 0.9]).statistic
    assert f"Spearman's rho {rho:.4f} with 3 measured values of 'score': scores.png" in output


def test_variants_without_measurements(run: Run, tmp_path: Path, path: Path) -> None:
    (tmp_path / "x.tsv").write_text("\ufeffvariant\tnote\nK32A\t\n\nwt\tnone\n")
    output = run("variants", "--model", path, "--sequence", WILD_TYPE, "--variants", "x.tsv", "--offset", 30,
                 "--output", "scores.csv")  # fmt: skip
    assert output == "2 variants: scores.csv\n"
    assert rows_of(tmp_path / "scores.csv")[2] == ["wt", "none", "0"]
    assert not (tmp_path / "scores.png").exists()


def test_variants_of_mavedb(
    run: Run, tmp_path: Path, path: Path, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variants that are no substitutions have no score and no rank; other letters are noted."""
    notes: list[str] = []
    monkeypatch.setattr("bionemo.cli.analysis_commands.notify", lambda *each: notes.extend(each))
    cells = [
        "p.Lys32Ala", "p.(Ser50Cys)", "p.Ala34Ter", "p.[Met31Ala;Lys32Trp]", "p.Ala34fs", "_wt", "p.Lys32=", "K32X",
        "K32*",
    ]  # fmt: skip
    values = [0.5, 0.1, -3, 0.2, -4, 1, 1, 0.3, -2]
    lines = [f"{cell},{value}" for cell, value in zip(cells, values, strict=True)]
    (tmp_path / "x.csv").write_text("\n".join(["hgvs_pro,score", *lines]))
    output = run("variants", "--model", path, "--sequence", WILD_TYPE, "--variants", "x.csv", "--column", "hgvs_pro",
                 "--offset", 30, "--output", "s.csv")  # fmt: skip
    found = [row[2] for row in rows_of(tmp_path / "s.csv")[1:]]
    assert [n for n, cell in enumerate(found) if cell == ""] == [2, 4, 8]
    scores = score_variants(model, WILD_TYPE, ["K2A", "S20C", "M1A:K2W", "wt", "wt", "K2X"])
    np.testing.assert_allclose([float(cell) for cell in found if cell], scores, rtol=1e-6)
    rho = spearmanr(scores[[0, 1, 2, 5]], [0.5, 0.1, 0.2, 0.3]).statistic
    assert f"9 variants: s.csv\nSpearman's rho {rho:.4f} with 4 measured values of 'score': s.png" in output
    assert notes == [
        "not scored: 3 of 9 variants, with a stop codon, deletion, insertion, frameshift or unknown effect, the first "
        "x.csv:4",
        "substitutions by other letters than the 20 amino acids (X, B, Z and J are ambiguous, U and O rare), scored "
        "all the same: 'X' 1 (the first x.csv:9)",
        "left out of rho: 2 variants with the sequence of the wild type, which score 0",
    ]


def test_stop_codons_in_a_fasta_file(run: Run, tmp_path: Path, path: Path) -> None:
    (tmp_path / "x.fasta").write_text(f">0|a_K2*|1\nM\n{fasta_of({'K2A': 0.5, 'S20C': 0.1})}")
    run("variants", "--model", path, "--variants", "x.fasta", "--output", "s.csv")
    assert [row[4] != "" for row in rows_of(tmp_path / "s.csv")[1:]] == [False, True, True]


def test_a_scan(run: Run, tmp_path: Path, path: Path, model: TrainedModel) -> None:
    output = run(
        "variants", "--model", path, "--sequence", WILD_TYPE, "--scan", "--offset", 30, "--output", "scan.csv"
    )
    header, *rows = rows_of(tmp_path / "scan.csv")
    assert header == ["position", "wild_type", *AMINO_ACIDS]
    assert [row[:2] for row in rows] == [[str(n), letter] for n, letter in enumerate(WILD_TYPE, 31)]
    found = np.array([row[2:] for row in rows], np.float32)
    np.testing.assert_allclose(found, scan(model, WILD_TYPE), rtol=1e-6)
    assert output == "20 residues: scan.csv, scan.png\n"
    assert is_picture(tmp_path / "scan.png")


TABLE = "variant,score\nK2A,1\n"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (TABLE, ["--variants", "x"], "the wild type is unknown: give it with --sequence"),
        (TABLE, [], "give either --variants FILE or --scan"),
        (TABLE, ["--variants", "x", "--scan"], "give either --variants FILE or --scan"),
        (TABLE, ["--scan"], "--scan needs the wild type"),
        (TABLE, ["--variants", "none"], "none cannot be read (No such file or directory): check the path"),
        (TABLE, ["--variants", "x", "--sequence", "none.fasta"], "'none.fasta' is neither an existing file nor"),
        (TABLE, ["--variants", "x", "--sequence", "x"], "x does not begin with '>': give a FASTA file, or"),
        (TABLE, ["--variants", "x", "--column", "mutant"], "x has no column 'mutant', but 'variant', 'score': "
         "name one with --column"),
        (TABLE, ["--variants", "x", "--score-column", "fitness"], "x has no column 'fitness', but 'variant', 'score': "
         "name one with --score-column"),
        ("variant,score\nK2A,high\n", ["--variants", "x"], "x:2: the score 'high' is not a number: leave"),
        ("variant\nA4G\n\nK3A\n", ["--variants", "x", "--sequence", WILD_TYPE], "x:4, K3A: residue 3 is T, not K"),
        ("variant\nA4\n", ["--variants", "x", "--sequence", WILD_TYPE], "x:2, A4: expected a residue, its position"),
        ("variant,score\nA4G,1\n,2\n", ["--variants", "x", "--sequence", WILD_TYPE], "x:3: the variant is missing:"),
        ("variant\nA4*\n", ["--variants", "x", "--sequence", WILD_TYPE], "x: no variant can be scored: give subst"),
        ("variant\np.Lys3Ala\n", ["--variants", "x", "--sequence", WILD_TYPE], "x:2, K3A: residue 3 is T, not K"),
        ("variant,zero_shot\nA4G,1\n", ["--variants", "x"], "x has a column 'zero_shot' already"),
        ("variant\nA4G,K2A\n", ["--variants", "x"], "x: the first line, 'variant', has one cell and x:2 has 2: quote"),
        ("variant,score\nA4G\n", ["--variants", "x"], "x:2: the row is incomplete: fill in variant, score"),
        ("variant\n", ["--variants", "x"], "x has no rows below a header"),
        ("", ["--variants", "x"], "x has no rows below a header"),
        ('variant\n"A4G', ["--variants", "x"], "x is not a valid CSV file"),
        (">1|a_K2A|1\nMA\n>b\nMK\n", ["--variants", "x"], "x: record 'b': expected a header such as >2810|name_R63P|"),
        (">1|a_K2A|1\nMA>2|a_M1A|1\nAK\n", ["--variants", "x"], "x:2: a '>' within a sequence: put a line end before"),
        (">1|a_K2A|1\nMA\n>2|a_M1A|1\nAA\n", ["--variants", "x"], "x: 2|a_M1A|1: its sequence is not the wild type "
         "with M1A, as inferred from the first record"),
        (">1|a_K3A|1\nMA\n", ["--variants", "x"], "x: 1|a_K3A|1, K3A: the sequence has residues 1 to 2"),
        (">1|a_K2A|1\nMA\n>2|a_M1A|1\nAK\n", ["--scan", "--sequence", "x"], "x holds 2 sequences: give a file with"),
        (TABLE, ["--variants", "x", "--sequence", WILD_TYPE, "--output", "d"], "d is a directory: name a file in it"),
        (TABLE, ["--variants", "x", "--sequence", WILD_TYPE, "--output", "x/y"], "x/y cannot be written ("),
        (TABLE, ["--variants", "x", "--sequence", WILD_TYPE, "--model", "none"], "none: there is no such checkpoint"),
    ],
)  # fmt: skip
def test_user_errors_of_variants(
    text: str, arguments: list[str], message: str, run: Run, tmp_path: Path, path: Path
) -> None:
    (tmp_path / "x").write_text(text)
    (tmp_path / "d").mkdir()
    found = run("variants", "--model", path, "--output", "out.csv", *arguments)
    assert f"error: {message}" in found
    assert sorted(file.name for file in tmp_path.iterdir()) == ["d", "x"]


RECORDS = {"sp|P1|ONE": WILD_TYPE * 3, "a/b": WILD_TYPE, "short": "MK"}


def test_contacts(run: Run, tmp_path: Path, path: Path, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "bionemo.analysis.contacts._INVERSE_L1", 1e5
    )  # the attention of random weights contains little information
    (tmp_path / "x.fasta").write_text("".join(f">{name} more\n{text}\n" for name, text in RECORDS.items()))
    maps = tmp_path / "maps"
    maps.mkdir()
    for name, text in (("sp|P1|ONE", WILD_TYPE * 3), ("a_b", WILD_TYPE), ("short", "MK")):
        n = np.arange(len(text))
        np.save(maps / f"{name}.npy", (n[:, None] + n) % 7 == 0)
    output = run("contacts", "--model", path, "--input", "x.fasta", "--maps", "maps", "--output", "out")
    assert re.fullmatch(
        r"3 contact maps: out\nprecision of the most likely contacts \(L: length of the protein\)\n"
        r"  residues at least  6 apart: first L 0\.\d{4}, first L/5 \d\.\d{4} \(2 proteins\)\n"
        r"  residues at least 24 apart: first L 0\.\d{4}, first L/5 \d\.\d{4} \(1 protein\)\n",
        output,
    )
    (tmp_path / "zeros").mkdir()
    for file in maps.iterdir():
        np.save(tmp_path / "zeros" / file.name, np.zeros_like(np.load(file)))
    output_without = run("contacts", "--model", path, "--input", "x.fasta", "--maps", "zeros", "--output", "none")
    assert output_without.endswith(
        "  residues at least  6 apart: unknown, no map has contacts at least 6 apart\n"
        "  residues at least 24 apart: unknown, no map has contacts at least 24 apart\n"
    )
    names = ("a_b", "short", "sp|P1|ONE")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        f"{name}.{ending}" for name in names for ending in ("csv", "csv.json", "png")
    ]
    header, *rows = rows_of(tmp_path / "out" / "a_b.csv")
    assert header == ["i", "j", "probability"]
    predicted = predict_contacts(model, WILD_TYPE)
    pairs = [(i, j) for i in range(20) for j in range(i + 1, 20)]
    assert [row[:2] for row in rows] == [[str(i + 1), str(j + 1)] for i, j in pairs]
    np.testing.assert_allclose([float(row[2]) for row in rows], [predicted[pair] for pair in pairs], rtol=1e-5)
    assert all(is_picture(tmp_path / "out" / f"{name}.png") for name in names)

    output = run("contacts-fit", "--model", path, "--input", "x.fasta", "--maps", "maps", "--output", "head.json")
    head = json.loads((tmp_path / "head.json").read_text())
    assert head["provenance"]["settings"]["maps"] == "maps"
    known = [np.load(maps / f"{name}.npy") for name in ("sp|P1|ONE", "a_b", "short")]
    fitted_head = fit_contact_head(model, list(RECORDS.values()), known)
    assert head == {
        **fitted_head, "model_weights": model.weights_checksum, "provenance": head["provenance"]
    }  # fmt: skip
    assert output == f"{sum(weight != 0 for weight in head['weight'])} of 8 attention heads have a weight: head.json\n"
    run("contacts", "--model", path, "--input", "x.fasta", "--head", "head.json", "--output", "again")
    again = np.array([float(row[2]) for row in rows_of(tmp_path / "again" / "a_b.csv")[1:]])
    fitted = predict_contacts(model, WILD_TYPE, fitted_head)
    np.testing.assert_allclose(again, [fitted[pair] for pair in pairs], rtol=1e-5)
    (tmp_path / "head.json").write_text(json.dumps({**head, "model_weights": "of another model"}))
    error = run("contacts", "--model", path, "--input", "x.fasta", "--head", "head.json", "--output", "other")
    assert f"{path} has other weights than the model of head.json: fit a contact head" in error


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (">a/b\nMK\n>a_b\nMK\n", [], "x: several records would be written as 'a_b': give each a different id"),
        (">..\nMK\n", [], "x: several records would be written as ''"),
        (">a\nMK\n>b\n" + "A" * 95 + "\n", [], "b has 95 residues, but the model accepts at most 94"),
        (">a\n" + "A" * 95 + "\n>b\n" + "A" * 96 + "\n", [], "b has 96 residues, but the model accepts at most 94"),
        (">a\nMK\n", ["--head", "none"], "none cannot be read"),
        (">a\nMK\n", ["--maps", "d"], "d/a.npy cannot be read (No such file or directory): each record needs a map"),
        (">b\nMK\n", ["--maps", "maps"], "the map b.npy is of shape (3, 3), its sequence has 2 residues"),
        (">c\nMK\n", ["--maps", "maps"], "maps/c.npy is not a .npy file of numbers"),
        ("MK\n", [], "x:1: text before the first '>': is this a FASTA file?"),
    ],
)
def test_user_errors_of_contacts(
    text: str, arguments: list[str], message: str, run: Run, tmp_path: Path, path: Path
) -> None:
    (tmp_path / "x").write_text(text)
    (tmp_path / "maps").mkdir()
    np.save(tmp_path / "maps" / "b.npy", np.zeros((3, 3)))
    (tmp_path / "maps" / "c.npy").write_text("")
    assert f"error: {message}" in run("contacts", "--model", path, "--input", "x", "--output", "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def proteins(tmp_path: Path) -> list[str]:
    """Write six proteins with two taxa to x.fasta."""
    texts = [WILD_TYPE[n:] + WILD_TYPE[: 2 * n] for n in range(6)]
    records = [f">p{n} n={n} Tax=kind {n % 2} TaxID={n}\n{text}\n" for n, text in enumerate(texts)]
    (tmp_path / "x.fasta").write_text("".join(records))
    return texts


def test_a_map(run: Run, tmp_path: Path, path: Path, model: TrainedModel, proteins: list[str]) -> None:
    """Sequences and their saved embeddings give the same map."""
    output = run(
        "map", "--model", path, "--input", "x.fasta", "--method", "pca", "--color", "Tax", "--output", "a.csv"
    )
    assert output == "6 sequences: a.csv, a.png\n"
    header, *rows = rows_of(tmp_path / "a.csv")
    assert header == ["id", "x", "y", "Tax"]
    assert [(row[0], row[3]) for row in rows] == [(f"p{n}", f"kind {n % 2}") for n in range(6)]
    ids = np.array([f"p{n}" for n in range(6)])
    np.savez("x.npz", id=ids, embeddings=model.embed(proteins), length=np.array(list(map(len, proteins))))
    run("map", "--input", "x.npz", "--method", "pca", "--color", "length", "--output", "b.csv")
    assert [row[:3] for row in rows_of(tmp_path / "b.csv")[1:]] == [row[:3] for row in rows]
    assert [row[3] for row in rows_of(tmp_path / "b.csv")[1:]] == [str(len(text)) for text in proteins]
    (tmp_path / "kinds.csv").write_text("id,kind\np1,one $^$\nother,two\np5,\n")
    run("map", "--input", "x.npz", "--method", "pca", "--color", "kind", "--table", "kinds.csv", "--output", "c.csv")
    assert [row[3] for row in rows_of(tmp_path / "c.csv")[1:]] == ["", "one $^$", "", "", "", ""]
    run("map", "--input", "x.npz", "--method", "pca", "--output", "d.csv")
    assert rows_of(tmp_path / "d.csv") == [row[:3] for row in [header, *rows]]
    assert all(is_picture(tmp_path / f"{name}.png") for name in "abcd")


def test_ids_of_a_table(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal rows of an id and different rows of other ids are accepted; the number of ids in the table is printed."""
    notes: list[str] = []
    monkeypatch.setattr("bionemo.cli.analysis_commands.notify", notes.append)
    np.savez("x.npz", id=np.array(list("abc")), embeddings=np.eye(3, 4))
    given = ["map", "--input", "x.npz", "--color", "kind", "--table", "kinds.csv", "--overwrite", "--output", "m.csv"]
    (tmp_path / "kinds.csv").write_text("id,kind\na,one\nc,x\nb,two\na,three\n")
    assert run(*given) == "error: kinds.csv:5: id 'a' has another value at kinds.csv:2: remove one of them\n"
    (tmp_path / "kinds.csv").write_text("id,kind\na,one\nc,x\nb,two\n")
    assert run(*given) == "3 sequences: m.csv, m.png\n"
    assert notes == []
    (tmp_path / "kinds.csv").write_text("id,kind\na,one\nother,x\na,one\nother,y\nb,two\n")
    run(*given)
    assert notes == ["kinds.csv has 2 of 3 ids of x.npz: the others have no value"]
    assert [row[3] for row in rows_of(tmp_path / "m.csv")[1:]] == ["one", "two", ""]


def texts_of(path: Path) -> list[str]:
    """Return the texts of an .svg file."""
    return [
        "".join(each.itertext()).strip() for each in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_extension_of_the_plot(
    suffix: str, magic: bytes, run: Run, tmp_path: Path, path: Path, proteins: list[str]
) -> None:
    """The table is beside a plot that `--output` names."""
    output = run("map", "--model", path, "--input", "x.fasta", "--color", "Tax", "--output", f"a{suffix}")
    assert output == f"6 sequences: a.csv, a{suffix}\n"
    assert (tmp_path / f"a{suffix}").read_bytes().startswith(magic)
    assert len(rows_of(tmp_path / "a.csv")) == 7
    output = run("variants", "--model", path, "--sequence", WILD_TYPE, "--scan", "--output", f"s{suffix}")
    assert output == f"20 residues: s.csv, s{suffix}\n"
    assert (tmp_path / f"s{suffix}").read_bytes().startswith(magic)


def test_texts_of_a_map(run: Run, tmp_path: Path, path: Path, model: TrainedModel, proteins: list[str]) -> None:
    """The explained variance is that of scikit-learn; categories have their number of sequences."""
    run("map", "--model", path, "--input", "x.fasta", "--color", "Tax", "--output", "a.svg")
    shares = PCA(2).fit(model.embed(proteins).double().numpy()).explained_variance_ratio_
    labels = {f"PC {number} ({100 * share:.1f} % of the variance)" for number, share in enumerate(shares, 1)}
    assert set(texts_of(tmp_path / "a.svg")) >= labels | {"n = 6", "Tax", "kind 0 (3)", "kind 1 (3)"}
    run("map", "--model", path, "--input", "x.fasta", "--color", "n", "--output", "b.svg")
    assert set(texts_of(tmp_path / "b.svg")) >= {"n = 6", "n"}


def test_long_sequences_of_a_map_are_truncated(
    run: Run, tmp_path: Path, path: Path, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[tuple[object, ...]] = []
    monkeypatch.setattr("bionemo.inference.model.note_long", lambda *details: notes.append(details))
    texts = [WILD_TYPE * 5, WILD_TYPE, WILD_TYPE[:9]]
    (tmp_path / "x.fasta").write_text("".join(f">p{n}\n{text}\n" for n, text in enumerate(texts)))
    run("map", "--model", path, "--input", "x.fasta", "--output", "a.csv")
    assert notes == [("x.fasta: p0", 1, 94, "truncate", "; a maximum length of 102 accepts all (--max-length=102)")]
    assert json.loads((tmp_path / "a.csv.json").read_text())["longer"] == 1
    np.savez("x.npz", id=np.arange(3), embeddings=model.embed([text[:94] for text in texts]))
    run("map", "--input", "x.npz", "--output", "b.csv")
    assert [row[1:] for row in rows_of(tmp_path / "a.csv")] == [row[1:] for row in rows_of(tmp_path / "b.csv")]


@pytest.mark.parametrize("count", [1, 3])
def test_a_map_that_cannot_be_drawn(run: Run, tmp_path: Path, count: int) -> None:
    np.savez(tmp_path / "x.npz", id=np.arange(count), embeddings=np.ones((count, 8)))
    output = run("map", "--input", "x.npz", "--output", "a.csv")
    problem = "there is one point, or all points are equal"
    assert output == f"{count} sequences: a.csv, (there is no a.png: {problem})\n"
    assert [row[1:] for row in rows_of(tmp_path / "a.csv")[1:]] == [["0", "0"]] * count
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.csv", "a.csv.json", "x.npz"]


def test_results_without_matplotlib(
    run: Run, tmp_path: Path, path: Path, proteins: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command writes its table, says why there is no plot, and ends with status 0."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "x.csv").write_text("variant,score\nK2A,1\nA4G,2\n")
    given = ["--sequence", WILD_TYPE]
    for words, table in (
        (["variants", *given, "--scan", "--output", "s.svg"], "s.csv"),
        (["variants", *given, "--variants", "x.csv", "--output", "v.csv"], "v.csv"),
        (["contacts", "--input", "x.fasta", "--output", "out"], "out/p5.csv"),
        (["map", "--input", "x.fasta", "--output", "m.csv"], "m.csv"),
    ):
        output = run(*words, "--model", path)
        assert "(there is no " in output and "a plot requires the extra 'plots' of bionemo" in output
        assert (tmp_path / table).is_file()
    assert not [*tmp_path.rglob("*.png"), *tmp_path.rglob("*.svg")]


def test_variants_that_cannot_be_plotted(run: Run, tmp_path: Path, path: Path) -> None:
    (tmp_path / "x.csv").write_text("variant,score\nK2A,1\nA4G,1\n")
    output = run("variants", "--model", path, "--sequence", WILD_TYPE, "--variants", "x.csv", "--output", "v.csv")
    assert output == (
        "2 variants: v.csv\n"
        "no rank correlation: it needs variants with different values of 'score' and different scores\n"
    )
    assert len(rows_of(tmp_path / "v.csv")) == 3


@pytest.mark.parametrize(("color", "expected"), [("n", [0, 1, 2, 3, 4, 5]), ("Tax", ["kind 0", "kind 1"] * 3)])
def test_anndata(
    color: str, expected: list[Any], run: Run, tmp_path: Path, path: Path, model: TrainedModel, proteins: list[str]
) -> None:
    """The elements of the format; anndata itself reads the file if it is installed."""
    output = run("map", "--model", path, "--input", "x.fasta", "--color", color, "--output", "a.h5ad")
    assert output == "6 sequences: a.h5ad, a.png\n"
    run("map", "--model", path, "--input", "x.fasta", "--output", "b.csv")
    points = [[float(cell) for cell in row[1:3]] for row in rows_of(tmp_path / "b.csv")[1:]]
    with h5py.File(tmp_path / "a.h5ad") as file:
        assert dict(file.attrs) == {"encoding-type": "anndata", "encoding-version": "0.1.0"}
        np.testing.assert_array_equal(file["X"][:], model.embed(proteins))
        np.testing.assert_allclose(file["obsm/X_pca"][:], points, rtol=1e-5)
        assert file["obs"].attrs["column-order"].tolist() == [color]
        assert file["obs/_index"].asstr()[:].tolist() == [f"p{n}" for n in range(6)]
        cells = file["obs"][color]
        assert (cells.asstr() if isinstance(expected[0], str) else cells)[:].tolist() == expected
    anndata = pytest.importorskip("anndata")
    found = anndata.read_h5ad(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(found.X, model.embed(proteins))
    assert found.obs[color].tolist() == expected and found.obs_names.tolist() == [f"p{n}" for n in range(6)]
    np.testing.assert_allclose(found.obsm["X_pca"], points, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "x.fasta"], "x.fasta holds sequences: add MODEL, which embeds them"),
        (["--input", "none", "--method", "umap"], "the method umap (pca needs no package) requires the extra"),
        (["--input", "none"], "none cannot be read"),
        (["--input", "kinds.csv"], "analysis map does not read kinds.csv: give a FASTA file, or embeddings as"),
        (["--input", "x.fasta", "--model", "M", "--color", "Rep"], "x.fasta: no header has Rep=...: name another key"),
        (["--input", "x.fasta", "--model", "M", "--color", "Rep", "--table", "kinds.csv"], "kinds.csv has no column "
         "'Rep', but 'id', 'kind': name one with --color"),
        (["--input", "x.fasta", "--model", "M", "--color", "kind", "--table", "kinds.csv"], "kinds.csv: none of its "
         "ids is in x.fasta: use the same ids in both"),
        (["--input", "x.fasta", "--table", "kinds.csv"], "--table needs --color"),
    ],
)  # fmt: skip
def test_user_errors_of_maps(
    arguments: list[str], message: str, run: Run, tmp_path: Path, path: Path, proteins: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "umap", None)
    (tmp_path / "kinds.csv").write_text("id,kind\nq1,one\n")
    (tmp_path / "few.fasta").write_text(">a\nMK\n")
    found = run(
        "map", "--method", "pca", "--output", "out.csv", *(str(path) if word == "M" else word for word in arguments)
    )
    assert f"error: {message}" in found
    assert sorted(file.name for file in tmp_path.iterdir()) == ["few.fasta", "kinds.csv", "x.fasta"]


def test_contacts_that_cannot_be_predicted(run: Run, tmp_path: Path, path: Path) -> None:
    """The attention does not predict the known contacts: nothing is written, and the command fails."""
    (tmp_path / "x.fasta").write_text(f">a\n{WILD_TYPE}\n")
    (tmp_path / "maps").mkdir()
    n = len(WILD_TYPE)
    known = np.zeros((n, n))
    known[0, 10] = known[10, 0] = 1
    np.save(tmp_path / "maps" / "a.npy", known)
    output = run("contacts-fit", "--model", path, "--input", "x.fasta", "--maps", "maps", "--output", "head.json")
    assert output.startswith(
        "error: none of the model's 8 attention heads predicts the 1 contacts among 105 known pairs"
    )
    assert not (tmp_path / "head.json").exists()


def test_existing_files_are_kept(run: Run, tmp_path: Path, path: Path) -> None:
    """The name of the figure is not on the command line; an existing file of that name is kept as well."""
    (tmp_path / "scan.png").write_text("mine")
    arguments = ["variants", "--model", path, "--sequence", WILD_TYPE, "--scan", "--output", "scan.csv"]
    assert run(*arguments) == "error: scan.png exists: choose another --output, or add --overwrite\n"
    assert [file.name for file in tmp_path.iterdir()] == ["scan.png"]
    assert (tmp_path / "scan.png").read_text() == "mine"
    assert run(*arguments, "--overwrite") == "20 residues: scan.csv, scan.png\n"
    assert run(*arguments) == "error: scan.csv exists: choose another --output, or add --overwrite\n"
    (tmp_path / "x.fasta").write_text(f">a\n{WILD_TYPE}\n")
    scan = ["variants", "--model", path, "--sequence", "x.fasta", "--scan", "--output", "x.fasta", "--overwrite"]
    assert run(*scan) == "error: x.fasta is an input: choose another --output\n"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.csv").write_text("mine")
    output = run("contacts", "--model", path, "--input", "x.fasta", "--output", "out")
    assert output == "error: out/a.csv exists: choose another --output, or add --overwrite\n"
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["a.csv"]


@pytest.mark.parametrize("command_words", [["variants"], ["contacts"], ["map"], ["label", "--head", "h"]])
def test_files_without_records(command_words: list[str], run: Run, tmp_path: Path, path: Path) -> None:
    (tmp_path / "x.fasta").write_text("")
    given = "--variants" if command_words == ["variants"] else "--input"
    output = run(*command_words, "--model", path, given, "x.fasta", "--output", "out.csv")
    assert output.startswith("error: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.fasta"]


def test_invalid_scores(run: Run, tmp_path: Path, path: Path) -> None:
    (tmp_path / "x.csv").write_text("variant,note\nK2A,NA\n")
    output = run("variants", "--model", path, "--sequence", WILD_TYPE, "--variants", "x.csv", "--score-column", "note",
               "--output", "out.csv")  # fmt: skip
    assert output == "error: x.csv: column 'note' has no number: name another with --score-column\n"
    assert not (tmp_path / "out.csv").exists()


def test_help_shows_examples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bionemo.analysis", "--help"])
    with pytest.raises(SystemExit, match="0"):
        command.main()
    assert "bionemo analysis variants esm2.nemo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--output=x", "none"], "none: there is no such checkpoint"), (["model=none"], "none: there is no such"),
        (["--model", "none"], "none: there is no such"), (["a/b=c:best"], "a/b=c: there is no such checkpoint"),
        ([], "required: MODEL"), (["a", "b"], "'a' and 'b': give one MODEL"), (["a", "--model=b"], "omit --model b"),
        (["a", "--other", "b"], "unrecognized arguments: --other"), (["a", "key=b"], "unrecognized arguments: key=b"),
    ],
)  # fmt: skip
def test_the_model_is_a_word_anywhere(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--sequence=MKTAYIAKQR", "--scan", *words, *([] if "--output=x" in words else ["--output=x"])]
    monkeypatch.setattr(sys, "argv", ["bionemo analysis", "variants", *given])
    with pytest.raises(SystemExit):
        command.main()
    assert error in capsys.readouterr().err
