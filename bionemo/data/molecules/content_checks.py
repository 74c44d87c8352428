# SPDX-License-Identifier: Apache-2.0
"""Checks of SMILES before training: their lengths; invalid and unknown SMILES in a sample of the records."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bionemo.common.errors import UserError, shorten
from bionemo.data.dataset import TokenSequences
from bionemo.data.molecules.reader import BATCH, SmilesReader
from bionemo.data.molecules.smiles import MAX_PARSED, is_valid
from bionemo.data.policies import spread_evenly
from bionemo.tokenizers import SmilesTokenizer
from bionemo.tokenizers.smiles import end_at_space

PROBLEMS = {"invalid": "RDKit cannot read", "unknown": "the model knows no token of"}
"""Reasons why a model cannot use SMILES."""
_NEARLY_ALL = 0.9  # share of unusable SMILES, which suggests that another column has the SMILES
SAMPLED_TOKENS = 50_000  # number of records that are tokenized, in a tenth of a second
SAMPLED_MOLECULES = 2_000  # number of molecules that are parsed or rewritten, in half a second


def count_tokens(reader: SmilesReader, tokenizer: SmilesTokenizer, limit: int) -> NDArray[np.int64]:
    """Return the number of tokens of each record's longer SMILES, [n]; 0 if its bytes are at most `limit`."""
    candidates = np.flatnonzero(reader.sizes > limit)
    tokens = np.zeros(len(reader.sizes), np.int64)
    for i in range(0, len(candidates), BATCH):
        part = candidates[i : i + BATCH]
        tokens[part] = np.max([tokenizer.encode_all(side)[1] for side in reader.read(part)], axis=0)
    return tokens


def check_unknown_tokens(
    samples: Iterable[list[list[str]]], tokenizer: SmilesTokenizer, policy: str, label: str
) -> list[str]:
    """Return a note about tokens outside the vocabulary.

    `samples` are batches of records: for each side, a list with its SMILES in the form that the model reads.

    Raises:
        UserError: if the policy is `error` and there are such tokens.
    """
    affected, total, found = 0, 0, Counter[str]()
    for sides in samples:
        unknown = [count_unknown(TokenSequences(*tokenizer.encode_all(side)), tokenizer.unk_id) for side in sides]
        indices = np.flatnonzero(np.any(unknown, axis=0))
        affected, total = affected + len(indices), total + len(sides[0])
        found.update(piece for side in sides for j in indices for piece in tokenizer.find_unknown(side[j]))
    if not affected:
        return []
    problem = f"{label}: {found.total():,} tokens in {affected:,} of {total:,} records are outside the vocabulary"
    examples = list_tokens(found)
    if policy == "error":
        raise UserError(f"{problem} ({examples}): correct them, or set model.data.on_unknown to skip or keep")
    return [f"{problem} and {'their records are dropped' if policy == 'skip' else 'become unknown'} ({examples})"]


def list_tokens(found: Counter[str]) -> str:
    """Return the five most frequent tokens for a message."""
    return ", ".join(shorten(piece) for piece, _ in found.most_common(5)) + (" ..." if len(found) > 5 else "")


def check_validity(
    reader: SmilesReader,
    records: NDArray[np.int64],
    long: NDArray[np.int64],
    sides: list[int],
    policy: str,
    label: str,
) -> list[str]:
    """Return a note about SMILES in a sample of the records [k] that RDKit rejects.

    RDKit parses these sides of a record, except of `long` records, which are too long for it. The policy is `skip`,
    `keep` or `error`.

    Raises:
        UserError: if the policy is `error` and there are invalid SMILES.
    """
    sampled = np.setdiff1d(spread_evenly(records, SAMPLED_MOLECULES), long)
    texts = reader.read(sampled)
    invalid = [(i, side) for i in range(len(sampled)) for side in sides if not is_valid(texts[side][i])]
    if not invalid:
        return []
    i, side = invalid[0]
    first, total = f"record {sampled[i]:,}, {shorten(texts[side][i])}", len(sides) * len(sampled)
    return [report_unusable(label, "invalid", len(invalid), total, first, policy, "model.data.on_invalid")]


def find_unusable(texts: Sequence[str], tokenizer: SmilesTokenizer) -> dict[str, list[int]]:
    """Return the positions of the SMILES that a model cannot use, by a key of PROBLEMS; {} if there are none.

    SMILES of more than MAX_PARSED letters are not checked; models truncate them.
    """
    words = [end_at_space(text) for text in texts]
    invalid = [number for number, text in enumerate(words) if len(text) <= MAX_PARSED and not is_valid(text)]
    ids, lengths = tokenizer.encode_all(words)
    unknown = count_unknown(TokenSequences(ids, lengths), tokenizer.unk_id) == lengths
    unknown[invalid] = False
    found = {"invalid": invalid, "unknown": np.flatnonzero(unknown).tolist()}
    return {problem: numbers for problem, numbers in found.items() if numbers}


def report_unusable(
    label: str, problem: str, count: int, total: int, first: str, policy: str, key: str, column: str = ""
) -> str:
    """Return a note about SMILES that a model cannot use.

    Args:
        label: name of the data.
        problem: a key of PROBLEMS.
        count: number of these SMILES.
        total: number of all SMILES.
        first: record and text of the first one.
        policy: `skip`, `keep` or `error`.
        key: the setting of the policy.
        column: the column of the SMILES, named if nearly all are unusable; "": there is none.

    Raises:
        UserError: if the policy is `error`.
    """
    name = f" of {column}" if column and count >= _NEARLY_ALL * total else ""
    text = f"{label}: {PROBLEMS[problem]} {count:,} of {total:,} SMILES{name} (the first is {first})"
    if policy == "error":
        raise UserError(f"{text}: correct them, or set {key} to skip or keep")
    return f"{text}; {'their records are dropped' if policy == 'skip' else 'they are used unchanged'}"


def count_unknown(sequences: TokenSequences, unk_id: int) -> NDArray[np.int64]:
    """Return the number of unknown tokens in each sequence, int64 [N]."""
    positions = np.flatnonzero(sequences.ids == unk_id)
    return np.diff(positions.searchsorted(sequences.lengths.cumsum()), prepend=0)
