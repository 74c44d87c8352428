# SPDX-License-Identifier: Apache-2.0
"""Datasets of molecules and reactions, and their samples converted back to SMILES."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem

from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.data.molecules.augmentation import Augmentation
from bionemo.data.molecules.dataset import MoleculeDataset
from bionemo.tokenizers import load_tokenizer
from tests.support.molecules import MOLECULES
from tests.support.sequence_files import open_sequences

TOKENIZER = load_tokenizer("megamolbart")
STORED = Augmentation()
EQUIVARIANT = replace(STORED, encoder_augment=True)
INVARIANT = replace(EQUIVARIANT, canonicalize_decoder_output=True)
CANONICAL = replace(STORED, canonicalize_encoder_input=True, canonicalize_decoder_output=True)
INDEPENDENT = replace(EQUIVARIANT, decoder_independent_augment=True)
KNOWN = [text for text in MOLECULES if not TOKENIZER.find_unknown(text)]
V1 = ["CO[C@H](C[C@@H]1CCC[C@H]1O)c1ccccc1", "COC[C@H](O)CCNC(=O)CCC[C@@H](C)N", "CC[C@](C)(Nc1cnnn1C)C1CC1"]
REACTIONS = [
    ("CCc1cc(N)c(N)cc1Cl", "CCc1cc([N+](=O)[O-])c(N)cc1Cl"),
    ("CC(=O)NCC", "CC(=O)OC(C)=O.CCN"),
    ("OCC", "C1CO1.Cl"),
]

Make = Callable[..., MoleculeDataset]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write records to a file and open it as a dataset."""

    def make_dataset(records: list[Any], augmentation: Augmentation = STORED, **changes: Any) -> MoleculeDataset:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        if isinstance(records[0], tuple):
            path.write_text("id,reactants,products\n" + "".join(f"{i},{b},{a}\n" for i, (a, b) in enumerate(records)))
            source = open_sequences("csv_fields_mmap", [path], data_fields={"products": 2, "reactants": 1})
        else:
            path.write_text("id\tsmiles\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(records)))
            source = open_sequences("csv_mmap", [path], data_col=1, data_sep="\t")
        options = {"seed": 5, "seq_length": 128, "long_sequences": "error", "on_invalid": "error",
                   "on_unknown": "keep", "vary_by_epoch": True, "label": "train data"}  # fmt: skip
        return MoleculeDataset(source, TOKENIZER, augmentation, **{**options, **changes})

    return make_dataset


def tokenize(dataset: MoleculeDataset, records: list[int] | None = None, epoch: int = 0) -> TokenizedBatch:
    numbers = dataset.records if records is None else np.array(records, np.int64)
    return dataset.tokenize(np.full_like(numbers, epoch), numbers)


def split(sequences: TokenSequences) -> list[list[int]]:
    return [part.tolist() for part in np.split(sequences.ids, sequences.lengths.cumsum())[:-1]]


def decode_sides(tokens: TokenizedBatch) -> tuple[list[str], list[str]]:
    """Return the SMILES of encoder inputs and decoder targets; also check the layout of the tokens."""
    assert tokens.source is not None
    assert tokens.inputs.ids.dtype == tokens.source.ids.dtype == tokens.target_ids.dtype == np.uint16
    assert tokens.inputs.lengths.dtype == tokens.target_positions.dtype == tokens.unknown_counts.dtype == np.int64
    assert tokens.target_positions.tolist() == list(range(len(tokens.inputs.ids)))
    answers = split(TokenSequences(tokens.target_ids, tokens.inputs.lengths))
    for inputs, answer in zip(split(tokens.inputs), answers, strict=True):
        if inputs:
            assert (inputs[0], answer[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
            assert inputs[1:] == answer[:-1]
    return [TOKENIZER.decode(np.array(part, np.int64)) for part in split(tokens.source)], [
        TOKENIZER.decode_output(np.array(part)) for part in answers
    ]


def canonical(texts: list[str]) -> list[str]:
    return [Chem.CanonSmiles(text) for text in texts]
