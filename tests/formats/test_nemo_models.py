# SPDX-License-Identifier: Apache-2.0
"""`.nemo` archives of encoder-decoders and GPT: names, ranks and logits."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.formats.nemo_archive import read, write
from bionemo.formats.nemo_models import get_nemo_model
from bionemo.formats.safe_load import load_settings, load_tensors, open_tar
from bionemo.models.language_model import load_model_class
from bionemo.tokenizers import load_tokenizer
from tests.formats.archives import archive, as_yaml, entry, nemo_state, same, saved, tar
from tests.support.models import assert_close, batch_of, build_model, pad_rows
from tests.support.reference_models import TorchSeq2Seq, split_qkv
from tests.support.runs import FAMILIES

TARGETS = {
    "prott5nv": "bionemo.model.protein.prott5nv.prott5_model.ProtT5nvModel",
    "megamolbart": "bionemo.model.molecule.megamolbart.megamolbart_model.MegaMolBARTModel",
    "gpt3": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
}
PAIRS = ["prott5nv", "megamolbart"]
# Transcribed from NeMo's T5 converter and encoder-decoder module; layer 0 stands for all.
LAYER = ["input_layernorm", "self_attention.query_key_value", "self_attention.dense", "post_attention_layernorm",
         "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]  # fmt: skip
CROSS = ["inter_attention.query", "inter_attention.key_value", "inter_attention.dense",
         "post_inter_attention_layernorm"]  # fmt: skip
PAIR_MODULES = [
    *(f"encoder.model.layers.0.{module}" for module in LAYER),
    *(f"decoder.model.layers.0.{module}" for module in LAYER + CROSS),
    "encoder.model.final_layernorm",
    "decoder.model.final_layernorm",
]
KINDS = ("weight", "bias")
PAIR_NAMES = {
    *(f"enc_dec_model.enc_dec_model.{module}.{kind}" for module in PAIR_MODULES for kind in KINDS),
    *(f"enc_dec_model.{end}coder_embedding.{table}_embeddings.weight"
      for end in ("en", "de") for table in ("word", "position")),
}  # fmt: skip
V1_NAMES = {
    "prott5nv": PAIR_NAMES | {"enc_dec_model.tokens_head.bias"},
    "megamolbart": PAIR_NAMES | {"enc_dec_model.tokens_head.weight"},
    "gpt3": {
        "model.language_model.embedding.word_embeddings.weight",
        "model.language_model.embedding.position_embeddings.weight",
        "model.language_model.encoder.final_layernorm.weight",
        "model.language_model.encoder.final_layernorm.bias",
        *(f"model.language_model.encoder.layers.0.{m}.{kind}" for m in LAYER for kind in KINDS),
    },
}


def tiny(name: str, layers: int = 1) -> dict[str, Any]:
    """Return the keys of a v1 configuration that are read; output embeddings are tied as in v1."""
    return {
        "target": TARGETS[name], "hidden_size": 8, "num_attention_heads": 2, "kv_channels": None,
        "ffn_hidden_size": 16, "num_layers": layers, "max_position_embeddings": 6,
        "make_vocab_size_divisible_by": 128, "share_decoder_tokens_head_embeddings": name != "megamolbart",
        "tokenizer": {"num_sentinel_tokens": 96 if name == "prott5nv" else None},
    }  # fmt: skip


def weights_of(config: dict[str, Any]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    table = get_nemo_model(config).weights(config)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_weight_table_matches_the_model(name: str) -> None:
    family = FAMILIES[name]
    small = ["model.hidden_size=48", "model.seq_length=64", "model.num_layers=2", "model.num_attention_heads=4"]
    cfg = load(family.name, [*family.overrides, *small], family.directory / "conf").model
    kind = load_model_class(cfg._target_)
    vocabulary = load_tokenizer(kind.tokenizer, cfg.tokenizer)
    with torch.device("meta"):
        model = kind(cfg, vocabulary)
    names = get_nemo_model(asdict(cfg))
    config = names.with_vocab_size(asdict(cfg), vocabulary.vocab_size)
    shapes = {key: weight.shape for key, weight in names.weights(config).items()}
    assert shapes == {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert (names.our_class, names.nemo_class, names.read_vocab_size(config)) == (
        cfg._target_,
        TARGETS[name],
        vocabulary.vocab_size,
    )


@pytest.mark.parametrize("name", TARGETS)
def test_written_names_and_round_trip(name: str, tmp_path: Path) -> None:
    config = {
        **tiny(name),
        "_target_": get_nemo_model(tiny(name)).our_class,
        "normalization": None,
        "activation": "gelu_tanh",
    }
    del config["target"]
    weights = weights_of(config)
    write(tmp_path / "x.nemo", config, weights)
    with open_tar(tmp_path / "x.nemo") as members:
        state = load_tensors(members["model_weights.ckpt"])
        settings = load_settings(members["model_config.yaml"])
        size = members["model_weights.ckpt"].seek(0, 2)
    assert set(state) == V1_NAMES[name]
    assert settings["target"] == TARGETS[name]
    assert settings["normalization"] == "layernorm"
    assert (settings["activation"], settings["openai_gelu"], settings["bias_gelu_fusion"]) == ("gelu", True, False)
    once = sum(weight.nbytes for weight in weights.values())
    assert size < once + 40_000  # tables with two names are stored once
    found = read(tmp_path / "x.nemo")
    assert same(found.weights, weights)
    assert get_nemo_model(found.config).to_our_config(found.config)["activation"] == "gelu_tanh"


COLUMNS = re.compile(r"(attention\.dense|dense_4h_to_h)\.weight")
ROWS = re.compile(r"(query_key_value|inter_attention\.query|key_value|dense_h_to_4h)\.|tokens_head|word_embeddings")


def part(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the part of a tensor rank; the vocabulary is padded to equal parts."""
    if re.search("tokens_head|word_embeddings", name):
        whole = torch.cat([whole, torch.full((128 * ranks - len(whole) % (128 * ranks), *whole.shape[1:]), 7.0)])
    if COLUMNS.search(name):
        return whole.chunk(ranks, 1)[rank].clone()
    return whole.chunk(ranks, 0)[rank].clone() if ROWS.search(name) else whole


def stage_of(name: str, layers: int, encoders: int, decoders: int) -> tuple[int, str]:
    """Return the pipeline stage of a weight and its name there."""
    decodes = "decoder" in name or "tokens_head" in name
    first, stages = (encoders, decoders) if decodes else (0, encoders)
    if layer := re.search(r"layers\.(\d+)\.", name):
        stage, local = divmod(int(layer[1]), layers // stages)
        return first + stage, name.replace(layer[0], f"layers.{local}.")
    return first + (0 if "embedding" in name else stages - 1), name


@pytest.mark.parametrize("split", [(1, 1), (1, 2), (2, 1), (2, 2)], ids="encoder{0[0]}-decoder{0[1]}".format)
@pytest.mark.parametrize("ranks", [1, 2], ids="tp{}".format)
def test_pipeline_stages_of_encoder_and_decoder_are_merged(ranks: int, split: tuple[int, int], tmp_path: Path) -> None:
    config = tiny("prott5nv", layers=4)
    weights = weights_of(config)
    folders: dict[str, dict[str, Tensor]] = {}
    for name, whole in nemo_state(config, weights).items():
        stage, local = stage_of(name, 4, *split)
        for rank in range(ranks):
            held = folders.setdefault(f"tp_rank_{rank:02d}_pp_rank_{stage:03d}", {})
            held[local] = part(name, whole, rank, ranks)
            if "encoder_embedding.word" in name and stage == 0:
                last = folders.setdefault(f"tp_rank_{rank:02d}_pp_rank_{sum(split) - 1:03d}", {})
                last["enc_dec_model.word_embeddings.weight"] = held[local]
    members = [entry(f"./{folder}/model_weights.ckpt", saved(held)) for folder, held in folders.items()]
    assert len(members) == ranks * sum(split)
    assert same(read(tar(tmp_path / "x", [entry("./model_config.yaml", as_yaml(config)), *members])).weights, weights)


@pytest.mark.parametrize("name", ["megamolbart", "gpt3"])
def test_tensor_ranks_of_other_models_are_merged(name: str, tmp_path: Path) -> None:
    config = tiny(name, layers=2)
    weights = weights_of(config)
    state = nemo_state(config, weights)
    members = [
        entry(f"./mp_rank_{rank:02d}/model_weights.ckpt", saved({k: part(k, v, rank, 2) for k, v in state.items()}))
        for rank in range(2)
    ]
    assert same(read(tar(tmp_path / "x", [entry("./model_config.yaml", as_yaml(config)), *members])).weights, weights)


@pytest.mark.parametrize("ours_first", [True, False])
def test_separate_embeddings_are_refused(ours_first: bool, tmp_path: Path) -> None:
    config = tiny("megamolbart")
    state = nemo_state(config, weights_of(config))
    key = f"enc_dec_model.{'decoder' if ours_first else 'encoder'}_embedding.word_embeddings.weight"
    state[key] = state[key] + 1
    with pytest.raises(UserError, match="separate embeddings are not supported"):
        read(archive(tmp_path / "x", as_yaml(config), saved(state)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("prott5nv", {"tokenizer": {"num_sentinel_tokens": 200}}, "has shape (128, 8), expected (256, 8)"),
        ("prott5nv", {"tokenizer": {"num_sentinel_tokens": "96"}}, "num_sentinel_tokens in its configuration is not"),
        ("megamolbart", {"share_decoder_tokens_head_embeddings": True}, "1 weights are unknown: 'enc_dec_model.to"),
        ("megamolbart", {"decoder": {"megatron_legacy": True}}, "in its configuration is 'True'; only False"),
        ("prott5nv", {"encoder": {"transformer_block_type": "post_ln"}}, "'post_ln'; only pre_ln is supported"),
        ("gpt3", {"mcore_gpt": True}, "mcore_gpt in its configuration is 'True'; only False is supported"),
        ("gpt3", {"activation": "swiglu"}, "activation in its configuration is 'swiglu'; only gelu is supported"),
        ("gpt3", {"num_layers": 2}, "12 weights are missing: 'decoder.layers.1.input_layernorm.weight'"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny(name)
    state = nemo_state(config, weights_of(config))
    with pytest.raises(UserError, match=re.escape(message)):
        read(archive(tmp_path / "x", as_yaml(config | change), saved(state)))


def test_default_number_of_sentinels() -> None:
    config = tiny("prott5nv")
    del config["tokenizer"]
    assert get_nemo_model(config).read_vocab_size(config) == 126


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ({}, "gelu_tanh"),  # v1's kernel with fused bias uses the tanh approximation
        ({"bias_gelu_fusion": False}, "gelu"),
        ({"bias_activation_fusion": False, "openai_gelu": True}, "gelu_tanh"),
        ({"bias_gelu_fusion": True, "esm_gelu": True}, "gelu"),
        ({"activation": "swiglu"}, "swiglu"),
    ],
)
def test_activation_of_nemo_configurations(text: dict[str, Any], meant: str) -> None:
    config = {"activation": "gelu", **tiny("gpt3"), **text}
    assert get_nemo_model(config).to_our_config(config)["activation"] == meant


def to_torch(state: dict[str, Tensor], heads: int, vocab_size: int) -> dict[str, Tensor]:
    """Translate NeMo's names to those of torch's layers; NeMo names a norm after the preceding module."""
    state = {name.removeprefix("enc_dec_model."): value for name, value in state.items()}
    result = {
        "words.weight": state["decoder_embedding.word_embeddings.weight"][:vocab_size],
        "positions.weight": state["encoder_embedding.position_embeddings.weight"],
    }
    for kind, name in (("bias", "bias"), ("weight", "output.weight")):
        if f"tokens_head.{kind}" in state:
            result[name] = state[f"tokens_head.{kind}"][:vocab_size]
    norms = {"encoder": ["input", "post_attention"], "decoder": ["input", "post_attention", "post_inter_attention"]}
    plain = {"self_attention.dense": "self_attn.out_proj", "inter_attention.dense": "multihead_attn.out_proj",
             "mlp.dense_h_to_4h": "linear1", "mlp.dense_4h_to_h": "linear2"}  # fmt: skip
    for name, value in state.items():
        if found := re.fullmatch(r"enc_dec_model\.(\w+)\.model\.(?:layers\.(\d+)\.)?(.+)\.(weight|bias)", name):
            stack, number, module, kind = found.groups()
            to = f"{stack}.{number}"
            if module == "final_layernorm":
                result[f"{stack}_norm.{kind}"] = value
            elif module.endswith("_layernorm"):
                place = 1 + norms[stack].index(module.removesuffix("_layernorm"))
                result[f"{to}.norm{place}.{kind}"] = value
            elif module == "self_attention.query_key_value":
                result[f"{to}.self_attn.in_proj_{kind}"] = torch.cat(split_qkv(value, heads))
            elif module == "inter_attention.key_value":
                query = state[name.replace("key_value", "query")]
                result[f"{to}.multihead_attn.in_proj_{kind}"] = torch.cat([query, *split_qkv(value, heads, 2)])
            elif module in plain:
                result[f"{to}.{plain[module]}.{kind}"] = value
    return result


@pytest.mark.parametrize("name", PAIRS)
def test_written_weights_give_equal_logits_in_a_model_with_nemo_names(name: str, tmp_path: Path) -> None:
    model = build_model(name).eval()
    config, vocab_size = model.config, model.vocabulary.vocab_size
    write(tmp_path / "x.nemo", asdict(config), dict(model.named_parameters()))
    with open_tar(tmp_path / "x.nemo") as members:
        state = load_tensors(members["model_weights.ckpt"])
        assert yaml.safe_load(members["model_config.yaml"].read())["bias_activation_fusion"] is False
    reference = TorchSeq2Seq(config, vocab_size).eval()
    reference.load_state_dict(to_torch(state, config.num_attention_heads, vocab_size))
    batch = batch_of(model, 3)
    assert batch.source is not None
    (tokens, padding), source = pad_rows(batch), pad_rows(batch.source)
    with torch.no_grad():
        assert_close(model(batch)[:, :vocab_size], reference(*source, tokens, padding)[~padding])


def test_a_gated_model_is_not_written() -> None:
    """NeMo has two matrices in place of one."""
    config = tiny("gpt3") | {"activation": "swiglu"}
    with pytest.raises(UserError, match="activation in its configuration is 'swiglu'; only gelu is supported"):
        get_nemo_model(config).to_nemo_config(config)
