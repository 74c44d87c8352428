# SPDX-License-Identifier: Apache-2.0
"""Sequence identity between held-out proteins and training data, to find held-out proteins that the model knows.

MMseqs2 (Steinegger and Söding 2017) searches if it is installed. Otherwise, training sequences that share k-mers with
a protein near one diagonal of the alignment matrix are aligned to it with Biotite; this finds fewer distant relatives.
"""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError, optional_dependency
from bionemo.data.shards.fasta import FastaSource
from bionemo.inference.progress import Advance

MIN_IDENTITY = 0.3  # lower identities are reported as 0
_COVERAGE = 0.8  # of the held-out protein by the alignment
_MAX_RESIDUES = 100_000_000  # of training data without MMseqs2: 8 bytes of memory each
_K, _BAND, _MIN_SHARED, _CANDIDATES = 4, 16, 2, 8
_GAPS = (-11, -1)


class Identities(NamedTuple):
    """Highest identity of each held-out protein to a training sequence.

    Attributes:
        values: share of identical columns of a local alignment that covers 80 % of the protein; 0 if below 0.3.
        tool: program and version.
    """

    values: NDArray[np.float64]
    tool: str


def find_identities(proteins: Sequence[str], training: Path, advance: Advance) -> Identities:
    """Search the training sequences for relatives of each protein.

    Args:
        proteins: held-out proteins.
        training: FASTA file.
        advance: called with the number of finished proteins.

    Raises:
        UserError: if the search is not possible, or fails.
    """
    if program := shutil.which("mmseqs"):
        found = _search_with_mmseqs(program, proteins, training)
        advance(len(proteins))
        return found
    return _search_k_mers(proteins, training, advance)


def _search_with_mmseqs(program: str, proteins: Sequence[str], training: Path) -> Identities:
    with TemporaryDirectory() as directory:
        query, result = Path(directory) / "query.fasta", Path(directory) / "result"
        query.write_text("".join(f">{number}\n{each}\n" for number, each in enumerate(proteins)))
        options = {
            "--min-seq-id": MIN_IDENTITY, "-c": _COVERAGE, "--cov-mode": 2, "--alignment-mode": 3, "-s": 7.5,
            "--format-output": "query,fident",
        }  # fmt: skip
        flags = [str(word) for option in options.items() for word in option]
        command = [program, "easy-search", str(query), str(training.absolute()), str(result), directory, *flags]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            lines = [line.strip() for line in [*done.stdout.splitlines(), *done.stderr.splitlines()] if line.strip()]
            message = "; ".join(lines[-3:]) or "no message"
            raise UserError(f"mmseqs easy-search of {training} failed with status {done.returncode}: {message}")
        values = np.zeros(len(proteins))
        for line in result.read_text().splitlines():
            number, identity = line.split("\t")
            values[int(number)] = max(values[int(number)], float(identity))
    version = subprocess.run([program, "version"], capture_output=True, text=True, check=False).stdout.strip()
    return Identities(values, f"MMseqs2 {version}")


def _search_k_mers(proteins: Sequence[str], training: Path, advance: Advance) -> Identities:
    with optional_dependency("evaluate", "without MMseqs2, a comparison with training data"):
        from biotite import __version__ as version
        from biotite.sequence import ProteinSequence
        from biotite.sequence.align import KmerTable, SubstitutionMatrix

    def convert(text: str) -> Any:
        letters = text.upper().encode("ascii", "replace")
        return ProteinSequence("".join(chr(each) if chr(each) in known else "X" for each in letters))

    known = set(ProteinSequence.alphabet.get_symbols())
    with TemporaryDirectory() as directory:
        source = FastaSource([training], index_mapping_dir=directory)
        if (residues := int(source.lengths.sum())) > _MAX_RESIDUES:
            raise UserError(f"{training} has {residues:,} residues: install MMseqs2, which searches large files")
        references = [convert("".join(source.fields(number)["sequence"].split())) for number in range(len(source))]
    table = KmerTable.from_sequences(_K, [each for each in references if len(each) >= _K],
                                     [i for i, each in enumerate(references) if len(each) >= _K])  # fmt: skip
    matrix = SubstitutionMatrix.std_protein_matrix()
    values = np.zeros(len(proteins))
    for number, text in enumerate(proteins):
        protein = convert(text)
        if len(protein) >= _K:
            for candidate in _find_candidates(table.match(protein)):
                values[number] = max(values[number], _identity(protein, references[candidate], matrix))
        advance(1)
    return Identities(np.where(values < MIN_IDENTITY, 0, values), f"k-mers, Biotite {version}")


def _find_candidates(matches: NDArray[np.uint32]) -> list[int]:
    """Return the references with the most shared k-mers in a band of diagonals.

    `matches` are rows of position in the protein, reference, and position in the reference.
    """
    position, reference, other = matches.astype(np.int64).T
    band = (position - other) // _BAND
    offset = 1 << 32
    bands, counts = np.unique(reference * offset + band + offset // 2, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= _MIN_SHARED]
    return list(dict.fromkeys((bands[order] // offset).tolist()))[:_CANDIDATES]


def _identity(protein: Any, reference: Any, matrix: Any) -> float:
    """Return the share of identical columns of the best local alignment; 0 if it covers too little of the protein."""
    from biotite.sequence.align import align_optimal, get_sequence_identity

    (alignment,) = align_optimal(protein, reference, matrix, _GAPS, local=True, max_number=1)
    covered = int((alignment.trace[:, 0] >= 0).sum())
    return float(get_sequence_identity(alignment, mode="all")) if covered >= _COVERAGE * len(protein) else 0.0
