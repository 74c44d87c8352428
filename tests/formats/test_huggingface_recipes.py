# SPDX-License-Identifier: Apache-2.0
"""ESM-2 of bionemo-recipes: a Hugging Face directory with Transformer Engine's names and a padded vocabulary."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import EsmForMaskedLM

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, describe
from bionemo.formats.huggingface.directory import HuggingFaceModel
from tests.formats.archives import same
from tests.support.huggingface import SEQUENCES, check_same_logits, states, theirs

HEADS, LAYERS = 4, 2
CONFIG = {
    "model_type": "nv_esm", "architectures": ["NVEsmForMaskedLM"], "attn_input_format": "bshd", "attn_mask_type":
    "padding", "auto_map": {"AutoModelForMaskedLM": "esm_nv.NVEsmForMaskedLM"}, "encoder_activation": "gelu",
    "fuse_qkv_params": True, "qkv_weight_interleaved": True, "padded_vocab_size": 64, "max_seq_length": None,
}  # fmt: skip


def fused(model: EsmForMaskedLM, prefix: str, rows: int) -> dict[str, Tensor]:
    """Return the weights of EsmForMaskedLM under the names of NVEsmForMaskedLM, with a vocabulary of `rows` rows."""
    old = states(model)
    words, bias = old["esm.embeddings.word_embeddings.weight"], old["lm_head.bias"]
    table = torch.zeros(rows, words.shape[1])
    table[:33] = words
    least = torch.full((rows,), torch.finfo(torch.float32).min)
    least[:33] = bias
    new = {
        f"{prefix}embeddings.word_embeddings.weight": table,
        "lm_head.decoder.weight": table.clone(),
        "lm_head.decoder.bias": least,
        f"{prefix}encoder.rotary_embeddings.inv_freq": 10000 ** -(torch.arange(4) / 4),
        f"{prefix}encoder.layers.0.self_attention.proj._extra_state": torch.zeros(0, dtype=torch.uint8),
    }
    for kind in ("weight", "bias"):
        new[f"{prefix}encoder.emb_layer_norm_after.{kind}"] = old[f"esm.encoder.emb_layer_norm_after.{kind}"]
        new[f"lm_head.dense.{kind}"] = old[f"lm_head.dense.{kind}"]
        new[f"lm_head.decoder.layer_norm_{kind}"] = old[f"lm_head.layer_norm.{kind}"]
        for number in range(LAYERS):
            before, after = f"esm.encoder.layer.{number}.", f"{prefix}encoder.layers.{number}."
            heads = [old[f"{before}attention.self.{part}.{kind}"].chunk(HEADS) for part in ("query", "key", "value")]
            rows_by_head = [part[head] for head in range(HEADS) for part in heads]
            new[f"{after}self_attention.layernorm_qkv.{kind}"] = torch.cat(rows_by_head)
            for name, ours in {
                "self_attention.layernorm_qkv.layer_norm_": "attention.LayerNorm.",
                "self_attention.proj.": "attention.output.dense.", "layernorm_mlp.layer_norm_": "LayerNorm.",
                "layernorm_mlp.fc1_": "intermediate.dense.", "layernorm_mlp.fc2_": "output.dense.",
            }.items():  # fmt: skip
                new[f"{after}{name}{kind}"] = old[f"{before}{ours}{kind}"]
    return new


def recipes(path: Path, prefix: str = "model.", rows: int = 64, **settings: Any) -> EsmForMaskedLM:
    """Write a directory of bionemo-recipes; `model.` is the prefix since 2026, `esm.` the earlier one."""
    model = theirs(path, HEADS, layers=LAYERS)
    save_file(fused(model, prefix, rows), path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | CONFIG | {"padded_vocab_size": rows} | settings))
    return model


@pytest.mark.parametrize(("prefix", "rows"), [("model.", 64), ("esm.", 64), ("model.", 33), ("model.", 160)])
def test_round_trip(prefix: str, rows: int, tmp_path: Path) -> None:
    """Logits are those of EsmForMaskedLM, and the export has its names and bits."""
    model = recipes(tmp_path / "te", prefix, rows)
    check_same_logits(tmp_path / "te", model)
    convert(tmp_path / "te", tmp_path / "ours")
    for source in ("te", "ours"):
        convert(tmp_path / source, tmp_path / f"{source}.nemo")
    with pytest.raises(UserError, match="the source already has the Hugging Face format"):
        convert(tmp_path / "te", tmp_path / "again", "hf")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    again: Any = EsmForMaskedLM.from_pretrained(tmp_path / "again")
    found, expected = states(again), states(model)
    for name in ("weight", "bias"):  # the form has no contact head
        assert not found.pop(f"esm.contact_head.regression.{name}").any()
        expected.pop(f"esm.contact_head.regression.{name}")
    assert same(found, expected)
    assert "33 tokens" in describe(tmp_path / "te")


def test_the_tied_copy_may_be_missing_and_must_be_equal(tmp_path: Path) -> None:
    """safetensors does not write tensors that share memory twice."""
    model = recipes(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copy = tensors.pop("lm_head.decoder.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    check_same_logits(tmp_path, model, SEQUENCES[:1])
    save_file({**tensors, "lm_head.decoder.weight": copy + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.decoder\.weight differs from esm\.embeddings\.word_embeddings"):
        HuggingFaceModel(tmp_path)


def test_encoder_without_head(tmp_path: Path) -> None:
    recipes(tmp_path / "whole")
    recipes(tmp_path / "classes", architectures=["NVEsmForTokenClassification"])
    tensors = load_file(tmp_path / "classes" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file({**kept, "classifier.weight": torch.ones(2, 32)}, tmp_path / "classes" / "model.safetensors")
    whole, classes = (bionemo.load(tmp_path / name).embed(SEQUENCES) for name in ("whole", "classes"))
    np.testing.assert_array_equal(classes, whole)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"encoder_activation": "swiglu"}, "encoder_activation in its config.json is 'swiglu'; only gelu is supported"),
    ({"qkv_weight_interleaved": False}, "qkv_weight_interleaved in its config.json is 'False'; only True"),
    ({"fuse_qkv_params": False}, "fuse_qkv_params in its config.json is 'False'; only True is supported"),
    ({"attn_mask_type": "causal"}, "attn_mask_type in its config.json is 'causal'; only padding is supported"),
    ({"emb_layer_norm_before": True}, "emb_layer_norm_before in its config.json is 'True'; only False is supported"),
    ({"vocab_size": 64}, "vocab_size is '64'; in ESM-2's vocabulary it is 33"),
    ({"intermediate_size": 95}, "layernorm_mlp.fc1_weight has shape (96, 32), expected (95, 32)"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_unsupported_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    recipes(tmp_path, **settings)
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unexpected_weights(tmp_path: Path) -> None:
    """Weights are checked as those of EsmForMaskedLM; only the vocabulary of this form may have further rows."""
    recipes(tmp_path / "te")
    tensors = load_file(tmp_path / "te" / "model.safetensors")
    file = tmp_path / "te" / "model.safetensors"
    save_file({**tensors, "model.encoder.layers.0.query.weight": torch.ones(1)}, file)
    with pytest.raises(UserError, match=r"1 weights are unknown: 'esm\.encoder\.layers\.0\.query\.weight'"):
        HuggingFaceModel(tmp_path / "te")
    save_file(tensors | {"lm_head.decoder.bias": torch.ones(32)}, file)
    with pytest.raises(UserError, match=r"lm_head\.decoder\.bias has shape \(32,\), expected \(33,\)"):
        HuggingFaceModel(tmp_path / "te")
    theirs(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.ones(64)}, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.bias has shape \(64,\), expected \(33,\)"):
        HuggingFaceModel(tmp_path / "hf")
