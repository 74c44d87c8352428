# SPDX-License-Identifier: Apache-2.0
"""Training reads the same tokens from other spellings of the same proteins."""

from pathlib import Path

import numpy as np
import pytest

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.data.proteins.masking import MaskedDataset
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES

GENERATOR = np.random.default_rng(2)
TEXTS = ["".join(GENERATOR.choice(list("ACDEFGHIKLMNPQRSTVWY"), 400 - 23 * n)) for n in range(12)]


def opened(directory: Path, texts: list[str], kind: str, tokenizer: str) -> MaskedDataset:
    path = directory / "train" / f"x000.{kind}"
    path.parent.mkdir(parents=True)
    if kind == "fasta":
        path.write_text("".join(f">{n} a b\n{text}\n" for n, text in enumerate(texts)))
        overrides = ["data@model.data=fasta"]
    else:
        rows = [f"{n},a,{len(text)},{text}\n" for n, text in enumerate(texts)]
        path.write_text("record_id,record_name,sequence_length,sequence\n" + "".join(rows))
        overrides = []
    overrides += [f"model.data.dataset_path={directory}", "model.data.dataset.train=x000"]
    cfg = load("pretrain_small", overrides, EXAMPLES / "esm1nv" / "conf")
    return MaskedDataset.open(cfg.model, load_tokenizer(tokenizer), "train")


@pytest.mark.parametrize("tokenizer", ["esm1nv", "esm2nv"])
@pytest.mark.parametrize("kind", ["fasta", "csv"])
def test_tokens_do_not_depend_on_the_spelling(kind: str, tokenizer: str, tmp_path: Path) -> None:
    half = [text[:100].lower() + text[100:] for text in TEXTS]
    spelled = {
        "plain": TEXTS, "lower": half, "spaced": [" ".join(text) for text in TEXTS],
        "stops": [f"{text}*" for text in TEXTS],
    }  # fmt: skip
    datasets = {name: opened(tmp_path / name, texts, kind, tokenizer) for name, texts in spelled.items()}
    records, plain = np.arange(len(TEXTS)), datasets["plain"]
    expected = plain.tokenize(np.zeros_like(records), records)
    assert plain.notes == ()
    for name, dataset in datasets.items():
        found = dataset.tokenize(np.zeros_like(records), records)
        for one, other in (
            (found.inputs.ids, expected.inputs.ids), (found.inputs.lengths, expected.inputs.lengths),
            (found.target_ids, expected.target_ids), (dataset.lengths, plain.lengths),
        ):  # fmt: skip
            assert np.array_equal(one, other), name
        assert not found.unknown_counts.any()
        assert np.allclose(dataset.split.letter_frequencies, plain.split.letter_frequencies)
    (note,) = datasets["lower"].notes
    assert "lower-case letters, read as residues: 1,200 (in 12 of 12 sequences" in note


@pytest.mark.parametrize("kind", ["fasta", "csv"])
def test_special_tokens_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"x000.{kind}:\d+ contains '<mask>': special tokens are not read from text"):
        opened(tmp_path, [*TEXTS, "MK<mask>V"], kind, "esm2nv")
