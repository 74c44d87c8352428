# SPDX-License-Identifier: Apache-2.0
"""ESMC in the Hugging Face format: bitwise round trips and equal logits, hidden states and tokens."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, EsmcConfig, EsmcForMaskedLM, EsmcTokenizer, pipeline

import bionemo
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.formats.convert import convert
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.formats.archives import same
from tests.support.huggingface import SEQUENCES, check_same_logits, states
from tests.support.runs import config, last_checkpoint, read_weights, train

CHAINS = "MKTAYIAKQR|ACDEFGHIKL"
FORM: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 98, "initializer_range": 0.1,
}  # fmt: skip


def esmc(path: Path, **settings: Any) -> EsmcForMaskedLM:
    """Save a small ESMC with random weights, also in norms and biases."""
    torch.manual_seed(0)
    model = EsmcForMaskedLM(EsmcConfig(**(FORM | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("shards", ["one file", "shards"])
def test_round_trip(shards: str, tmp_path: Path) -> None:
    """Weights and logits are equal after every conversion."""
    model = esmc(tmp_path / "theirs")
    if shards == "shards":
        model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
        (tmp_path / "theirs" / "model.safetensors").unlink()
    convert(tmp_path / "theirs", tmp_path / "ours")
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        check_same_logits(path, model, [*SEQUENCES, CHAINS])
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    loaded: Any = EsmcForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    again, message = loaded
    assert not any(message[key] for key in message)
    assert same(states(again), states(model))
    differences = again.config.to_diff_dict().items() ^ model.config.to_diff_dict().items()
    assert {key for key, _ in differences} <= {
        "transformers_version",
        "dtype",
        "_name_or_path",
        "make_vocab_size_divisible_by",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_files(dtype: torch.dtype, tmp_path: Path) -> None:
    model: Any = esmc(tmp_path)
    model.to(dtype).save_pretrained(tmp_path)
    check_same_logits(tmp_path, EsmcForMaskedLM.from_pretrained(tmp_path, dtype=torch.float32).eval())


def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of EsmcForMaskedLM as the package esm 3.4 does."""
    names = {
        "embed_tokens": "embed", "esmc.norm": "esmc.transformer.norm", "layers": "transformer.blocks",
        "self_attn.q_norm": "attn.q_ln", "self_attn.k_norm": "attn.k_ln", "self_attn.o_proj": "attn.out_proj",
        "input_layernorm.": "attn.layernorm_qkv.layer_norm_", "post_attention_layernorm.": "ffn.layer_norm_",
        "mlp.down_proj.weight": "ffn.fc2_weight", "head.dense": "head.0", "head.layer_norm": "head.2",
        "head.decoder": "head.3",
    }  # fmt: skip
    fused = {"attn.layernorm_qkv.weight": "q_proj k_proj v_proj", "ffn.fc1_weight": "gate_proj up_proj"}
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = next((new for new, parts in fused.items() if name.split(".")[-2] in parts.split()), None)
        if part is not None:
            whole = f"esmc.transformer.blocks.{name.split('.')[2]}.{part}"
            found[whole] = torch.cat([found[whole], tensor]) if whole in found else tensor
            continue
        renamed = functools.reduce(lambda text, pair: text.replace(*pair), names.items(), name)
        found[renamed] = tensor
    return found


@pytest.mark.parametrize("prefix", ["esmc.", ""], ids=["language model", "encoder"])
def test_files_of_the_package_esm(prefix: str, tmp_path: Path) -> None:
    """Fused weights and other keys in config.json, from which transformers would load a random model."""
    model = esmc(tmp_path / "theirs", intermediate_size=256)
    tensors = fuse(model.state_dict())
    assert len(tensors) == 2 + 6 + 3 * 10
    tensors["esmc.transformer.blocks.0.attn.layernorm_qkv._extra_state"] = torch.zeros(0, dtype=torch.uint8)
    if not prefix:
        tensors = {k.removeprefix("esmc."): tensor for k, tensor in tensors.items() if not k.startswith("lm_head")}
    (tmp_path / "fused").mkdir()
    save_file(tensors, tmp_path / "fused" / "model.safetensors")
    settings = {"model_type": "esmc", "d_model": 32, "n_heads": 4, "n_layers": 3}
    (tmp_path / "fused" / "config.json").write_text(json.dumps(settings))
    if prefix:
        check_same_logits(tmp_path / "fused", model)
    expected, found = (bionemo.load(tmp_path / each).embed(SEQUENCES) for each in ("theirs", "fused"))
    np.testing.assert_array_equal(found, expected)


def test_hidden_states(tmp_path: Path) -> None:
    model, ours = esmc(tmp_path), bionemo.load(tmp_path)
    tokens = EsmcTokenizer()(CHAINS)["input_ids"]
    assert tokens == [0, *ours.ids([CHAINS])[0].tolist(), 2]
    with torch.no_grad():
        hidden = model.esmc(torch.tensor([tokens])).last_hidden_state[0, 1:-1]
    np.testing.assert_allclose(ours.embed([CHAINS])[0], hidden.mean(0), rtol=0, atol=1e-5)


def test_written_files(tmp_path: Path) -> None:
    model = esmc(tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", "hf")
    assert set(os.listdir(tmp_path / "hf")) == {
        "README.md", "config.json", "model.safetensors", "tokenizer_config.json",
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("MK|JA<mask>")["input_ids"] == [0, 20, 15, 31, 3, 5, 32, 2]
    assert tokenizer.model_max_length == 98
    found = pipeline("fill-mask", str(tmp_path / "hf"))("MKTA<mask>IAK", top_k=1)[0]
    with torch.no_grad():
        logits = model(torch.tensor([[0, 20, 15, 11, 5, 32, 12, 5, 15, 2]])).logits[0, 5]
    assert found["token"] == int(logits.argmax())
    assert found["score"] == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)


@pytest.mark.parametrize(("size", "count"), [("300M", 332_997_184), ("600M", 575_036_992), ("6B", 6_352_005_184)])
def test_parameter_counts_of_the_published_models(size: str, count: int) -> None:
    cfg: Any = load(f"pretrain_esmc_{size}", [], EXAMPLES / "esmc" / "conf").model
    kind = load_model_class(cfg._target_)
    with torch.device("meta"):
        model = kind(cfg, load_tokenizer(kind.tokenizer))
        reference = EsmcForMaskedLM(
            EsmcConfig(
                hidden_size=cfg.hidden_size, num_hidden_layers=cfg.num_layers,
                num_attention_heads=cfg.num_attention_heads, intermediate_size=cfg.ffn_hidden_size,
            )
        )  # fmt: skip
    assert [sum(each.numel() for each in network.parameters()) for network in (model, reference)] == [count, count]


def test_training(tmp_path: Path) -> None:
    """Train from scratch, then from the Hugging Face format."""
    overrides = ("trainer.max_steps=3", "trainer.val_check_interval=3", "model.optim.sched.warmup_steps=1")
    train(config(tmp_path / "first", *overrides, model="esmc"))
    trained = read_weights(last_checkpoint(tmp_path / "first"))
    convert(last_checkpoint(tmp_path / "first"), tmp_path / "hf", "hf")
    check_same_logits(tmp_path / "hf", EsmcForMaskedLM.from_pretrained(tmp_path / "hf").eval(), SEQUENCES[:1])
    train(config(tmp_path / "next", *overrides, f"restore_from_path={tmp_path / 'hf'}", model="esmc"))
    after = read_weights(last_checkpoint(tmp_path / "next"))
    assert after.keys() == trained.keys()
    assert not any(torch.equal(after[name], weight) for name, weight in trained.items() if weight.dim() == 2)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 33}, "vocab_size is '33'; only 64 is supported"),
    ({"num_key_value_heads": 2}, "num_key_value_heads is '2'; only 4 is supported"),
    ({"head_dim": 16}, "head_dim is '16'; only 8 is supported"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters is \"{'rope_type': 'default'"),
    ({"rope_parameters": [1]}, "rope_parameters is '[1]'; only {'rope_type': 'default', 'rope_theta': 10000.0} is s"),
    ({"hidden_act": "gelu"}, "hidden_act in its config.json is 'gelu'; only silu is supported"),
    ({"mlp_bias": True}, "mlp_bias in its config.json is 'True'; only False is supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings in its config.json is 'True'; only False is supported"),
    ({"intermediate_size": 95}, "esmc.layers.0.mlp.gate_proj.weight has shape (96, 32), expected (95, 32)"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_unsupported_settings(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    esmc(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | settings))
    with pytest.raises(UserError) as caught:
        HuggingFaceModel(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["model.activation=gelu", "model.layernorm_epsilon=1e-6", "model.kv_channels=4"])
def test_models_that_transformers_cannot_express(override: str, tmp_path: Path) -> None:
    train(config(tmp_path / "run", "trainer.max_steps=1", "trainer.val_check_interval=1", override, model="esmc"))
    with pytest.raises(UserError, match=r"that of ESMC is|head size is 4"):
        convert(last_checkpoint(tmp_path / "run"), tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
