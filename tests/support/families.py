# SPDX-License-Identifier: Apache-2.0
"""Families of related proteins, and their identities by alignments of Biotite."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from biotite.sequence import ProteinSequence
from biotite.sequence.align import SubstitutionMatrix, align_optimal, get_sequence_identity

LETTERS = [*"ACDEFGHIKLMNPQRSTVWY"]
needs_mmseqs = pytest.mark.skipif(not shutil.which("mmseqs"), reason="MMseqs2 is not installed")


def families(seed: int, count: int, singletons: int) -> dict[str, str]:
    """Generate families of 2 to 6 relatives, named `FAMILY.MEMBER`, with substitutions and a deletion, and others.

    The last members of every fifth family are peptides that differ from each other in one residue.
    """
    rng = np.random.default_rng(seed)
    found = {}
    for family in range(count + singletons):
        ancestor = rng.choice(LETTERS, rng.integers(10, 19) if family % 5 == 4 else rng.integers(60, 100))
        for member in range(int(rng.integers(2, 7)) if family < count else 1):
            text = ancestor.copy()
            changed = rng.random(len(text)) < 0.25 if len(text) >= 20 else np.arange(len(text)) == member
            text[changed & (member > 0)] = rng.choice(LETTERS, (changed & (member > 0)).sum())
            start = rng.integers(10, 50)
            found[f"{family}.{member}"] = "".join(np.delete(text, slice(start, start + member) if member > 2 else []))
    return found


def identity(first: str, second: str, coverage: float = 0.8) -> float:
    """Return the identity of the best local alignment; 0 if it does not cover this share of both sequences."""
    matrix = SubstitutionMatrix.std_protein_matrix()
    pair = [ProteinSequence(text.replace("U", "C").replace("O", "K")) for text in (first, second)]
    [alignment] = align_optimal(*pair, matrix, (-11, -1), local=True, max_number=1)
    covered = [(alignment.trace[:, side] >= 0).sum() / len(pair[side]) for side in (0, 1)]
    return float(get_sequence_identity(alignment, mode="all")) if min(covered) >= coverage else 0.0


def leaked(splits: dict[str, list[str]], threshold: float = 0.3) -> int:
    """Count the held-out sequences with a relative in training, of all pairs."""
    held_out = splits["val"] + splits["test"]
    return sum(any(identity(each, other) >= threshold for other in splits["train"]) for each in held_out)


def replace_mmseqs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace MMseqs2 by a program, written to a new directory, that finds nothing."""
    folder.mkdir()
    program = folder / "mmseqs"
    program.write_text('#!/bin/sh\ncase "$1" in version) ;; easy-search) : >"$4" ;; *) : >"$3_cluster.tsv" ;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
