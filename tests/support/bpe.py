# SPDX-License-Identifier: Apache-2.0
"""Small vocabularies in GPT-2's format, trained on a few texts."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXTS = [
    "The protein folds; the protein unfolds. They're here, we'll see 1234 of them\n\n  in the   end\t!",
    "Größe, naïve café — 蛋白質の構造 🧬🧬 été",
    "def fold(protein):\n    return protein.fold()\n",
]


def write_bpe(directory: Path, texts: Iterable[str] = TEXTS, size: int = 400) -> tuple[Path, Path]:
    """Train a vocabulary; return the paths of `vocab.json` and `merges.txt`."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    vocab = bpe.get_vocab(with_added_tokens=False)
    bpe.model.save(str(directory))
    vocab["<|endoftext|>"] = len(vocab)
    (directory / "vocab.json").write_text(json.dumps(vocab))
    return directory / "vocab.json", directory / "merges.txt"
