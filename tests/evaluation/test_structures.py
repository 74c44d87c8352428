# SPDX-License-Identifier: Apache-2.0
"""Reading of structures: letters, conformers, ligands, numbering, formats, and files of other programs."""

import gzip
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.evaluation.components import letter_of
from bionemo.evaluation.contacts import Contacts, _chain_of
from bionemo.evaluation.structures import Chain, read_chain
from tests.support.structures import THREE, Modelled, cif_of, modelled, pdb_of, without_ter

SEQUENCE = "GQQLSHSTGTTIAANWQDFIICQQYRCMVSENAFDEARGVMPSFGCSI"
STANDARD = modelled(SEQUENCE)
GLU = Modelled("GLU", 301, 500, None, "HETATM")


def read(folder: Path, text: str | bytes, name: str = "x.pdb", **named: Any) -> Chain:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_chain(path, **named)


def positions(residues: Sequence[Modelled], length: int) -> np.ndarray:
    """Return the positions of C-beta, C-alpha of glycine, of residues with labels."""
    found = np.full((length, 3), np.nan)
    for each in residues:
        atoms = each.positions()
        found[(each.label or 0) - 1] = atoms.get("CA" if each.name == "GLY" else "CB", np.nan)
    return found


def check(chain: Chain, sequence: str, expected: np.ndarray) -> None:
    assert chain.sequence == sequence
    np.testing.assert_allclose(chain.positions, expected, atol=1e-3)


def both(folder: Path, residues: list[Modelled], names: Sequence[str], ligands: Sequence[Modelled] = ()) -> Chain:
    """Return the chain of the PDB and the mmCIF file of a structure, which must be equal."""
    pdb = read(folder, pdb_of(residues, ligands, sequence=names))
    cif = read(folder, cif_of([*residues, *ligands], names), "x.cif")
    check(pdb, cif.sequence, cif.positions)
    np.testing.assert_array_equal(pdb.contacts(), cif.contacts())
    return cif


def test_each_component_has_the_letter_of_the_dictionary() -> None:
    """One letter for a component with one letter in the dictionary of wwPDB, X for others, such as chromophores."""
    from biotite.structure.info.ccd import get_ccd

    table = get_ccd()["chem_comp"]
    columns = (table[key].as_array(str) for key in ("id", "type", "one_letter_code"))
    peptides = [
        (name, letter) for name, kind, letter in zip(*columns, strict=True) if "PEPTIDE LINKING" in kind.upper()
    ]
    assert len(peptides) > 1500
    force_fields = {"HSE", "GLH"}  # in the dictionary homoserine and another glutamine
    known = {name: letter_of(name) for name, _ in peptides if name not in force_fields}
    wrong = {name: known[name] for name, letter in peptides if name in known
             and known[name] != (letter if len(letter) == 1 and letter.isalpha() else "X")}  # fmt: skip
    assert set(wrong) <= {"0TD", "TOX", "PCA"}, wrong  # parents that gemmi knows, or that were revised


@pytest.mark.parametrize(
    ("names", "letters"),
    [
        (["ALA", "CRO", "GLY"], "AXG"), (["ASP", "SUI", "LYS"], "DXK"), (["MSE", "BP5", "SEP"], "M?S"),
        (["HSD", "HSE", "HSP", "HID", "HIE", "HIP", "CYX", "ASH", "GLH", "LYN"], "HHHHHHCDEK"),
        (["SEC", "PYL", "UNK", "DAL"], "UOXA"), (["ALA", "QQQ", "LYS"], "AXK"),
    ],
)  # fmt: skip
def test_one_letter_for_each_residue(names: list[str], letters: str, tmp_path: Path) -> None:
    residues = modelled(names)
    for text in (pdb_of(residues), without_ter(pdb_of(residues)), pdb_of(residues, sequence=names)):
        found = read(tmp_path, text)
        assert len(found.sequence) == len(names)
        assert all(b in (a, "?") for a, b in zip(found.sequence, letters, strict=True)), found.sequence
        np.testing.assert_allclose(found.positions, positions(residues, len(names)), atol=1e-3)
    assert both(tmp_path, residues, names).sequence == found.sequence


def test_names_of_four_characters(tmp_path: Path) -> None:
    """GROMACS writes LYSH in the columns 18 to 21; the last is not part of the name of the chain."""
    residues = modelled("AKDH")
    text = pdb_of(residues).replace("LYS A", "LYSHA").replace("HIS A", "HISBA")
    check(read(tmp_path, text), "AKDH", positions(residues, 4))
    two = "".join(
        line[:20] + "HA" + line[22:] if line[:4] == "ATOM" else line for line in pdb_of(residues).splitlines(True)
    )
    assert read(tmp_path, two, chain="HA").sequence == "AKDH"


@pytest.mark.parametrize("names", [("A", "B"), ("1", "2")])
@pytest.mark.parametrize(("occupancies", "chosen"), [((0.5, 0.5), 0), ((0.6, 0.4), 0), ((0.3, 0.7), 1)])
@pytest.mark.parametrize("types", [("SER", "SER"), ("SER", "THR"), ("GLY", "ALA")])
def test_one_conformer_of_each_residue(
    types: tuple[str, str], occupancies: tuple[float, float], chosen: int, names: tuple[str, str], tmp_path: Path
) -> None:
    forms = [
        Modelled(*each, 3, place, 3, altloc=name, occupancy=occupancy)  # type: ignore[misc]
        for each, place, name, occupancy in zip([[types[0]], [types[1]]], (2, 2.2), names, occupancies, strict=True)
    ]
    residues = [*modelled("AC"), *forms, *modelled("DE", 4, 3)]
    expected = positions([*modelled("AC"), forms[chosen], *modelled("DE", 4, 3)], 5)
    letter = {"SER": "S", "THR": "T", "GLY": "G", "ALA": "A"}[types[chosen]]
    check(read(tmp_path, pdb_of(residues)), f"AC{letter}DE", expected)
    full = ["ALA", "CYS", types[0], "ASP", "GLU"]
    check(both(tmp_path, residues, full), "AC" + {"SER": "S", "GLY": "G"}[types[0]] + "DE", expected)


PEPTIDE = modelled("AGK", 401, 700, label=None, record="HETATM")
CAP = Modelled("NH2", 49, 48, None, "HETATM", atoms=("N",))
CALCIUM = Modelled("CA", 302, 600, None, "HETATM", atoms=("CA",))


@pytest.mark.parametrize("ligands", [[GLU], PEPTIDE, [CAP], [CALCIUM], [GLU, CAP, *PEPTIDE, CALCIUM]])
def test_ligands_are_no_residues(ligands: list[Modelled], tmp_path: Path) -> None:
    expected = positions(STANDARD, len(SEQUENCE))
    check(both(tmp_path, STANDARD, SEQUENCE, ligands), SEQUENCE, expected)
    check(read(tmp_path, pdb_of(STANDARD, ligands)), SEQUENCE, expected)
    check(read(tmp_path, without_ter(pdb_of(STANDARD, ligands))), SEQUENCE, expected)
    check(read(tmp_path, pdb_of([*STANDARD, *ligands])), SEQUENCE, expected)  # TER behind them, as Biopython writes it
    check(read(tmp_path, cif_of([*STANDARD, *ligands]), "x.cif"), SEQUENCE, expected)
    written = [replace(each, record="ATOM") for each in ligands]
    check(read(tmp_path, pdb_of(STANDARD, written)), SEQUENCE, expected)


def test_an_unobserved_residue_has_no_position_from_a_ligand(tmp_path: Path) -> None:
    """A free amino acid, the first residue without label_seq_id, is of the type of residue 1."""
    names = ["GLU", *SEQUENCE[1:]]
    found = both(tmp_path, STANDARD[1:], names, [GLU])
    check(found, "E" + SEQUENCE[1:], positions(STANDARD[1:], len(SEQUENCE)))


HET = {"record": "HETATM"}


@pytest.mark.parametrize(
    ("parts", "sequence"),
    [
        ([modelled("ACD"), modelled("EFG", 8, 30)], "ACDEFG"),  # TER at a break
        ([[*modelled("AC"), *modelled("M", 3, 2, **HET), *modelled("DE", 4, 3)]], "ACMDE"),  # MET as HETATM
        ([[*modelled("ACD"), *modelled(["MSE", "MSE"], 20, 40, **HET)]], "ACDMM"),  # modified, behind a break
        ([[*modelled("ACD"), *modelled(["MSE"], 8, 15, **HET), *modelled("EF", 15, 30)]], "ACDMEF"),  # between breaks
        ([modelled(["DAL", "DLY", "DPR"], **HET)], "AKP"),
        ([[*modelled("ACD", -1), *modelled("EF", 101, 3)]], "ACDEF"),  # jump of the numbers, no break
        ([[*modelled("ACD", 220), *modelled("KK", 1001, 50), *modelled("EF", 260, 90)]], "ACDKKEF"),  # fusion protein
        ([[*modelled("ACDE", chain=" "), *modelled("GGKKLL", 1, 90, chain=" ")]], "ACDE"),  # two molecules
        ([modelled("ACDE", chain=" "), modelled("GGK", 1, 90, chain=" ")], "ACDE"),
    ],
)
def test_residues_of_the_polymer(parts: list[list[Modelled]], sequence: str, tmp_path: Path) -> None:
    observed = np.array([list(each.positions().get("CB", each.positions()["CA"])) for part in parts for each in part])
    for text in (pdb_of(*parts), without_ter(pdb_of(*parts)), pdb_of(*parts).replace("TER\nEND", "END")):
        check(read(tmp_path, text), sequence, observed[: len(sequence)])
    rewritten = cif_of([each for part in parts for each in part if each.chain != " "])
    if "HETATM" in rewritten:  # without the labels of HETATM records, as Biopython writes them
        rewritten = cif_of([replace(each, label=None if each.record == "HETATM" else each.label) for each in parts[0]])
    if parts[0][0].chain != " ":
        check(read(tmp_path, rewritten, "x.cif"), sequence, observed)


def test_segments_name_chains_without_name(tmp_path: Path) -> None:
    """CHARMM leaves the name of the chain blank and writes the segment to the columns 73 to 76."""
    lines = pdb_of(modelled("ACD", chain=" "), modelled("EFGK", 1, 30, chain=" ")).splitlines()
    text = "\n".join(line[:72] + ("PROA" if number < 16 else "PROB") + line[76:] for number, line in enumerate(lines))
    assert read(tmp_path, text).sequence == "ACD"
    assert read(tmp_path, text, chain="PROB").sequence == "EFGK"
    with pytest.raises(UserError, match="no protein chain 'A', but PROA, PROB"):
        read(tmp_path, text, chain="A")


ENDS = [modelled("ACDEFG", chain=" ")]
ENDS += [[*ENDS[0][:-1], replace(ENDS[0][-1], atoms=("N", "CA", "C", "CB", name))] for name in ("OXT", "OT2", "OC2")]
ENDS += [[*ENDS[0], Modelled("NME", 7, 6, chain=" ", atoms=("N",))]]


@pytest.mark.parametrize("number", [8, 101])
@pytest.mark.parametrize("end", range(5))
def test_chains_without_name_end_at_a_terminus(end: int, number: int, tmp_path: Path) -> None:
    """MD programs leave out the name of a chain and TER, and continue the numbers in the next one."""
    second = modelled("ACDEFG", number, 60, chain=" ")
    if end == 0:
        second.insert(0, Modelled("ACE", number - 1, 59, chain=" ", atoms=("C", "O")))
    text = pdb_of(ENDS[end], second)
    for written in (text, without_ter(text)):
        assert read(tmp_path, written).sequence == "ACDEFG"
    named = [replace(each, chain="A") for each in (*ENDS[end], *modelled("ACDEFG", number, 60))]
    assert read(tmp_path, pdb_of(named)).sequence == "ACDEFG" * 2  # an unobserved loop


def test_the_files_of_a_structure_in_two_formats_are_equal(tmp_path: Path) -> None:
    """Random sequences, unobserved stretches, offsets of the numbers, insertion codes, modified residues."""
    random.seed(1)
    for _ in range(60):
        names = random.choices([*"ACDEFGHIKLMNPQRSTVWY", "MSE", "CSO", "CRO", "UNK"], k=random.randint(40, 90))
        offset, residues, number = random.randint(-20, 300), [], 0
        for label, name in enumerate(names, 1):
            inserted = residues and random.random() < 0.05 and residues[-1].label == label - 1
            number = residues[-1].number if inserted else max(label + offset, number + 1)
            code = chr(ord(residues[-1].insertion.replace(" ", "@")) + 1) if inserted else " "
            record = "ATOM" if len(name) == 1 else "HETATM"
            residues += modelled([name], number, label, label=label, insertion=code, record=record)
        for _ in range(3):
            first = random.randrange(len(residues) - 8)
            del residues[first : first + random.randint(1, 5)]
        found = both(tmp_path, residues, names, [GLU])
        letters = [name if len(name) == 1 else {"MSE": "M", "CSO": "C"}.get(name, "X") for name in names]
        check(found, "".join(letters), positions(residues, len(names)))


LOOP = [*STANDARD[:20], *STANDARD[34:]]


def test_unobserved_residues_count(tmp_path: Path) -> None:
    """|i - j| is counted in the sequence: SEQRES, whatever the numbers are, or a given one."""
    expected = positions(LOOP, len(SEQUENCE))
    check(both(tmp_path, LOOP, SEQUENCE), SEQUENCE, expected)
    consecutive = [replace(each, number=number) for number, each in enumerate(LOOP, 101)]
    check(both(tmp_path, consecutive, SEQUENCE), SEQUENCE, expected)
    for residues in (LOOP, consecutive):
        check(read(tmp_path, pdb_of(residues), sequence=SEQUENCE), SEQUENCE, expected)
        check(read(tmp_path, cif_of(residues), "x.cif", sequence=SEQUENCE.lower()), SEQUENCE, expected)
    tagged = "MHHHHHH" + SEQUENCE
    check(read(tmp_path, cif_of(LOOP, SEQUENCE), "x.cif", sequence=tagged), tagged,
          np.concatenate([np.full((7, 3), np.nan), expected]))  # fmt: skip


SCHEME = "loop_\n" + "".join(f"_pdbx_poly_seq_scheme.{key}\n" for key in ("asym_id", "entity_id", "seq_id", "mon_id"))
SCHEME += "".join(f"A 1 {number} {THREE[letter]}\n" for number, letter in enumerate(SEQUENCE, 1)) + "#\n"
LETTERS = f"_entity_poly.entity_id 1\n_entity_poly.pdbx_seq_one_letter_code\n;{SEQUENCE[:30]}\n{SEQUENCE[30:]}\n;\n"


@pytest.mark.parametrize("table", [SCHEME, LETTERS, "_entity_poly_seq"])
@pytest.mark.parametrize("asym", ["", "_struct_asym.id A\n_struct_asym.entity_id 1\n", "1"])
def test_tables_of_a_sequence(table: str, asym: str, tmp_path: Path) -> None:
    """Programs write one of three tables, and may leave the entity of the atoms out."""
    text = cif_of(LOOP, SEQUENCE if table == "_entity_poly_seq" else ())
    text = text if table == "_entity_poly_seq" else text.replace("loop_", f"{table}loop_", 1)
    if asym != "1":
        text = text.replace(" A 1 ", " A ? ").replace("loop_", f"{asym}loop_", 1)
    check(read(tmp_path, text, "x.cif"), SEQUENCE, positions(LOOP, len(SEQUENCE)))


@pytest.mark.parametrize("letters", ["?", f"'{SEQUENCE[:20]}---'", f"{SEQUENCE}J"])
def test_letters_that_are_no_sequence_are_not_read(letters: str, tmp_path: Path) -> None:
    table = f"_entity_poly.entity_id 1\n_entity_poly.pdbx_seq_one_letter_code {letters}\n"
    chain = read(tmp_path, cif_of(LOOP).replace("loop_", f"{table}loop_", 1), "x.cif")
    assert (len(chain.sequence), chain.gaps) == (len(LOOP), 1)


def test_seqres_without_the_name_of_the_chain(tmp_path: Path) -> None:
    text = re.sub(r"^(SEQRES .{4})A", r"\1 ", pdb_of(LOOP, sequence=SEQUENCE), flags=re.MULTILINE)
    check(read(tmp_path, text), SEQUENCE, positions(LOOP, len(SEQUENCE)))


def test_gaps_are_counted_if_no_sequence_is_known(tmp_path: Path) -> None:
    assert read(tmp_path, pdb_of(LOOP)).gaps == 1
    assert read(tmp_path, pdb_of(LOOP, sequence=SEQUENCE)).gaps == 0
    assert read(tmp_path, pdb_of([*modelled("ACD", -1), *modelled("EF", 101, 3)])).gaps == 0  # bonded


def test_a_given_sequence_has_letters_only(tmp_path: Path) -> None:
    check(read(tmp_path, pdb_of(LOOP), sequence=f"{SEQUENCE[:9]} {SEQUENCE[9:]}*\n"), SEQUENCE, positions(LOOP, 48))
    for given in (f"{SEQUENCE}:{SEQUENCE}", f"{SEQUENCE[:25]}-{SEQUENCE[25:]}"):
        with pytest.raises(UserError, match=r"x.pdb: the given sequence contains '[:-]': give the let"):
            read(tmp_path, pdb_of(LOOP), sequence=given)


def test_insertion_codes(tmp_path: Path) -> None:
    numbers = [(min(label, 18) if label < 21 else label - 2, " AB"[max(label - 18, 0)] if label < 21 else " ")
               for label in range(1, 49)]  # fmt: skip
    residues = [
        replace(each, number=number, insertion=code) for each, (number, code) in zip(STANDARD, numbers, strict=True)
    ]
    expected = positions(residues, len(SEQUENCE))
    check(both(tmp_path, residues, SEQUENCE), SEQUENCE, expected)
    check(read(tmp_path, pdb_of(residues), sequence=SEQUENCE), SEQUENCE, expected)
    check(read(tmp_path, pdb_of(residues)), SEQUENCE, expected)
    more = [*residues[:20], *modelled("DD", 18, 19.3, insertion="C"), *residues[20:]]
    with pytest.raises(
        UserError, match=r"x.pdb, chain A: residue 1\d\w? is \w, but \w in the sequence.*correct the given"
    ):
        read(tmp_path, pdb_of(more), sequence=SEQUENCE)


def test_a_chromophore_has_one_residue_or_three(tmp_path: Path) -> None:
    residues = [*modelled("ACDEF"), *modelled(["CRO"], 7, 5, label=6, record="HETATM"), *modelled("KLMN", 9, 6)]
    residues = [replace(each, label=number) for number, each in enumerate(residues, 1)]
    names = [*"ACDEF", "CRO", *"KLMN"]
    check(both(tmp_path, residues, names), "ACDEFXKLMN", positions(residues, 10))
    gene = [replace(each, label=each.number) for each in residues]
    check(read(tmp_path, pdb_of(residues), sequence="ACDEFTYGKLMN"), "ACDEFTYGKLMN", positions(gene, 12))


def test_repeats_need_numbers(tmp_path: Path) -> None:
    """A stretch that fits a sequence at several places is placed by REMARK 465 or DBREF, otherwise refused."""
    names = "SGELPEKSKLQ" * 4
    observed = [replace(each, number=each.number - 15) for each in modelled(names)[23:35]]
    for header in (
        "REMARK 465     SER A   -14",
        "DBREF  1ABC A  -14    29  UNP    Q9H2X3   CLC4M_HUMAN    101    144",
    ):
        found = read(tmp_path, pdb_of(observed, sequence=names, header=header))
        check(found, names, positions(observed, 44))
    with pytest.raises(UserError, match="fit the sequence at 3 positions: correct the file, or give the sequence"):
        read(tmp_path, pdb_of(observed, sequence=names))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (pdb_of(STANDARD, sequence=SEQUENCE[:20]), "chain A: residue 21 is not in the sequence of 20 residues: corr"),
        (pdb_of(STANDARD, sequence=SEQUENCE.replace("W", "Y")), r"residue 16 is W, but Y in the sequence \(posit"),
        (pdb_of(modelled("A" * 48), sequence=SEQUENCE), r"residue \d+ is A, but \w in the sequence"),
        (pdb_of(STANDARD).replace(" 16      -", " 16     **"), r"line \d+ has no coordinates in columns 31 to 54"),
        (pdb_of(STANDARD)[:2960], "is not a valid structure file"),
        ("<!DOCTYPE html><p>ATOM</p>", "neither a CIF data block nor ATOM records"),
        ("data_x\n_cell.length_a 3\n", "it has no table _atom_site"),
        (" " * 100_000, "it is empty"),
        (gzip.compress(pdb_of(STANDARD).encode(), mtime=0)[:500], "is not a valid structure file"),
        (b"\x83\xa3abc" + bytes(range(255)), "is not a valid structure file"),
        (pdb_of(modelled(["DA", "DC"], atoms=("N", "C"))), "has no residues of a protein: remove the file"),
    ],
)  # fmt: skip
def test_errors_name_file_record_and_remedy(text: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as error:
        read(tmp_path, text)
    assert str(tmp_path / "x.pdb") in str(error.value)
    assert "\n" not in str(error.value)


def test_authors_name_chains(tmp_path: Path) -> None:
    """The label_asym_id is not the name of the chain; the error says so."""
    text = cif_of(modelled("ACD", chain="AAA"), "ACD").replace(" AAA 1 ", " B 1 ")
    assert read(tmp_path, text, "x.cif", chain="AAA").sequence == "ACD"
    with pytest.raises(
        UserError, match=r"no protein chain 'B', but AAA: rename the file \(B is the label_asym_id of chain AAA"
    ):
        read(tmp_path, text, "x.cif", chain="B")


def test_formats(tmp_path: Path) -> None:
    """The content decides: compressed or not, PDB, mmCIF or BinaryCIF."""
    from biotite.structure.io.pdbx import BinaryCIFFile, CIFFile, get_structure, set_structure

    expected = read(tmp_path, cif_of(STANDARD, SEQUENCE), "x.cif")
    model = "MODEL        1\n{}ENDMDL\nMODEL        1\n{}ENDMDL\n"
    atoms = pdb_of(STANDARD).replace("END\n", "")
    moved = pdb_of([replace(each, place=each.place + 9) for each in STANDARD]).replace("END\n", "")
    plain, mmcif = pdb_of(STANDARD), cif_of(STANDARD, SEQUENCE)
    texts = {"x.pdb": plain, "y.PDB": mmcif, "x.cif": plain, "x.mmcif": f"# comment\n\n{mmcif}",
             "x.ent": plain.replace("\n", "\r\n"), "mac.ent": plain.replace("\n", "\r"),
             "z.pdb": model.format(atoms, moved),
             "old.ent": plain.replace(f"{'':10} N\n", "      1ABC  90\n")}  # fmt: skip
    for name, text in texts.items():
        check(read(tmp_path, text, name), SEQUENCE, expected.positions)
        check(read(tmp_path, gzip.compress(text.encode()), f"{name}.gz"), SEQUENCE, expected.positions)
    (tmp_path / "x.cif").write_text(cif_of(STANDARD, SEQUENCE))
    binary = BinaryCIFFile()
    set_structure(binary, get_structure(CIFFile.read(tmp_path / "x.cif"), model=1))
    binary.write(tmp_path / "x.bcif")
    check(read_chain(tmp_path / "x.bcif"), SEQUENCE, expected.positions)
    check(read(tmp_path, gzip.compress((tmp_path / "x.bcif").read_bytes()), "y.bcif.gz"), SEQUENCE, expected.positions)


@pytest.mark.parametrize(
    ("name", "task", "chain"),
    [
        ("1abc.cif.gz", "1abc", None), ("1abc_B.pdb", "1abc_B", "B"), ("pdb1abc.ent.gz", "pdb1abc", None),
        ("pdb_00001abc.cif", "pdb_00001abc", None), ("pdb_00001abc_AB.bcif.gz", "pdb_00001abc_AB", "AB"),
        ("AF-P12345-F1-model_v4.cif", "AF-P12345-F1-model_v4", None), ("1abc_final.pdb", "1abc_final", None),
        ("1ABC_x.PDB.GZ", "1ABC_x", "x"), ("d1abca_.ent", "d1abca_", None),
    ],
)  # fmt: skip
def test_names_of_files(name: str, task: str, chain: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    (found,) = Contacts(tmp_path).tasks()
    assert (found.name, _chain_of(found.path)) == (task, chain)
