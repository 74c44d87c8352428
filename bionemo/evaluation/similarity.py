# SPDX-License-Identifier: Apache-2.0
"""Sequence identity between held-out proteins and training data, to find held-out proteins that the model knows.

Exact copies are found by comparison, because searches miss those of short and repetitive proteins. Peptides are
compared without gaps. MMseqs2 (Steinegger and Söding 2017) searches for relatives of the others if it is installed.
Otherwise, training sequences that share k-mers with a protein near one diagonal of the alignment matrix are aligned to
it with Biotite; this finds fewer distant relatives.
"""

import math
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError, optional_dependency
from bionemo.data.proteins.similarity import run_mmseqs
from bionemo.data.shards.formats import Fasta
from bionemo.data.shards.records import TextRecords
from bionemo.tokenizers.residues import trim

MIN_IDENTITY = 0.3  # lower identities are reported as 0
PEPTIDE = 20  # shorter proteins are compared without gaps
_MIN_CONTAINED = 8  # residues; long proteins contain shorter peptides by chance
_REPETITIVE = 5  # different residues of a protein of which searches find few copies
_COVERAGE = 0.8  # of the held-out protein by the alignment
_MAX_RESIDUES = 100_000_000  # of training data without MMseqs2: 8 bytes of memory each
_BLOCK = 1 << 25  # bytes of training data that are compared at once
_K, _BAND, _MIN_SHARED, _CANDIDATES = 4, 16, 2, 8
_GAPS = (-11, -1)
_KNOWN = re.compile(rb"[ACDEFGHIKLMNPQRSTVWY]")
_SEED = re.compile(rb"[ACDEFGHIKLMNPQRSTVWY]{%d}" % _K)


class Identities(NamedTuple):
    """Highest identity of each held-out protein to a training sequence.

    Attributes:
        values: share of identical columns of a local alignment that covers 80 % of the protein; 0 if below 0.3; nan if
            the protein has too few known residues to be searched. Of a peptide: 1 if it has 8 or more residues and a
            training sequence contains it, else the share of residues that equal those of a training peptide, without
            gaps.
        tool: program and version.
    """

    values: NDArray[np.float64]
    tool: str


def find_identities(proteins: Sequence[str], training: Path) -> Identities:
    """Search the training sequences for relatives of each protein.

    Args:
        proteins: held-out proteins; upper and lower case are the same.
        training: FASTA file.

    Raises:
        UserError: if the search is not possible, or fails.
    """
    texts = [trim("".join(text.split()).encode()).upper() for text in proteins]
    values = np.array(
        [0.0 if (_SEED if len(text) >= PEPTIDE else _KNOWN).search(text) else math.nan for text in texts]
    )
    with TemporaryDirectory() as directory:
        source = TextRecords([training], Fasta(), index_mapping_dir=directory)
        _find_copies(texts, source, values)
        _find_contained(texts, source, values)
        _compare_peptides(texts, source, values)
        rest = [number for number, text in enumerate(texts) if len(text) >= PEPTIDE and values[number] == 0]
        remaining = [texts[number] for number in rest]
        if shutil.which("mmseqs"):
            found, tool = _search_with_mmseqs(remaining, training)
        else:
            found, tool = _search_k_mers(remaining, source, training)
        values[rest] = found
    return Identities(np.where(values < MIN_IDENTITY, 0, values), tool)


def _find_copies(texts: Sequence[bytes], source: TextRecords, values: NDArray[np.float64]) -> None:
    """Set the values of proteins that are training sequences to 1."""
    wanted: dict[bytes, list[int]] = {}
    for number, text in enumerate(texts):
        wanted.setdefault(text, []).append(number)
    records = np.flatnonzero(np.isin(source.lengths, [len(text) for text in texts]))
    for text, starts, lengths in _read_blocks(source, records):
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            values[wanted.pop(text[start : start + length], [])] += 1  # remains nan


def _find_contained(texts: Sequence[bytes], source: TextRecords, values: NDArray[np.float64]) -> None:
    """Set the values of peptides and repetitive proteins to 1 if a training sequence contains them."""
    short = [_MIN_CONTAINED <= len(text) < PEPTIDE or len(set(text)) <= _REPETITIVE for text in texts]
    wanted = np.flatnonzero(np.array(short, bool) & (values == 0)).tolist()
    for text, _, _ in _read_blocks(source, np.arange(len(source) if wanted else 0)):
        values[[number for number in wanted if len(texts[number]) >= _MIN_CONTAINED and texts[number] in text]] = 1


def _compare_peptides(texts: Sequence[bytes], source: TextRecords, values: NDArray[np.float64]) -> None:
    """Compare peptides with training peptides without gaps, see `Identities`."""
    peptides = [number for number, text in enumerate(texts) if len(text) < PEPTIDE and values[number] == 0]
    similar = np.flatnonzero(source.lengths <= (PEPTIDE / _COVERAGE if peptides else 0))
    for text, _, _ in _read_blocks(source, similar):
        letters = np.frombuffer(text, np.uint8)
        for number in peptides:
            equal = np.zeros(len(letters) - PEPTIDE, np.uint8)
            for place, letter in enumerate(texts[number]):
                if letter != ord("X"):
                    equal += letters[place : place + len(equal)] == letter
            values[number] = max(values[number], int(equal.max(initial=0)) / len(texts[number]))


def _read_blocks(
    source: TextRecords, records: NDArray[np.int64]
) -> Iterator[tuple[bytes, NDArray[np.int64], NDArray[np.int64]]]:
    """Yield training sequences in upper case, PEPTIDE zeros around each, their starts and lengths."""
    ends = (source.lengths[records] + PEPTIDE).cumsum(dtype=np.int64)
    first = 0
    while first < len(records):
        last = max(first + 1, int(np.searchsorted(ends, (ends[first - 1] if first else 0) + _BLOCK, "right")))
        lengths = source.lengths[records[first:last]].astype(np.int64)
        starts = (lengths + PEPTIDE).cumsum() - lengths
        letters = np.zeros(int(starts[-1] + lengths[-1]) + PEPTIDE, np.uint8)
        source.gather(records[first:last], np.zeros_like(lengths), lengths, letters, starts)
        yield letters.tobytes().upper(), starts, lengths
        first = last


def _search_with_mmseqs(texts: Sequence[bytes], training: Path) -> tuple[NDArray[np.float64], str]:
    values = np.zeros(len(texts))
    with TemporaryDirectory() as directory:
        query, result = Path(directory) / "query.fasta", Path(directory) / "result"
        query.write_bytes(b"".join(b">%d\n%s\n" % pair for pair in enumerate(texts)))
        # `-e inf`: an E-value measures significance, which depends on the size of the training data, not identity
        options = [
            *("--min-seq-id", MIN_IDENTITY, "-c", _COVERAGE, "--cov-mode", 2, "--alignment-mode", 3, "-s", 7.5),
            *("-e", "inf", "--mask", 0, "--comp-bias-corr", 0, "--format-output", "query,fident"),
        ]
        if texts:
            run_mmseqs("easy-search", query, training.absolute(), result, directory, *options)
            number, identity = np.fromfile(result, np.float64, sep=" ").reshape(-1, 2).T
            np.maximum.at(values, number.astype(np.int64), identity)
    return values, f"MMseqs2 {run_mmseqs('version').strip()}"


def _search_k_mers(texts: Sequence[bytes], source: TextRecords, training: Path) -> tuple[NDArray[np.float64], str]:
    with optional_dependency("evaluate", "without MMseqs2, a comparison with training data"):
        from biotite import __version__ as version
        from biotite.sequence import GeneralSequence
        from biotite.sequence.align import KmerTable, SubstitutionMatrix

    def convert(text: bytes) -> Any:
        letters = text.decode("ascii", "replace")
        return GeneralSequence(alphabet, [each if each in alphabet else "X" for each in letters])

    matrix = SubstitutionMatrix.std_protein_matrix()
    alphabet = matrix.get_alphabet1()
    if (residues := int(source.lengths.sum())) > _MAX_RESIDUES:
        raise UserError(f"{training} has {residues:,} residues: install MMseqs2, which searches large files")
    references = [convert(source.text(number).upper().encode()) for number in range(len(source))]
    long = [number for number, each in enumerate(references) if len(each) >= _K]
    table = KmerTable.from_sequences(_K, [references[number] for number in long], long)
    values = np.zeros(len(texts))
    for number, text in enumerate(texts):
        protein = convert(text)
        for candidate in _find_candidates(table.match(protein)):
            values[number] = max(values[number], _identity(protein, references[candidate], matrix))
    return values, f"k-mers, Biotite {version}"


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
