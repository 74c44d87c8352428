# SPDX-License-Identifier: Apache-2.0
"""Adapters with random values, written by peft."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import EsmForMaskedLM


def attach(base: Path, adapter: Path, kind: Any = EsmForMaskedLM) -> PeftModel:
    """Open a base and its adapter with peft; other classes than `kind` are possible, as for AutoModel."""
    model = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=torch.float32), adapter)
    return model.eval()


def adapt(path: Path, base: Path, kind: Any = EsmForMaskedLM, **settings: Any) -> PeftModel:
    """Write an adapter of random values to `path`, and return it with its base, opened again.

    `settings` are those of LoraConfig.
    """
    torch.manual_seed(1)
    config = LoraConfig(**({"init_lora_weights": False, "target_modules": ["query", "value"]} | settings))
    get_peft_model(kind.from_pretrained(base, dtype=torch.float32), config).save_pretrained(path)
    return attach(base, path, kind)


def change_config(path: Path, **settings: Any) -> None:
    """Change keys of adapter_config.json; a value of None removes the key."""
    file = path / "adapter_config.json"
    found = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
