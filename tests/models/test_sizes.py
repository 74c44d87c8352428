# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration builds, and has as many parameters as its predecessor; on the meta device."""

from pathlib import Path

import pytest
import torch

from bionemo.config.compose import load
from bionemo.config.paths import options
from bionemo.models.build import model_class
from bionemo.models.language_model import LanguageModel
from bionemo.tokenizers import load_tokenizer
from tests.conftest import PRETRAINING

RUNNABLE = [(path, name) for path in PRETRAINING for name in options(path)]

# v1's own tests, with the vocabulary padded to 128
COUNTS = {
    "pretrain_small": 43_612_544,
    "pretrain_esm2_8M": 7_542_848,
    "pretrain_esm2_650M": 651_164_288,
    "pretrain_esm2_3B": 2_839_247_488,
    "pretrain_esm2_15B": 15_129_584_768,
}


def build(directory: Path, name: str) -> LanguageModel:
    cfg = load(name, [], directory)
    kind = model_class(cfg.model._target_)
    with torch.device("meta"):
        return kind(cfg.model, load_tokenizer(kind.tokenizer, cfg.model.tokenizer))


@pytest.mark.parametrize(("directory", "name"), RUNNABLE, ids=[name for _, name in RUNNABLE])
def test_every_runnable_configuration_builds(directory: Path, name: str) -> None:
    model = build(directory, name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.word_embeddings.num_embeddings == 128
    assert count == COUNTS.get(name, count)
    assert count > 500_000


def test_every_counted_size_is_shipped() -> None:
    assert set(COUNTS) <= {name for _, name in RUNNABLE}
