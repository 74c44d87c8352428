# SPDX-License-Identifier: Apache-2.0
"""A tiny MegaMolBART that overfits six molecules in seconds."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from bionemo.checkpoint import tools
from bionemo.config.compose import load
from bionemo.data.batch import PackedBatch
from bionemo.data.dataset import TokenizedBatch, TokenSequences
from bionemo.models.megamolbart import MegaMolBART
from bionemo.tokenizers import SmilesTokenizer, load_tokenizer
from tests.support.runs import FAMILIES

KNOWN = ["CCO", "c1ccccc1", "CC(=O)Nc1ccccc1", "C1CCNCC1", "OB(O)c1ccccc1", "N#CCCl"]
ROOM = 24  # tokens
_SIZES = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.ffn_hidden_size=64",
          f"model.seq_length={ROOM}", "model.hidden_dropout=0", "model.attention_dropout=0"]  # fmt: skip
_STEPS = 80


def make_batch(model: MegaMolBART, texts: list[list[int]], sources: list[str]) -> PackedBatch:
    """Return decoder input and targets for already generated tokens; every position is a target."""
    vocabulary = model.vocabulary
    lengths = np.array([len(text) + 1 for text in texts])
    inputs = np.concatenate([[vocabulary.bos_id, *text] for text in texts])
    answers = np.concatenate([[*text, vocabulary.eos_id] for text in texts])
    read = [vocabulary.encode(text) for text in sources]
    source = TokenSequences(np.concatenate(read), np.array([len(each) for each in read]), ROOM)
    return TokenizedBatch(
        TokenSequences(inputs, lengths, ROOM), np.arange(len(inputs)), answers, source=source
    ).unpack()


def trained(path: Path) -> None:
    """Write a checkpoint of a model trained to reconstruct KNOWN."""
    family = FAMILIES["megamolbart"]
    cfg = load(family.name, [*family.overrides, *_SIZES], family.directory / "conf")
    vocabulary = load_tokenizer(MegaMolBART.tokenizer, cfg.model.tokenizer)
    assert isinstance(vocabulary, SmilesTokenizer)
    model = MegaMolBART(cfg.model, vocabulary)
    model.initialize_weights(seed=1)
    batch = make_batch(model, [vocabulary.encode(text).tolist() for text in KNOWN], KNOWN)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(_STEPS):
        loss = F.cross_entropy(model(batch), batch.target_ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    config = asdict(cfg.model)
    known = {"model._target_": config["_target_"], "words": vocabulary.vocab_size}
    tools.write_weights(path, {"config": config, "model": known}, dict(model.named_parameters()).items())
