# SPDX-License-Identifier: Apache-2.0
"""Division of records so that no validation or test sequence is related to one of another split.

Two sequences are related if an alignment covers a share `coverage` of both, and a share `min_seq_id` of its columns
are identical. With `coverage=0`, any significant local alignment counts, as of a common domain.

MMseqs2 (Steinegger and Söding 2017) finds clusters, and whole clusters are assigned to a split. Clustering misses
relatives, so held-out sequences are then searched in all others with higher sensitivity, clusters with related
sequences in different splits are joined, and splits are assigned again, until the search finds none. MMseqs2 misses
the relatives of peptides, so these are compared by overlaps without gaps that cover `coverage` of both (0.8 of both
with `coverage=0`).

The caller numbers the distinct sequences, in an order that does not depend on that of the records. The result then
does not depend on it either, nor on the number of threads.
"""

import logging
import shutil
import string
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bionemo.common.errors import UserError

log = logging.getLogger(__name__)
HELD_OUT = ("val", "test")  # by the number of the split
TRAIN = len(HELD_OUT)
PEPTIDE = 20  # residues; shorter sequences are compared without gaps
_ROUNDING = 5e-4  # MMseqs2 writes identities and coverages with three decimals
_E_VALUE = 1e-3  # up to which a local alignment is significant; the default of MMseqs2
_PEPTIDE_COVERAGE = 0.8  # with coverage=0
_LINCLUST = 0.9  # identity from which linear-time clustering is used; below, it misses most relatives
_LETTERS = bytes(code if chr(code) in string.ascii_letters else ord("X") for code in range(256))  # > starts a record
_MAX_HITS = 10_000  # of a sequence before they are aligned, by the score of their best diagonal


def run_mmseqs(*words: object) -> str:
    """Run MMseqs2 with these arguments and return its output.

    Raises:
        UserError: if it is not installed, or fails.
    """
    if (program := shutil.which("mmseqs")) is None:
        raise UserError(
            "similarity of sequences needs MMseqs2, but there is no program mmseqs: install it, as with "
            "apt-get install mmseqs2, or with conda"
        )
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        last = f"no message\n{done.stdout}\n{done.stderr}".rstrip().rpartition("\n")[2]
        raise UserError(
            f"mmseqs {words[0]} failed with status {done.returncode}: {last}: check the free memory and disk space"
        )
    return done.stdout


@dataclass(frozen=True)
class RelativeSearch:
    """Finds the relatives of distinct sequences among all of them.

    The methods raise a UserError if MMseqs2 is not installed, or fails.
    """

    scratch: Path  # directory of temporary files
    texts: pa.Array  # the sequences, large_binary [n]
    order: NDArray[np.int64]  # [n], index in `texts` of sequence 0, 1, ...; clusters depend on the order
    min_seq_id: float
    coverage: float
    threads: int

    def cluster(self) -> NDArray[np.int64]:
        """Return the lowest number of a sequence in the cluster of each sequence, int64 [n]."""
        command, options = ("easy-linclust", []) if self.min_seq_id >= _LINCLUST else ("easy-cluster", ["-s", 7.5])
        numbers, options = np.arange(len(self.order)), [*options, "--min-seq-id", self.min_seq_id, "-c", self.coverage]
        pairs = self._run(command, [numbers], options, "found_cluster.tsv", 2)
        return join_clusters(numbers, pairs.astype(np.int64))

    def search(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Search some sequences in all sequences.

        Peptides are compared by overlaps without gaps, and only related ones are returned.

        Returns:
            Float64 [k, 3]: a sequence of `numbers`, another sequence that the alignment covers, and their identity.
        """
        # An E-value measures significance, which depends on the size of the data. MMseqs2 takes a coverage also as a
        # limit of the ratio of lengths, which gaps can change: the coverage of the alignment is compared below.
        # Short words, which take too long in large data, find nearly all pairs, even those that are similar by chance.
        exhaustive = ["-k", 5, "--k-score", 60, "--min-ungapped-score", 0] if len(self.order) <= _MAX_HITS else []
        options = [
            *exhaustive,
            *("-e", "inf" if self.coverage else _E_VALUE, "--mask", 0, "--comp-bias-corr", 0, "-c", self.coverage**2),
            *("-s", 7.5, "--min-seq-id", 0, "--alignment-mode", 3, "--max-seqs", min(len(self.order), _MAX_HITS)),
            *("--format-output", "query,target,fident,qcov,tcov"),
        ]
        found = self._run("easy-search", [numbers, np.arange(len(self.order))], options, "found", 5)
        is_hit = (found[:, 0] != found[:, 1]) & (found[:, 3:].min(axis=1) >= self.coverage - _ROUNDING)
        return np.concatenate([found[is_hit, :3], *self._compare_peptides(numbers)])

    def _run(
        self, command: str, inputs: Sequence[NDArray[np.int64]], options: list[Any], output: str, num_columns: int
    ) -> NDArray[np.float64]:
        """Run a command on files of the input sequences; return the columns of an output file."""
        if self._lengths()[inputs[0]].max() < PEPTIDE:
            return np.zeros((0, num_columns))  # MMseqs2 may fail, because it finds no k-mers
        log.info("mmseqs %s: %s of %s distinct sequences", command, f"{len(inputs[0]):,}", f"{len(self.order):,}")
        directory = self.scratch / "mmseqs"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        paths = [directory / f"input{index}.fasta" for index in range(len(inputs))]
        for path, numbers in zip(paths, inputs, strict=True):
            pairs = zip(numbers.tolist(), self.order[numbers].tolist(), strict=True)
            with path.open("wb") as file:
                for number, index in pairs:
                    file.write(b">%d\n%s\n" % (number, self.texts[index].as_py().translate(_LETTERS)))
        # 1: proteins, even if all letters are those of nucleotides
        options = [*options, "--cov-mode", 0, "--dbtype", 1, "--threads", self.threads]
        run_mmseqs(command, *paths, directory / "found", directory / "tmp", *options)
        return np.fromfile(directory / output, np.float64, sep=" ").reshape(-1, num_columns)

    def _lengths(self) -> NDArray[np.int64]:
        return pc.binary_length(self.texts).to_numpy()[self.order]

    def _compare_peptides(self, numbers: NDArray[np.int64]) -> list[NDArray[np.float64]]:
        coverage = self.coverage or _PEPTIDE_COVERAGE
        longest = int((PEPTIDE - 1) / coverage + 1e-9)
        short = np.flatnonzero(self._lengths() <= longest)
        lengths = self._lengths()[short]
        padded = [[*self.texts[index].as_py().ljust(longest, b"\0")] for index in self.order[short].tolist()]
        letters, found = np.array(padded, np.uint8), []
        for row in np.flatnonzero(np.isin(short, numbers)).tolist():
            own, best = letters[row, : lengths[row]], np.zeros(len(short))
            for offset in range(-len(own), longest):
                part, start = own[max(0, -offset) : longest - offset], max(0, offset)
                size = np.minimum(lengths - start, len(part))
                equal = (letters[:, start : start + len(part)] == part).sum(axis=1) / np.maximum(size, 1)
                best = np.maximum(best, equal * (size >= coverage * np.maximum(lengths, len(own)) - 1e-9))
            best[row] = 0
            chosen = (best >= self.min_seq_id - _ROUNDING) & (np.minimum(lengths, len(own)) < PEPTIDE)
            found.append(np.column_stack([np.full(chosen.sum(), short[row]), short[chosen], best[chosen]]))
        return found


def join_clusters(clusters: NDArray[np.int64], pairs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Join the clusters of the sequences of each pair.

    Args:
        clusters: number of a sequence of the cluster of each sequence, int64 [n].
        pairs: numbers of two sequences, int64 [pairs, 2].

    Returns:
        The lowest number of a sequence in the cluster of each sequence, int64 [n].
    """
    # a third of a second, which other preparations do not need
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = np.concatenate([np.column_stack([np.arange(len(clusters)), clusters]), pairs]).T
    graph = coo_array((np.ones(edges.shape[1], bool), (edges[0], edges[1])), (len(clusters), len(clusters)))
    component = connected_components(graph, directed=False)[1]
    return np.unique(component, return_index=True)[1][component]


def assign_clusters(
    clusters: NDArray[np.int64], weights: NDArray[np.int64], sizes: Sequence[int], priority: NDArray[np.int64]
) -> NDArray[np.int8]:
    """Assign whole clusters to the held-out splits, and the others to training.

    A split gets the clusters that come first by the priority of their lowest sequence, except for those larger than
    the split, until the next one does not fit. The rest is filled with the largest cluster that fits, as often as
    there is one.

    Args:
        clusters: lowest number of a sequence in the cluster of each sequence, int64 [n].
        weights: number of records of each sequence, int64 [n].
        sizes: records of each held-out split.
        priority: a permutation, int64 [n].

    Returns:
        The number of the split of each sequence: the index in `sizes`, or `TRAIN`; int8 [n].
    """
    names, index = np.unique(clusters, return_inverse=True)
    totals = np.bincount(index, weights).astype(np.int64)
    splits = np.full(len(names), TRAIN, np.int8)
    for split, size in enumerate(sizes):
        left = size
        order = np.argsort(priority[names])
        order = order[(splits[order] == TRAIN) & (totals[order] <= left)]
        count = int(np.searchsorted(np.cumsum(totals[order]), left, "right"))
        rest = order[count:][np.argsort(-totals[order[count:]], kind="stable")]
        for cluster in [*order[:count].tolist(), *rest.tolist()]:
            if totals[cluster] <= left:
                splits[cluster] = split
                left -= int(totals[cluster])
    return splits[index]


def divide(
    search: RelativeSearch,
    clusters: NDArray[np.int64],
    weights: NDArray[np.int64],
    sizes: Sequence[int],
    seed: int,
    others: NDArray[np.int64],
) -> tuple[NDArray[np.int8], NDArray[np.int64], NDArray[np.float64]]:
    """Divide sequences so that a search of the held-out ones finds no related pair in different splits.

    Args:
        search: the search.
        clusters: lowest number of a sequence in the cluster of each sequence, int64 [n].
        weights: number of records of each sequence, int64 [n].
        sizes: records of each held-out split.
        seed: of the division.
        others: further sequences to search.

    Returns:
        Splits and clusters of the sequences, int8 [n] and int64 [n], and what the search found.

    Raises:
        UserError: if MMseqs2 is not installed, or fails.
    """
    priority = np.random.default_rng(seed).permutation(len(clusters))
    hits, searched = np.zeros((0, 3)), np.zeros(0, np.int64)
    while True:
        splits = assign_clusters(clusters, weights, sizes, priority)
        wanted = np.setdiff1d(np.append(np.flatnonzero(splits != TRAIN), others), searched)
        if len(wanted):
            hits, searched = np.concatenate([hits, search.search(wanted)]), np.append(searched, wanted)
        pairs = hits[hits[:, 2] >= search.min_seq_id - _ROUNDING, :2].astype(np.int64)
        apart = pairs[splits[pairs[:, 0]] != splits[pairs[:, 1]]]
        if not len(apart):
            return splits, clusters, hits
        clusters = join_clusters(clusters, apart)


class Division(NamedTuple):
    """Records that are divided by similarity."""

    splits: NDArray[np.int8]  # number of the split of each record
    held_out: NDArray[np.int64]  # records for validation and test
    #: of the held-out records, and of those of a random split: the identity to the nearest training sequence
    identities: list[NDArray[np.float64]]
    nearest: NDArray[np.int64]  # number of the nearest training sequence of each held-out record, or -1
    report: dict[str, Any]
    notes: list[str]  # what was found, and whether sizes differ from the requested ones


def divide_records(
    search: RelativeSearch,
    clusters: NDArray[np.int64],
    sequence_of: NDArray[np.int64],
    at_random: NDArray[np.int64],
    sizes: Sequence[int],
    seed: int,
) -> Division:
    """Divide records so that a search of the held-out ones finds no related pair in different splits.

    Args:
        search: the search.
        clusters: lowest number of a sequence in the cluster of each sequence, int64 [n].
        sequence_of: number of the sequence of each record, or -1; int64 [records].
        at_random: held-out records of a random split, with which the report compares the division.
        sizes: records of each held-out split.
        seed: of the division.

    Raises:
        UserError: if MMseqs2 is not installed, or fails.
    """
    kept = np.flatnonzero(sequence_of >= 0)
    weights, others = np.bincount(sequence_of[kept]), sequence_of[at_random]
    splits, joined, hits = divide(search, clusters, weights, sizes, seed, others)
    held_out = kept[splits[sequence_of[kept]] != TRAIN]
    found = np.bincount(splits[sequence_of[held_out]], minlength=TRAIN).tolist()
    if any(sizes) and not any(found):
        raise UserError(
            f"all groups of related sequences (min_seq_id={search.min_seq_id}, coverage={search.coverage:g}) are too "
            "large to be held out: raise min_seq_id or coverage, or val_size and test_size"
        )
    (identity, nearest), (random_identity, _) = (
        _find_nearest(hits, training, len(clusters))
        for training in (np.flatnonzero(splits == TRAIN), sequence_of[np.setdiff1d(kept, at_random)])
    )
    identities = [identity[sequence_of[held_out]], random_identity[others]]
    summary, random_summary = (
        {
            "held_out": len(each),
            "above_threshold": int((each >= search.min_seq_id - _ROUNDING).sum()),
            "histogram": np.histogram(each, 20, (0, 1))[0].tolist(),
        }
        for each in identities
    )
    report = {
        "program": f"MMseqs2 {run_mmseqs('version').strip()}",
        "distinct_sequences": len(clusters),
        "clusters": len(np.unique(clusters)),
        "clusters_after_search": len(np.unique(joined)),
        "requested": dict(zip(HELD_OUT, sizes, strict=True)),
        "found": dict(zip(HELD_OUT, found, strict=True)),
        **summary,
        "random_split": random_summary,
    }
    notes = [
        f"{summary['above_threshold']} of {len(held_out)} held-out records have an identity of {search.min_seq_id} or "
        f"more {describe_coverage(search.coverage)} to a training sequence; at random, "
        f"{random_summary['above_threshold']} of {len(at_random)} have"
        f"{' (coverage=0 also compares fragments and domains)' if search.coverage else ''}"
    ]
    if found != [*sizes]:
        notes.append(
            f"val and test have {found[0]} and {found[1]} records, not {sizes[0]} and {sizes[1]}: no other cluster of "
            "related sequences fits; a higher min_seq_id or coverage makes clusters smaller"
        )
    return Division(splits[sequence_of], held_out, identities, nearest[sequence_of[held_out]], report, notes)


def describe_coverage(coverage: float) -> str:
    """Describe the alignments that relate two sequences, such as "over 80 % of both sequences"."""
    return f"over {100 * coverage:g} % of both sequences" if coverage else "in a significant local alignment"


def _find_nearest(
    hits: NDArray[np.float64], training: NDArray[np.int64], count: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Find the training sequence nearest to each sequence.

    Returns:
        Their identity, float64 [count], and its number, int64 [count]; 0 and -1 if none was found.
    """
    identity, nearest = np.zeros(count), np.full(count, -1)
    hits = hits[np.isin(hits[:, 1], training)]
    hits = hits[np.lexsort((-hits[:, 1], hits[:, 2]))]  # the last assignment to an element counts
    identity[hits[:, 0].astype(np.int64)], nearest[hits[:, 0].astype(np.int64)] = hits[:, 2], hits[:, 1]
    identity[training], nearest[training] = 1, training
    return identity, nearest
