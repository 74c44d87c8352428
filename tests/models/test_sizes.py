# SPDX-License-Identifier: Apache-2.0
"""Every shipped configuration builds on the meta device and agrees with the table in conf/README.md."""

import re
from pathlib import Path

import pytest
import torch

from bionemo.config.compose import load
from bionemo.config.paths import CONF_DIR
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.conftest import RUNNABLE

ROW = re.compile(r"\| (\w+) \| `(\S+)` \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|")
TABLE = {
    (example, name): tuple(int(number.replace(",", "")) for number in numbers)
    for example, name, *numbers in ROW.findall((CONF_DIR / "README.md").read_text())
}

# From v1's tests, with the vocabulary padded to 128; 126m is OpenAI's GPT-2 with padding and 2,048 positions
COUNTS = {
    ("esm1nv", "pretrain_small"): 43_612_544,
    ("esm2nv", "pretrain_esm2_8M"): 7_542_848,
    ("esm2nv", "pretrain_esm2_650M"): 651_164_288,
    ("esm2nv", "pretrain_esm2_3B"): 2_839_247_488,
    ("esm2nv", "pretrain_esm2_15B"): 15_129_584_768,
    ("prott5nv", "pretrain_small"): 198_970_496,
    ("megamolbart", "pretrain_xsmall_span_aug"): 4_047_872,
    ("megamolbart", "downstream_retro_uspto50k"): 45_058_048,
    ("gpt3", "pretrain_gpt3_126m"): 124_439_808 + (50304 - 50257 + 2048 - 1024) * 768,
}


@pytest.mark.parametrize(
    ("directory", "name"), RUNNABLE, ids=[f"{path.parent.name}-{name}" for path, name in RUNNABLE]
)
def test_every_runnable_configuration_agrees_with_the_table(directory: Path, name: str) -> None:
    cfg = load(name, [], directory)
    kind = load_model_class(cfg.model._target_)
    with torch.device("meta"):
        model = kind(cfg.model, load_tokenizer(kind.tokenizer, cfg.model.tokenizer))
    assert all(parameter.is_meta for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    sizes = (cfg.model.num_layers, cfg.model.hidden_size, cfg.model.num_attention_heads, cfg.model.seq_length)
    assert TABLE[directory.parent.name, name] == (*sizes, count)
    assert count == COUNTS.get((directory.parent.name, name), count)


def test_the_table_lists_all_configurations() -> None:
    assert set(TABLE) == {(path.parent.name, name) for path, name in RUNNABLE}
    assert set(COUNTS) <= set(TABLE)
