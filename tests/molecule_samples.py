# SPDX-License-Identifier: Apache-2.0
"""Molecules and reactions made into samples, and samples read back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rdkit import Chem

from bionemo.data.dataset import Sequences, Tokens
from bionemo.data.molecules.augmentation import Forms
from bionemo.data.molecules.dataset import MoleculeSamples
from bionemo.data.shards.source import open_source
from bionemo.tokenizers import load_tokenizer
from tests.molecules import MOLECULES

TOKENIZER = load_tokenizer("megamolbart")
AS_IT_STANDS = Forms(False, False, False, False, False, False, False, 0.1, 3.0)
EQUIVARIANT = replace(AS_IT_STANDS, encoder_augment=True)
INVARIANT = replace(EQUIVARIANT, canonicalize_decoder_output=True)
CANONICAL = replace(AS_IT_STANDS, canonicalize_encoder_input=True, canonicalize_decoder_output=True)
INDEPENDENT = replace(EQUIVARIANT, decoder_independent_augment=True)
KNOWN = [text for text in MOLECULES if not TOKENIZER.unknown(text)]
V1 = ["CO[C@H](C[C@@H]1CCC[C@H]1O)c1ccccc1", "COC[C@H](O)CCNC(=O)CCC[C@@H](C)N", "CC[C@](C)(Nc1cnnn1C)C1CC1"]
REACTIONS = [
    ("CCc1cc(N)c(N)cc1Cl", "CCc1cc([N+](=O)[O-])c(N)cc1Cl"),
    ("CC(=O)NCC", "CC(=O)OC(C)=O.CCN"),
    ("OCC", "C1CO1.Cl"),
]

Make = Callable[..., MoleculeSamples]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Write records into a file and open it as samples."""

    def build(records: list[Any], forms: Forms = AS_IT_STANDS, **changes: Any) -> MoleculeSamples:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.csv"
        if isinstance(records[0], tuple):
            path.write_text("id,reactants,products\n" + "".join(f"{i},{b},{a}\n" for i, (a, b) in enumerate(records)))
            source = open_source("csv_fields_mmap", [path], data_fields={"products": 2, "reactants": 1})
        else:
            path.write_text("id\tsmiles\n" + "".join(f"{i}\t{text}\n" for i, text in enumerate(records)))
            source = open_source("csv_mmap", [path], data_col=1, data_sep="\t")
        options = {"seed": 5, "seq_length": 128, "long_sequences": "error", "on_invalid": "error",
                   "on_unknown": "keep", "random_forms": True, "where": "train data"}  # fmt: skip
        return MoleculeSamples(source, TOKENIZER, forms, **{**options, **changes})

    return build


def build(samples: MoleculeSamples, records: list[int] | None = None, epoch: int = 0) -> Tokens:
    numbers = samples.records if records is None else np.array(records, np.int64)
    return samples.build(np.full_like(numbers, epoch), numbers)


def split(sequences: Sequences) -> list[list[int]]:
    return [part.tolist() for part in np.split(sequences.ids, sequences.lengths.cumsum())[:-1]]


def both(tokens: Tokens) -> tuple[list[str], list[str]]:
    """SMILES that the encoders read and that the decoders are to write; also look at how tokens are laid out."""
    assert tokens.source is not None
    assert tokens.inputs.ids.dtype == tokens.source.ids.dtype == tokens.target_ids.dtype == np.uint16
    assert tokens.inputs.lengths.dtype == tokens.target_index.dtype == tokens.unknown.dtype == np.int64
    assert tokens.target_index.tolist() == list(range(len(tokens.inputs.ids)))
    answers = split(Sequences(tokens.target_ids, tokens.inputs.lengths))
    for inputs, answer in zip(split(tokens.inputs), answers, strict=True):
        if inputs:
            assert (inputs[0], answer[-1]) == (TOKENIZER.bos_id, TOKENIZER.eos_id)
            assert inputs[1:] == answer[:-1]
    return [TOKENIZER.decode(np.array(part, np.int64)) for part in split(tokens.source)], [
        TOKENIZER.text(np.array(part)) for part in answers
    ]


def canonical(texts: list[str]) -> list[str]:
    return [Chem.CanonSmiles(text) for text in texts]
