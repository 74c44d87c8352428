# SPDX-License-Identifier: Apache-2.0
"""Residues of a protein chain in an mmCIF, BinaryCIF or PDB file, which gemmi parses.

The residues of an entity in `entity_poly_seq` have a `label_seq_id`. In other files, the residues of a polymer are
found among the ATOM and HETATM records of a chain, see `_select_polymer`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from bionemo.common.errors import UserError, optional_dependency
from bionemo.evaluation.components import ends_molecule, is_amino_acid, is_anchor, is_modified, letter_of

if TYPE_CHECKING:
    import gemmi

    Site = list[gemmi.Residue]  # residue types that were modelled at one place, usually one

SUFFIXES = tuple(end + zipped for end in (".cif", ".mmcif", ".bcif", ".pdb", ".ent") for zipped in ("", ".gz"))
NAMELESS = "without name"  # for a chain in a message
_PEPTIDE_BOND, _CA_DISTANCE = 2.0, 4.5  # angstroms: longest between C and N, and C-alpha atoms, of linked residues
_FIRST_CAP = "ACE"  # of the N-terminus
_MAX_GAP = 30  # residues at a TER within a chain, for chains of fewer residues
_FOUR_CHARACTERS = np.array(
    ["ARGN", "ASPH", "ASPP", "CYS1", "CYS2", "CYSH", "GLUH", "GLUP", "HIS1", "HIS2", "HISA", "HISB", "HISD", "HISE",
     "HISH", "HISP", "LYSH", "LYSN"], "S4",
)  # fmt: skip
# chain and number of a residue that was not observed, and of the first residue that is in a database
_START = re.compile(rb"^(?:REMARK 465 +(?:\d+ +)?\w+|DBREF1? +.{4}) ([!-~]) +(-?\d+)", re.MULTILINE)
_POLYMER = re.compile(r"(?:[A-IK-Za-ik-z]|\(\w+\))+")  # letters, J is none, and names of components in parentheses
_ASCII = bytes(range(128)) + b"?" * 128  # gemmi raises errors for names that are not UTF-8
_DIGITS = np.frombuffer(b"0123456789-+. ", np.uint8)


@dataclass(frozen=True)
class Residue:
    """An observed residue.

    Attributes:
        number: position in the sequence of the file, from 1; in files without, the number that the authors gave.
        insertion: insertion code, or an empty string.
        letters: letter of the residue, followed by those of other residue types at the same place.
        position: coordinates of C-beta, of C-alpha for glycine, in angstroms; nan if they are not in the file.
        linked: whether it is bonded to the previous observed residue.
    """

    number: int
    insertion: str
    letters: str
    position: Sequence[float]
    linked: bool


@dataclass(frozen=True)
class Polymer:
    """A protein chain of a file.

    Attributes:
        name: name that the authors gave to the chain.
        residues: the observed residues, in the order of the file.
        sequence: one letter for each residue of the sequence in the file (entity_poly_seq, SEQRES); None: it has none.
        is_numbered: whether the numbers of the residues are positions in this sequence.
        start: number of the first residue of the sequence, by REMARK 465 and DBREF; 1 if the file does not say.
    """

    name: str
    residues: list[Residue]
    sequence: str | None
    is_numbered: bool
    start: int


class _Content(NamedTuple):
    """A parsed file.

    Attributes:
        structure: all atoms.
        sequences: names of the residues of each sequence, by entity (mmCIF) or chain (PDB).
        starts: lowest number of residues in the REMARK 465 and DBREF records of a chain.
    """

    structure: "gemmi.Structure"
    sequences: dict[str, list[str]]
    starts: dict[str, int]


def strip_suffix(path: Path) -> str | None:
    """Return the name of a structure file without its suffixes; None for other files."""
    end = next((end for end in reversed(SUFFIXES) if path.name.lower().endswith(end)), None)
    return path.name[: -len(end)] if end else None


def read_polymer(path: Path, chain: str | None) -> Polymer:
    """Read a protein chain of the first model of a structure.

    Args:
        path: file in one of the formats of `SUFFIXES`.
        chain: name of the chain, as authors name it; None: the first protein.

    Raises:
        UserError: if the file cannot be read or has no such chain.
    """
    with optional_dependency("evaluate", "a structure"):
        import gemmi
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from error
    try:
        found = _parse(content)
        model = found.structure[0]
    except MemoryError:
        raise
    except Exception as error:  # the libraries raise errors of many types for damaged files
        message = " ".join(str(error).split())
        raise UserError(f"{path} is not a valid structure file ({type(error).__name__}: {message})") from error
    segments = {residue.segment for part in model for residue in part}  # of CHARMM, if chains have no names
    parts: dict[str, list[list[gemmi.Residue]]] = {}
    for part in model:
        for segment, residues in groupby(part, lambda residue: residue.segment if len(segments) > 1 else ""):
            parts.setdefault(part.name or segment, []).append(list(residues))
    for name in parts if chain is None else parts.keys() & {chain}:
        if polymer := _find_polymer(name, parts[name], found):
            return polymer
    if not (names := [name or NAMELESS for name in parts if _find_polymer(name, parts[name], found)]):
        raise UserError(f"{path} has no residues of a protein: remove the file")
    authors = next(
        (part.name for part in model if chain in {residue.subchain for residue in part} - {part.name}), None
    )
    hint = "" if authors is None else f" ({chain} is the label_asym_id of chain {authors})"
    raise UserError(f"{path} has no protein chain {chain!r}, but {', '.join(names)}: rename the file{hint}")


def _parse(content: bytes) -> _Content:
    """Parse a file in the format that its content has."""
    import gemmi

    if content[:2] == b"\x1f\x8b":
        from isal import igzip

        content = igzip.decompress(content)
    if not content.strip():
        raise ValueError("it is empty")
    if 0x80 <= content[0] < 0x90:  # a map in MessagePack
        return _read_mmcif(_decode_binary_cif(content))
    content = b"\n".join(content.removeprefix(b"\xef\xbb\xbf").translate(_ASCII).splitlines())
    if re.match(rb"(?:\s|#[^\n]*\n)*data_", content, re.IGNORECASE):
        document = gemmi.cif.read_string(content)
        return _read_mmcif(next((block for block in document if block.find_values("_atom_site.Cartn_x")), document[0]))
    if not (first := re.search(rb"^(?:ATOM  |HETATM)", content, re.MULTILINE)):
        raise ValueError("it has neither a CIF data block nor ATOM records")
    content, has_names = _prepare_pdb(content.partition(b"\nENDMDL")[0])
    # without element and charge, in old files part of a line number, and without segments, unless they name chains
    structure = gemmi.read_pdb_string(content, max_line_length=72 if has_names else 76, split_chain_on_ter=True)
    starts: dict[str, int] = {}
    for chain, number in _START.findall(content[: first.start()]):
        starts[chain.decode()] = min(int(number), starts.get(chain.decode(), int(number)))
    return _Content(structure, {entity.name: list(entity.full_sequence) for entity in structure.entities}, starts)


def _prepare_pdb(content: bytes) -> tuple[bytes, bool]:
    """Check the coordinates, from which gemmi reads 0 if they are not numbers, and shorten names of residues.

    Names of force fields have 4 characters, of which gemmi takes the last for that of the chain.

    Returns:
        The content, and whether all atoms have the name of a chain.

    Raises:
        ValueError: if the columns 31 to 54 of an atom do not hold three numbers.
    """
    import gemmi

    text = np.frombuffer(content + b"\n" + b" " * 54, np.uint8).copy()
    starts = np.concatenate([[0], np.flatnonzero(text[:-54] == ord("\n")) + 1])
    records = text[starts[:, None] + np.arange(4)].view("S4")[:, 0]
    lines = np.flatnonzero((records == b"ATOM") | (records == b"HETA"))
    fields = text[starts[lines][:, None] + np.arange(30, 54)].reshape(-1, 3, 8)
    filled = fields != ord(" ")
    words = filled[..., 0] + (filled[..., 1:] & ~filled[..., :-1]).sum(-1)
    valid = np.isin(fields, _DIGITS).all(-1) & ((fields == ord(".")).sum(-1) == 1) & (words == 1)
    if not valid.all():
        raise ValueError(f"line {lines[~valid.all(-1)][0] + 1} has no coordinates in columns 31 to 54")
    columns = starts[lines] + 20
    columns = columns[text[columns] != ord(" ")]
    names = text[columns[:, None] + np.arange(-3, 1)].view("S4")[:, 0]
    standard = gemmi.expand_one_letter_sequence("ACDEFGHIKLMNPQRSTVWY", gemmi.ResidueKind.AA)
    proteins = np.isin(names.astype("S3"), np.array(standard, "S3"))
    if np.isin(names[proteins], _FOUR_CHARACTERS).all():  # otherwise, names of chains have two characters
        text[columns[proteins]] = ord(" ")
    return text.tobytes(), bool((text[starts[lines] + 21] != ord(" ")).all())


def _read_mmcif(block: "gemmi.cif.Block") -> _Content:
    import gemmi

    structure = gemmi.make_structure_from_block(block)
    if not len(structure):
        raise ValueError("it has no table _atom_site with id, type_symbol, label_alt_id, label_asym_id and Cartn_x")
    found: dict[str, dict[int, str]] = {}
    rows = block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"])
    for entity, number, name in rows or block.find("_pdbx_poly_seq_scheme.", ["entity_id", "seq_id", "mon_id"]):
        found.setdefault(gemmi.cif.as_string(entity), {}).setdefault(int(number), gemmi.cif.as_string(name))
    for entity, names in found.items():
        if sorted(names) != list(range(1, len(names) + 1)):
            raise ValueError(f"the residues of entity {entity} are not numbered from 1")
    sequences = {entity: [names[number] for number in sorted(names)] for entity, names in found.items()}
    if not sequences:  # written as letters only
        for entity, letters in block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code"]):
            text = "".join(gemmi.cif.as_string(letters).split())
            if _POLYMER.fullmatch(text):
                sequences[gemmi.cif.as_string(entity)] = gemmi.expand_one_letter_sequence(text, gemmi.ResidueKind.AA)
    entities = {gemmi.cif.as_string(asym): gemmi.cif.as_string(entity)
                for asym, entity in block.find("_struct_asym.", ["id", "entity_id"])}  # fmt: skip
    only = next(iter(sequences)) if len(sequences) == 1 else ""
    for residue in (each for chain in structure[0] for each in chain if not each.entity_id):
        residue.entity_id = entities.get(residue.subchain, only)
    return _Content(structure, sequences, {})


def _decode_binary_cif(content: bytes) -> "gemmi.cif.Block":
    """Return the tables of a BinaryCIF file that are needed."""
    from io import BytesIO

    import gemmi
    from biotite.structure.io.pdbx import BinaryCIFFile

    tables, block = BinaryCIFFile.read(BytesIO(content)).block, gemmi.cif.Block("structure")
    for name in ("atom_site", "entity_poly_seq"):
        if name in tables:
            columns = {key: column.as_array(str).tolist() for key, column in tables[name].items()}
            loop = block.init_loop(f"_{name}.", list(columns))
            loop.set_all_values([[value if value in ".?" else gemmi.cif.quote(value) for value in values]
                                 for values in columns.values()])  # fmt: skip
    return block


def _find_polymer(name: str, parts: list[list["gemmi.Residue"]], file: _Content) -> Polymer | None:
    """Return the protein of a chain; None if it has none."""
    import gemmi

    labelled = [residue for part in parts for residue in part
                if residue.label_seq is not None and residue.entity_id in file.sequences]  # fmt: skip
    if labelled:
        subchains: dict[str, list[gemmi.Residue]] = {}
        for residue in labelled:
            subchains.setdefault(residue.subchain, []).append(residue)
        proteins = (each for each in subchains.values() if any(map(is_amino_acid, each)))
        sites = [list(site) for _, site in groupby(next(proteins, []), lambda residue: residue.label_seq)]
    else:
        sites = _select_polymer(parts if name else [piece for part in parts for piece in _cut_at_ends(part)])
    if not sites:
        return None
    linked = [False, *(_are_linked(*pair) for pair in pairwise(sites))]
    residues = [_observe(*each, bool(labelled)) for each in zip(sites, linked, strict=True)]
    entity = name if file.structure.input_format == gemmi.CoorFormat.Pdb else sites[0][0].entity_id
    names = file.sequences.get(entity) or file.sequences.get("")  # SEQRES may lack the name of the only chain
    sequence = "".join(map(letter_of, names)) if names else None
    return Polymer(name, residues, sequence, bool(labelled), file.starts.get(name, 1))


def _select_polymer(parts: list[list["gemmi.Residue"]]) -> list["Site"]:
    """Return the residues of a chain without `label_seq_id`.

    ATOM records are residues of the polymer, HETATM records are if they are bonded to it, or between its numbers. TER
    ends a part of the chain: what follows is another molecule, such as a free amino acid, or the rest of the chain.
    """
    chain: list[Site] = []
    last: gemmi.Residue | None = None  # of the previous part
    for part in parts:
        is_new = last is not None and (ends_molecule(last) or part[0].name == _FIRST_CAP)
        last, sites = part[-1], []
        taken = {_place(site[0]) for site in chain}
        for place, residues in groupby(part, _place):
            if not any(map(is_amino_acid, site := list(residues))):
                continue
            if place in taken:
                if site[0][0].altloc != "\0":
                    continue
                break  # numbers of another molecule in the same chain
            taken.add(place)
            sites.append(site)
        kept = _without_ligands(sites, not chain)
        if kept and (not chain or (_continues(chain, kept) and not is_new)):
            chain += kept
    return chain


def _cut_at_ends(part: list["gemmi.Residue"]) -> list[list["gemmi.Residue"]]:
    """Cut residues without the name of a chain into molecules, if a C-terminus is not followed by TER."""
    ends = [end for end, (one, other) in enumerate(pairwise(part), 1)
            if (ends_molecule(one) or other.name == _FIRST_CAP) and not _are_linked([one], [other])]  # fmt: skip
    return [part[first:end] for first, end in pairwise([0, *ends, len(part)])]


def _without_ligands(sites: list["Site"], is_first: bool) -> list["Site"]:
    """Leave out amino acids and peptides that are not part of the polymer."""
    runs: list[list[Site]] = []
    for site in sites:
        if runs and _are_linked(runs[-1][-1], site):
            runs[-1].append(site)
        else:
            runs.append([site])
    anchors = [number for number, run in enumerate(runs) if any(is_anchor(each) for site in run for each in site)]
    if not anchors:  # a chain of modified residues only
        return [site for run in runs if len(run) > 1 for site in run] if is_first else []
    kept = []
    for number, run in enumerate(runs):
        before = max((each for each in anchors if each <= number), default=None)
        after = min((each for each in anchors if each >= number), default=None)
        if before is None or after is None:
            keep = all(is_modified(each) for site in run for each in site)
        elif before == after:
            keep = True
        else:
            keep = _place(runs[before][-1][0]) < _place(run[0][0]) and _place(run[-1][0]) < _place(runs[after][0][0])
        if keep:
            kept += run
    return kept


def _continues(chain: list["Site"], sites: list["Site"]) -> bool:
    """Return whether residues behind a TER are the rest of the chain, not another molecule of the same name."""
    gap = _place(sites[0][0])[0] - _place(chain[-1][0])[0]
    return _are_linked(chain[-1], sites[0]) or (
        len(sites) > 1 and 0 < gap <= max(_MAX_GAP, len(chain) + len(sites)) and not ends_molecule(chain[-1][0])
    )


def _place(residue: "gemmi.Residue") -> tuple[int, str]:
    """Return number and insertion code."""
    number = residue.label_seq if residue.seqid.num is None else residue.seqid.num
    return number or 0, residue.seqid.icode.strip()


def _are_linked(one: "Site", other: "Site") -> bool:
    """Return whether there is a peptide bond, or C-alpha atoms as close as with one if C or N are missing."""
    for first, second in ((first, second) for first in one for second in other):
        a, b, limit = first.find_atom("C", "*"), second.find_atom("N", "*"), _PEPTIDE_BOND
        if a is None or b is None:
            a, b, limit = first.find_atom("CA", "*"), second.find_atom("CA", "*"), _CA_DISTANCE
        if a is not None and b is not None and a.pos.dist(b.pos) < limit:
            return True
    return False


def _observe(site: "Site", linked: bool, is_numbered: bool) -> Residue:
    """Return a residue in its conformer of the highest occupancy, of equal ones the first in the file."""
    if len(site) > 1:
        site = sorted(site, key=lambda residue: -max(atom.occ for atom in residue))
    residue, letters = site[0], "".join(letter_of(each.name) for each in site)
    atom = residue.find_atom("CB", "*")
    if atom is None and letters[0] == "G":
        atom = residue.find_atom("CA", "*")
    if atom is not None and atom.altloc != "\0":
        atom = max((each for each in residue if each.name == atom.name), key=lambda each: each.occ)
    number, insertion = (residue.label_seq or 0, "") if is_numbered else _place(residue)
    return Residue(number, insertion, letters, (np.nan,) * 3 if atom is None else atom.pos.tolist(), linked)
