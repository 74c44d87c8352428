# SPDX-License-Identifier: Apache-2.0
"""`bionemo evaluate --suite contacts`: reading of structures, precision, fitted heads, faulty files."""

import gzip
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EsmForMaskedLM

import bionemo
from bionemo.analysis.contacts import fit_contact_head
from bionemo.common.errors import UserError
from bionemo.evaluation.contacts import METRICS, Contacts
from bionemo.evaluation.structures import read_chain
from bionemo.inference.contacts import predict_contacts
from tests.support import evaluation
from tests.support.evaluation import read_section
from tests.support.huggingface import theirs
from tests.support.structures import (
    Modelled,
    atoms_of,
    cif_of,
    modelled,
    pdb_of,
    random_walk,
    to_cif,
    to_pdb,
    write_structures,
)

SEQUENCE = "MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVG"
AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
WALK = random_walk(len(SEQUENCE), 5)
MISSING = (1, 2, 20)


def sequences(count: int, low: int = 40, high: int = 90) -> list[str]:
    generator = random.Random(7)
    return ["".join(generator.choices(AMINO_ACIDS, k=generator.randint(low, high))) for _ in range(count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model with a contact head and attention that distinguishes residues."""
    path = tmp_path_factory.mktemp("model")
    model = theirs(path, layers=3)
    with torch.no_grad():
        for layer in model.esm.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.mul_(12)
        model.esm.contact_head.regression.weight.normal_(0, 3, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def headless(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("headless")
    network = EsmForMaskedLM.from_pretrained(model)
    with torch.no_grad():
        network.esm.contact_head.regression.weight.zero_()
    network.save_pretrained(path)
    return path


arguments = partial(evaluation.arguments, "contacts")
evaluate = partial(evaluation.evaluate, "contacts")


def check_positions(found: Any, missing: tuple[int, ...] = ()) -> None:
    expected = WALK.copy()
    expected[[each - 1 for each in missing]] = np.nan
    np.testing.assert_allclose(found.positions, expected, atol=1e-3)
    assert found.sequence == SEQUENCE


@pytest.mark.parametrize("missing", [(), MISSING])
def test_mmcif_files_have_the_whole_sequence(tmp_path: Path, missing: tuple[int, ...]) -> None:
    (tmp_path / "x.cif").write_text(to_cif(atoms_of(SEQUENCE, WALK, missing=missing), SEQUENCE))
    check_positions(read_chain(tmp_path / "x.cif"), missing)


def test_pdb_files_have_the_observed_residues_or_the_given_sequence(tmp_path: Path) -> None:
    path = tmp_path / "x.pdb"
    path.write_text(to_pdb(atoms_of(SEQUENCE, WALK, missing=MISSING)))
    check_positions(read_chain(path, sequence=SEQUENCE), MISSING)
    observed = read_chain(path)
    keep = [index for index in range(len(SEQUENCE)) if index + 1 not in MISSING]
    assert observed.sequence == "".join(SEQUENCE[index] for index in keep)
    np.testing.assert_allclose(observed.positions, WALK[keep], atol=1e-3)


@pytest.mark.parametrize("suffix", ["pdb", "cif"])
def test_ligands_modified_residues_and_other_chains(tmp_path: Path, suffix: str) -> None:
    """A chain of nucleotides, a protein with selenomethionine and a ligand, and a second protein."""
    nucleotide = [("ATOM", "P", "DA", 1, "N", (0.0, 0.0, 0.0))]
    protein = [(r, a, "MSE" if n == 1 else c, n, ch, p) for r, a, c, n, ch, p in atoms_of(SEQUENCE, WALK)]
    ligand = [("HETATM", "CA", "CA", 400, "A", (1.0, 1.0, 1.0)), ("HETATM", "O", "HOH", 401, "A", (9.0, 9.0, 9.0))]
    other = atoms_of("GGGSGGG", random_walk(7, 1), chain="B")
    atoms = [*nucleotide, *protein, *ligand, *other]
    path = tmp_path / f"x.{suffix}"
    path.write_text(to_pdb(atoms) if suffix == "pdb" else to_cif(atoms, None))
    check_positions(read_chain(path))
    check_positions(read_chain(path, "A" if suffix == "pdb" else "X"))
    assert read_chain(path, "B").sequence == "GGGSGGG"
    with pytest.raises(UserError, match=r"has no protein chain 'N', but (A|X), B: rename the file"):
        read_chain(path, "N")


def test_contacts_are_c_beta_atoms_less_than_8_angstroms_apart(tmp_path: Path) -> None:
    """Four positions on a line, the last of which was not observed; glycine has no C-beta."""
    places = np.array([[0, 0, 0], [7.999, 0, 0], [8.0, 0, 0], [100, 0, 0]])
    (tmp_path / "x.cif").write_text(to_cif(atoms_of("AGAK", places, missing=(4,)), "AGAK"))
    nan = np.nan
    expected = [[1, 1, 0, nan], [1, 1, 1, nan], [0, 1, 1, nan], [nan] * 4]
    np.testing.assert_array_equal(read_chain(tmp_path / "x.cif").contacts(), expected)


def precision_by_definition(predicted: np.ndarray, contacts: np.ndarray, low: int, high: int, count: int) -> float:
    length = len(contacts)
    pairs = [(i, j) for i in range(length) for j in range(i + 1, length) if low <= j - i < high]
    known = [pair for pair in pairs if not np.isnan(contacts[pair])]
    best = sorted(known, key=lambda pair: -predicted[pair])[: max(1, count)]
    return float(np.mean([contacts[pair] for pair in best])) if best else np.nan


def test_precision_equals_that_of_transformers(model: Path, tmp_path: Path) -> None:
    texts = sequences(6)
    walks = write_structures(tmp_path / "data", texts)
    section = evaluate(model, tmp_path / "data", tmp_path / "out")
    reference = EsmForMaskedLM.from_pretrained(model, attn_implementation="eager").eval()
    alphabet = bionemo.load(model, "cpu")
    means: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for number, (text, walk) in enumerate(zip(texts, walks, strict=True)):
        tokens = torch.tensor([[0, *alphabet.ids([text])[0].tolist(), 2]])
        with torch.no_grad():
            predicted = reference.predict_contacts(tokens, torch.ones_like(tokens))[0].numpy()
        contacts = (np.linalg.norm(walk[:, None] - walk[None], axis=-1) < 8).astype(float)
        result = section["results"][number]
        assert (result["task"], result["length"]) == (f"s{number}", len(text))
        for name, (low, high) in {"long": (24, 1000), "medium": (12, 24), "short": (6, 12)}.items():
            for label, divisor in {"P@L": 1, "P@L/2": 2, "P@L/5": 5}.items():
                expected = precision_by_definition(predicted, contacts, low, high, len(text) // divisor)
                assert result["metrics"][f"{name} {label}"] == pytest.approx(expected, abs=1e-4), (name, label)
                means[f"{name} {label}"].append(expected)
    for metric, values in means.items():
        summary = section["summary"][metric]
        assert summary["mean"] == pytest.approx(np.mean(values), abs=1e-4)
        assert summary["error"] == pytest.approx(np.std(values, ddof=1) / 6**0.5, abs=1e-4)
        assert summary["structures"] == 6
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<td>long P@L/5</td>" in page


@pytest.mark.slow
def test_a_head_is_fitted_for_a_model_without_one(headless: Path, tmp_path: Path) -> None:
    """Residues of the same kind are close to each other: attention, which depends on the residues, can tell."""
    data = tmp_path / "data"
    for number, text in enumerate(sequences(10, 60, 90)):
        folder = data / "fit" if number < 8 else data
        folder.mkdir(parents=True, exist_ok=True)
        apart = np.arange(len(text))[:, None] * np.array([20.0, 0, 0])
        positions = np.where(np.isin(list(text), list("ACDEF"))[:, None], -20.0, apart)
        (folder / f"p{number}.cif").write_text(to_cif(atoms_of(text, positions), text))
    one = evaluate(headless, data, tmp_path / "one")
    loaded = bionemo.load(headless, "cpu")
    chains = [read_chain(path) for path in sorted((data / "fit").iterdir())]
    head = fit_contact_head(loaded, [each.sequence for each in chains], [each.contacts() for each in chains])
    for result in one["results"]:
        chain = read_chain(data / f"{result['task']}.cif")
        predicted = predict_contacts(loaded, chain.sequence, head)
        contacts, length = chain.contacts(), len(chain.sequence)
        expected = precision_by_definition(predicted, contacts, 24, 1000, length // 5)
        assert result["metrics"]["long P@L/5"] == pytest.approx(expected)
        assert expected > 2 * contacts[np.triu_indices(length, 24)].mean()
    command = [sys.executable, "-m", "bionemo.cli", "evaluate"]
    subprocess.run([*command, *arguments(headless, data, tmp_path / "two", "--devices=2")], check=True)
    two = read_section(tmp_path / "two")
    assert [each["metrics"] for each in one["results"]] == [each["metrics"] for each in two["results"]]
    assert one["checksum"] == two["checksum"]


def test_a_model_without_head_needs_structures_to_fit(
    headless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_structures(tmp_path / "data", sequences(1))
    with pytest.raises(SystemExit):
        evaluate(headless, tmp_path / "data", tmp_path / "out")
    assert "has no contact head: put about 20 structures" in capsys.readouterr().err


def test_the_sequences_of_a_fasta_file_are_used(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "1abc_B.pdb").write_text(to_pdb([*atoms_of("GGGSGGG", random_walk(7, 1), chain="A"),
                                            *atoms_of(SEQUENCE, WALK, chain="B", missing=MISSING)]))  # fmt: skip
    (data / "sequences.fasta").write_text(f">1abc_B\n{SEQUENCE}\n")
    assert evaluate(model, data, tmp_path / "out")["results"][0]["length"] == len(SEQUENCE)
    (data / "sequences.fasta").write_text(f">1abc_B\n{SEQUENCE}\n>2abc_A\nMK\n")
    with pytest.raises(UserError, match=r"sequences.fasta: there is no structure named 2abc_A: rename or remove it"):
        Contacts(data).tasks()


def test_c_alpha_traces_are_left_out_and_named(
    model: Path, headless: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were scored on their glycines."""
    data, atoms = tmp_path / "data", atoms_of(SEQUENCE, WALK)
    write_structures(data, sequences(2))
    (data / "trace.pdb").write_text(to_pdb([atom for atom in atoms if atom[1] == "CA"]))
    (data / "notes.txt").write_text("")
    section = evaluate(model, data, tmp_path / "out")
    output = capsys.readouterr()
    assert re.search(r"contacts: 2 tasks, 1 left out \(\S+trace.pdb has no C-beta atoms", output.out)
    assert re.search(r"note: .*: files that are no structures are left out \(1\): notes.txt", output.err)
    assert section["summary"]["long P@L"]["structures"] == 2
    assert (section["failed"], len(section["left_out"])) == ([], 1)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 tasks and 0 faulty rows were left out" in page
    assert "trace.pdb has no C-beta atoms" in page
    (data / "fit").mkdir()
    (data / "trace.pdb").rename(data / "fit" / "trace.pdb")
    with pytest.raises(SystemExit):
        evaluate(headless, data, tmp_path / "fitted")
    assert re.search(r"error: \S+trace.pdb has no C-beta atoms .*: remove it\n", capsys.readouterr().err)


def test_files_in_two_formats_give_the_same_precision(model: Path, tmp_path: Path) -> None:
    """A PDB file with SEQRES, an unobserved loop, a free amino acid and other numbers, and its mmCIF file."""
    names = [*SEQUENCE]
    residues = [each for each in modelled(names) if not 20 < (each.label or 0) < 27]
    ligand = [Modelled("GLU", 301, 500, None, "HETATM")]
    results = []
    for name, text in {
        "x.pdb": pdb_of(residues, ligand, sequence=names),
        "y.cif": cif_of(residues + ligand, names),
    }.items():
        (tmp_path / name[0]).mkdir()
        (tmp_path / name[0] / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        results += evaluate(model, tmp_path / name[0], tmp_path / f"{name}-out")["results"]
    assert results[0]["task"] == "x"
    assert results[0]["length"] == results[1]["length"] == len(SEQUENCE)
    assert results[0]["metrics"] == results[1]["metrics"]


FAULTY = {
    "empty.cif": ("", r"empty.cif is not a valid structure file"),
    "binary.cif": ("\x00\x01loop_\n_atom_site.x\n", r"binary.cif is not a valid structure file"),
    "empty.pdb": ("", r"empty.pdb (is not a valid structure file|has no residues of a protein)"),
    "water.pdb": (to_pdb([("HETATM", "O", "HOH", 1, "A", (0.0, 0.0, 0.0))]), "has no residues of a protein: remove"),
    "1abc_C.pdb": (to_pdb(atoms_of(SEQUENCE, WALK)), "has no protein chain 'C', but A: rename the file"),
    "other.cif": (to_cif(atoms_of(SEQUENCE, WALK), "W" + SEQUENCE[1:]),
                  r"other.cif, chain X: residue 1 is M, but W in the sequence"),
    "short.cif": (to_cif(atoms_of(SEQUENCE, WALK), SEQUENCE[:-1]),
                  r"short.cif, chain X: residue 41 is not in the sequence of 40 residues"),
    "long.pdb": (to_pdb(atoms_of("MA" * 60, random_walk(120, 0))),
                 r"long.pdb has 120 residues, but the model accepts at most 94"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTY)
def test_faulty_structures(name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, message = FAULTY[name]
    data = tmp_path / "data"
    write_structures(data, sequences(2))
    (data / name).write_text(text)
    with pytest.raises(SystemExit):
        evaluate(model, data, tmp_path / "stops")
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert name in error
    section = evaluate(model, data, tmp_path / "goes", "--keep-going")
    assert section["failed"] == [Path(name).stem]
    assert section["summary"]["long P@L"]["structures"] == 2
    (failed,) = (each for each in section["results"] if "error" in each)
    assert failed["error"] in error
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f">s0\n{SEQUENCE}\n>s0\n{SEQUENCE}M\n",
            r"sequences.fasta has several sequences named s0: remove all but one",
        ),
        (f">s0.cif\n{SEQUENCE}\n", r"there is no structure named s0.cif: rename or remove it"),
        (gzip.compress(b">s0\nM\n", mtime=0), r"sequences.fasta.gz is compressed"),
    ],
)
def test_sequences_that_cannot_be_used(text: str | bytes, message: str, tmp_path: Path) -> None:
    write_structures(tmp_path, [SEQUENCE])
    if isinstance(text, bytes):
        (tmp_path / "sequences.fasta.gz").write_bytes(text)
    else:
        (tmp_path / "sequences.fasta").write_text(text)
    with pytest.raises(UserError, match=message):
        Contacts(tmp_path).tasks()


def test_gaps_and_folders_are_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a sequence, residues that were not observed do not count; each structure with such a gap is named."""
    data = tmp_path / "data"
    write_structures(data, [SEQUENCE])
    atoms = atoms_of(SEQUENCE, WALK, missing=range(10, 16))
    (data / "gap.pdb").write_text(to_pdb(atoms))
    (data / "full.cif").write_text(to_cif(atoms, SEQUENCE))
    (data / "more").mkdir()
    section = evaluate(model, data, tmp_path / "out")
    assert section["summary"]["gaps"] == ["gap"]
    output = capsys.readouterr()
    assert "files that are no structures are left out (1): more" in output.err
    assert "structures with gaps but no sequence, which make |i-j| too small (1): gap: give the seq" in output.out


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no structures: put files \*.cif, \*.mmcif, \*.pdb, \*.ent there"):
        Contacts(tmp_path).tasks()
    for name in ("a.cif", "a.pdb"):
        (tmp_path / name).write_text("")
    with pytest.raises(UserError, match="has several structures named a: remove all but one"):
        Contacts(tmp_path).tasks()
    (tmp_path / "a.cif").unlink()
    (tmp_path / "a b.pdb").write_text("")
    with pytest.raises(UserError, match="its name is not a file name of letters"):
        Contacts(tmp_path).tasks()


@pytest.mark.slow
def test_damaged_files_are_errors_of_one_line(tmp_path: Path) -> None:
    """Random changes of bytes give a chain or a UserError, never another exception."""
    generator = random.Random(0)
    originals = {"cif": to_cif(atoms_of(SEQUENCE, WALK), SEQUENCE), "pdb": to_pdb(atoms_of(SEQUENCE, WALK))}
    outcomes = {"read": 0, "refused": 0}
    for number in range(600):
        suffix = ("cif", "pdb")[number % 2]
        data = bytearray(originals[suffix].encode())
        for _ in range(generator.choice([1, 5, 50])):
            match generator.randrange(3):
                case 0:
                    data[generator.randrange(len(data))] = generator.randrange(256)
                case 1:
                    del data[(at := generator.randrange(len(data))) : at + generator.randrange(100)]
                case _:
                    at = generator.randrange(len(data))
                    data[at:at] = generator.choice([b"loop_\n", b"\n", b"99999999999", b"'", b"_atom_site.id"])
        path = tmp_path / f"x.{suffix}"
        path.write_bytes(data)
        try:
            chain = read_chain(path)
        except UserError as error:
            assert "\n" not in str(error)
            outcomes["refused"] += 1
        else:
            assert chain.positions.shape == (len(chain.sequence), 3)
            outcomes["read"] += 1
    assert min(outcomes.values()) > 20, outcomes
