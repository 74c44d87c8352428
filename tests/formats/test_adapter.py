# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft are read as their base with merged weights: equal logits, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BlenderbotForConditionalGeneration,
    EsmcConfig,
    EsmcForMaskedLM,
    EsmForMaskedLM,
    EsmForTokenClassification,
    EsmModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MegatronBertForMaskedLM,
)

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, describe, open_model
from bionemo.training.resume import open_initial_weights
from tests.formats.archives import same
from tests.support.adapters import adapt, attach, change_config
from tests.support.huggingface import check_same_logits, states, theirs
from tests.support.runs import config, last_checkpoint, train

FILE, WHOLE = "adapter_model.safetensors", "model.safetensors"
SEQUENCES = ["MKTAYIAKQR", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 2]
LEARNED = {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "max_position_embeddings": 100}


def esm2(path: Path) -> Any:
    theirs(path)
    return EsmForMaskedLM


def esm1b(path: Path) -> Any:
    theirs(path, **LEARNED)
    return EsmForMaskedLM


def esmc(path: Path) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
        "max_position_embeddings": 98, "initializer_range": 0.1,
    }  # fmt: skip
    EsmcForMaskedLM(EsmcConfig(**sizes)).save_pretrained(path)
    return EsmcForMaskedLM


def gpt2(path: Path) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.1)).save_pretrained(path)
    return GPT2LMHeadModel


def trained(path: Path, model: str, *overrides: str) -> None:
    run = path.with_name("run")
    train(config(run, "trainer.max_steps=1", "trainer.val_check_interval=1", *overrides, model=model))
    convert(last_checkpoint(run), path, "hf")


def megatron_bert(path: Path) -> Any:
    trained(path, "esm1nv")
    return MegatronBertForMaskedLM


def blenderbot(path: Path) -> Any:
    trained(path, "prott5nv", "model.share_decoder_tokens_head_embeddings=False")
    return BlenderbotForConditionalGeneration


CASES: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "query and value": (esm2, {}),
    "all": (esm2, {"target_modules": "all-linear"}),
    "expression": (esm2, {"target_modules": r".*\.1\.attention\.self\.(key|value)", "r": 3}),
    "excluded": (esm2, {"target_modules": ["key", "dense"], "exclude_modules": ["output.dense"]}),
    "patterns": (
        esm2, {
            "target_modules": ["query", "key", "dense"], "r": 4, "lora_alpha": 3,
            "rank_pattern": {"query": 2, r"layer\.0\.attention\.self\.key": 5},
            "alpha_pattern": {"dense": 2, r"esm\.encoder\.layer\.1\.intermediate\.dense": 16, "self.quer.": 5.5},
        },
    ),
    "rslora": (esm2, {"use_rslora": True, "r": 6, "lora_alpha": 2, "rank_pattern": {"value": 2}}),
    "esm1b": (esm1b, {"target_modules": ["key", "intermediate.dense"]}),
    "esmc": (esmc, {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj", "o_proj"], "r": 2}),
    "own decoder": (esmc, {"target_modules": ["gate_proj", "decoder"], "r": 2}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "r": 2}),
    "corrected": (gpt2, {"target_modules": ["c_proj"], "fan_in_fan_out": False, "rank_pattern": {"attn.c_proj": 3}}),
    "megatron bert": (megatron_bert, {"target_modules": ["query", "dense"], "r": 2}),
    "blenderbot": (blenderbot, {"target_modules": ["q_proj", "v_proj", "fc1"], "r": 2}),
}  # fmt: skip


def logits(model: Any) -> Tensor:
    """Return the logits of a batch with padding."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(4, 24, (2, 20), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    more = {"decoder_input_ids": tokens[:, :7]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: Tensor = model(tokens, attention_mask=mask, **more).logits
    return found if more else found[mask.bool()]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftModel, Any]:
    """Return the path of an adapter, peft's model, and the class of the base."""
    path = tmp_path_factory.mktemp("case")
    write, settings = CASES[request.param]
    kind = write(path / "base")
    return path / "adapter", adapt(path / "adapter", path / "base", kind, **settings), kind


def test_merged_weights(case: tuple[Path, PeftModel, Any], tmp_path: Path) -> None:
    """As transformers' model, with the logits of peft before merging, and nearly bitwise those of merge_and_unload."""
    path, model, kind = case
    convert(path, tmp_path / "hf", "hf")
    merged = kind.from_pretrained(tmp_path / "hf").eval()
    base = kind.from_pretrained(path.with_name("base")).eval()
    expected = logits(model)
    scale = float(expected.abs().max())
    contacts = {"esm.contact_head.regression.weight"}  # which is not part of the network
    assert (expected - logits(base)).abs().max() > 1e-2 * scale
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-5 * scale)
    unloaded: Any = model.merge_and_unload()
    assert states(merged).keys() == states(unloaded).keys()
    for name in states(merged).keys() - contacts:
        torch.testing.assert_close(states(merged)[name], states(unloaded)[name], rtol=0, atol=1e-7)
    torch.testing.assert_close(logits(merged), logits(unloaded), rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("write", [esm2, esm1b, esmc])
@pytest.mark.parametrize("target", ["all-linear", r".*\.0\..*(query|q_proj)"])
def test_logits_of_our_network(write: Callable[[Path], Any], target: str, tmp_path: Path) -> None:
    kind = write(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base", kind, target_modules=target)
    check_same_logits(tmp_path / "adapter", model)
    check_same_logits(tmp_path / "adapter", model.merge_and_unload())


@pytest.mark.parametrize("write", [esm2, esmc, gpt2])
def test_a_bf16_base_is_rounded_once(write: Callable[[Path], Any], tmp_path: Path) -> None:
    """Bitwise the weights that peft merges; the adapter itself is in fp32. Logits are computed in fp32."""
    kind = write(tmp_path / "fp32")
    kind.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    ends = ["query", "dense", "c_attn", "c_proj", "q_proj", "gate_proj", "down_proj"]
    ends = [end for end in ends if any(f"{end}.weight" in name for name in load_file(tmp_path / "base" / WHOLE))]
    adapt(tmp_path / "adapter", tmp_path / "base", kind, target_modules=ends)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter" / FILE).values()} == {torch.float32}
    model = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    convert(tmp_path / "adapter", tmp_path / "hf", "hf")
    merged = kind.from_pretrained(tmp_path / "hf").eval()
    assert merged.dtype == torch.bfloat16
    unloaded: Any = PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert same(states(merged), states(unloaded.merge_and_unload()))
    before = logits(model.float())
    torch.testing.assert_close(logits(merged.float()), before, rtol=0, atol=2e-2 * float(before.abs().max()))


CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (EsmModel, {"target_modules": "all-linear"}), (EsmModel, {"target_modules": ["query"], "r": 2}),
    (EsmForTokenClassification, {"task_type": "TOKEN_CLS", "target_modules": ["query", "dense"]}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings"), CLASSES)
def test_adapters_of_other_classes(
    kind: Any, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their names lack the prefix of the encoder, or there is a classifier, which is noted."""
    theirs(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base", kind, **settings)
    encoder = model.base_model.model if kind is EsmModel else model.base_model.model.esm
    convert(tmp_path / "adapter", tmp_path / "hf", "hf")
    tokens = torch.tensor([[0, 20, 15, 11, 5, 19, 12, 2]])
    with torch.no_grad():
        expected, found = (
            each(tokens).last_hidden_state for each in (encoder, EsmModel.from_pretrained(tmp_path / "hf"))
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert ("the weights of 'classifier' are not used" in caplog.text) == (kind is EsmForTokenClassification)


def test_names_without_the_prefix_of_peft(tmp_path: Path) -> None:
    theirs(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base")
    tensors = load_file(tmp_path / "adapter" / FILE)
    bare = {name.removeprefix("base_model.model."): each for name, each in tensors.items()}
    save_file(bare, tmp_path / "adapter" / FILE)
    check_same_logits(tmp_path / "adapter", model)


def test_the_first_pattern_of_the_file_wins(tmp_path: Path) -> None:
    """As when peft reads the file, in which it sorts the patterns."""
    theirs(tmp_path / "base")
    adapt(tmp_path / "adapter", tmp_path / "base", target_modules=["query", "key"])
    for pattern in ({"self.query": 2, "query": 32}, {"query": 32, "self.query": 2}):
        change_config(tmp_path / "adapter", alpha_pattern=pattern)
        model: Any = attach(tmp_path / "base", tmp_path / "adapter")
        check_same_logits(tmp_path / "adapter", model)


def test_a_saved_head(tmp_path: Path) -> None:
    """Of ESMC, whose output embeddings are separate; and of ESM-2, if its decoder is still the word embeddings."""
    for write in (esmc, esm2):
        path = tmp_path / write.__name__
        kind = write(path / "base")
        adapt(path / "adapter", path / "base", kind, target_modules="all-linear", modules_to_save=["lm_head"])
        tensors = load_file(path / "adapter" / FILE)
        changed = [name for name in tensors if "lm_head" in name and "decoder" not in name]
        changed += [name for name in tensors if kind is EsmcForMaskedLM and "lm_head.decoder" in name]
        assert len(changed) == (6 if kind is EsmcForMaskedLM else 5)
        for name in changed:
            tensors[name] += 0.1 * torch.randn(tensors[name].shape)
        save_file(tensors, path / "adapter" / FILE)
        check_same_logits(path / "adapter", attach(path / "base", path / "adapter", kind))
        tensors["base_model.model.lm_head.decoder.weight"][3, 3] += 1
        save_file(tensors, path / "adapter" / FILE)
        if kind is EsmcForMaskedLM:
            check_same_logits(path / "adapter", attach(path / "base", path / "adapter", kind))
            continue
        with pytest.raises(
            UserError, match=r"lm_head.decoder.weight differs from esm.embeddings.word_embeddings.weight"
        ):
            open_model(path / "adapter")


def test_the_contact_head(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Targets "all-linear" include it, but most trainings do not change it; else a note says that it is left out."""
    theirs(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base", target_modules="all-linear", init_lora_weights=True)
    name = "base_model.model.esm.contact_head.regression.lora_B.weight"
    tensors = load_file(tmp_path / "adapter" / FILE)
    assert not tensors[name].any()
    assert open_model(tmp_path / "adapter").contact_head == open_model(tmp_path / "base").contact_head is not None
    check_same_logits(tmp_path / "adapter", model)
    assert "not used" not in caplog.text
    save_file(tensors | {name: torch.ones(tensors[name].shape)}, tmp_path / "adapter" / FILE)
    assert open_model(tmp_path / "adapter").contact_head == open_model(tmp_path / "base").contact_head
    assert "the weights of 'contact_head' are not used" in caplog.text


@pytest.mark.parametrize("kind", ["checkpoint", "run", "relative"])
def test_bases(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base may have any format; a relative path is one from the current directory, as for peft."""
    monkeypatch.chdir(tmp_path)
    theirs(tmp_path / "base")
    adapt(tmp_path / "adapter", tmp_path / "base", target_modules="all-linear")
    expected = bionemo.load(tmp_path / "adapter").logits(SEQUENCES)
    (tmp_path / "run").mkdir()
    convert(tmp_path / "base", tmp_path / "run" / "checkpoints" / "step=0-last")
    names = {
        "checkpoint": tmp_path / "run" / "checkpoints" / "step=0-last",
        "run": tmp_path / "run",
        "relative": "base",
    }
    change_config(tmp_path / "adapter", base_model_name_or_path=str(names[kind]))
    found = bionemo.load(tmp_path / "adapter").logits(SEQUENCES)
    assert all((one == two).all() for one, two in zip(found, expected, strict=True))


def test_commands(tmp_path: Path) -> None:
    theirs(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base", target_modules="all-linear")
    assert describe(tmp_path / "adapter").startswith(
        f"adapter      {tmp_path}/adapter\nmodel        bionemo.models.esm2nv"
    )
    convert(tmp_path / "adapter", tmp_path / "ours")
    check_same_logits(tmp_path / "ours", model)
    weights = open_initial_weights(str(tmp_path / "adapter"))
    assert weights is not None
    name = "weights/encoder.layers.1.self_attention.linear_qkv.weight"
    assert torch.equal(
        weights.read(name, (24, 8), (48, 24)), open_model(tmp_path / "ours").weights.read(name)[24:72, 8:32]
    )


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora in its adapter_config.json is 'True', which is not supported"),
    ({"peft_type": "IA3"}, "peft_type in its adapter_config.json is 'IA3', which is not supported; supported: LORA"),
    ({"peft_type": None}, "peft_type in its adapter_config.json is 'None', which is not supported; supported: LORA"),
    ({"layers_to_transform": 0}, "layers_to_transform in its adapter_config.json is '0', which is not supported"),
    ({"layers_to_transform": [1]}, "layers_to_transform in its adapter_config.json is '[1]'"),
    ({"trainable_token_indices": [4]}, "trainable_token_indices in its adapter_config.json is '[4]'"),
    ({"target_parameters": ["a.weight"]}, "target_parameters in its adapter_config.json is \"['a.weight']\""),
    ({"lora_bias": True}, "lora_bias in its adapter_config.json is 'True'"),
    ({"bias": "all"}, "bias in its adapter_config.json is 'all', which is not supported; supported: none"),
    ({"bias": "lora_only"}, "bias in its adapter_config.json is 'lora_only'"),
    (
        {"init_lora_weights": "pissa"},
        "init_lora_weights in its adapter_config.json is 'pissa', which is not supported",
    ),
    ({"layer_replication": [[0, 2]]}, "layer_replication in its adapter_config.json is '[[0, 2]]'"),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens in its adapter_config.json is '[5]'"),
    ({"new_key": 1}, "new_key in its adapter_config.json is '1', which is not supported"),
    ({"base_model_name_or_path": None}, "base_model_name_or_path in its adapter_config.json is 'None'"),
    ({"base_model_name_or_path": "a/b"}, "cannot be opened with its base: a/b (no path here, so a model of the"),
    ({"target_modules": 5}, "target_modules in its adapter_config.json is '5'"),
    ({"alpha_pattern": {"query": "8"}}, "alpha_pattern in its adapter_config.json is \"{'query': '8'}\""),
    ({"rank_pattern": {"(": 8}}, "cannot be opened with its base: missing ), unterminated subpattern"),
    ({"rank_pattern": {"query": 0}}, "r in its configuration is not an integer from 1"),
    ({"r": 4}, "query.lora_A.weight has shape (8, 32), expected (4, 32)"),
    (
        {"target_modules": ["query", "value", "key"]},
        "4 weights are missing: 'esm.encoder.layer.0.attention.self.key.lora_A.weight'",
    ),
    ({"target_modules": ["value"]}, "4 weights are unknown: 'esm.encoder.layer.0.attention.self.query.lora_A.weight'"),
    (
        {"modules_to_save": ["query"]},
        "4 weights are unknown: 'esm.encoder.layer.0.attention.self.query.lora_A.weight'",
    ),
]


@pytest.fixture(scope="module")
def esm2_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("esm2")
    theirs(path / "base")
    adapt(path / "adapter", path / "base")
    return path / "adapter"


def check_refused(path: Path, message: str) -> None:
    for use in (bionemo.load, describe, lambda path: convert(path, path.with_name("new"))):
        with pytest.raises(UserError) as caught:
            use(path)
        text = str(caught.value)
        assert text.startswith(str(path))
        assert message in text
        assert text.isprintable()
    assert not path.with_name("new").exists()


@pytest.mark.parametrize(("changes", "message"), CHANGES)
def test_configurations_that_are_refused(
    changes: dict[str, Any], message: str, esm2_adapter: Path, tmp_path: Path
) -> None:
    shutil.copytree(esm2_adapter, tmp_path / "adapter")
    change_config(tmp_path / "adapter", **changes)
    check_refused(tmp_path / "adapter", message)


QUERY = "base_model.model.esm.encoder.layer.0.attention.self.query"
EXTRA: list[tuple[str, str]] = [
    (f"{QUERY}.lora_magnitude_vector", "1 weights are unknown: 'esm.encoder.layer.0.attention.self.query.lora_magn"),
    (f"{QUERY}.lora_B.bias", "1 weights are unknown: 'esm.encoder.layer.0.attention.self.query.lora_B.bias'"),
    (f"{QUERY}.base_layer.bias", "1 weights are unknown: 'esm.encoder.layer.0.attention.self.query.base_layer.bias'"),
    ("base_model.model.classifier.weight", "1 weights are unknown: 'classifier.weight'"),
    ("base_model.model.esm.embeddings.word_embeddings.weight", "1 weights are unknown: 'esm.embeddings.word_embe"),
    ("prompt_embeddings", "1 weights are unknown: 'prompt_embeddings'"),
]


@pytest.mark.parametrize(("name", "message"), EXTRA)
def test_unknown_tensors(name: str, message: str, esm2_adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(esm2_adapter, tmp_path / "adapter")
    save_file(load_file(esm2_adapter / FILE) | {name: torch.ones(32)}, tmp_path / "adapter" / FILE)
    check_refused(tmp_path / "adapter", message)


BASES: list[tuple[dict[str, Any], str]] = [
    ({"layers": 1}, "4 weights are unknown: 'esm.encoder.layer.1.attention.self.query.lora_A.weight'"),
    ({"layers": 3}, "4 weights are missing: 'esm.encoder.layer.2.attention.self.query.lora_A.weight'"),
    ({"size": 16}, "query.lora_A.weight has shape (8, 32), expected (8, 64)"),
]


@pytest.mark.parametrize(("sizes", "message"), BASES)
def test_other_bases(sizes: dict[str, Any], message: str, esm2_adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(esm2_adapter, tmp_path / "adapter")
    theirs(tmp_path / "other", **sizes)
    change_config(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "other"))
    check_refused(tmp_path / "adapter", message)


TIED: list[tuple[Callable[[Path], Any], dict[str, Any], str]] = [
    (esm2, {"target_modules": ["decoder"]}, "'lm_head.decoder.lora_A.weight'"),
    (esm2, {"target_modules": ["word_embeddings"]}, "'esm.embeddings.word_embeddings.lora_"),
    (gpt2, {"target_modules": ["c_attn", "lm_head"]}, "'lm_head.lora_A.weight'"),
    (gpt2, {"target_modules": ["wte"]}, "'transformer.wte.lora_"),
    (esm2, {"target_modules": ["query"], "modules_to_save": ["LayerNorm"]}, "'esm.encoder.layer.0.LayerNorm.bias'"),
]


@pytest.mark.parametrize(("write", "settings", "message"), TIED)
def test_tied_embeddings_and_other_modules(
    write: Callable[[Path], Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind = write(tmp_path / "base")
    adapt(tmp_path / "adapter", tmp_path / "base", kind, **settings)
    check_refused(tmp_path / "adapter", message)


def test_files(esm2_adapter: Path, tmp_path: Path) -> None:
    path = shutil.copytree(esm2_adapter, tmp_path / "adapter")
    change_config(path, base_model_name_or_path=str(path))
    check_refused(path, f"its base {path} is an adapter: merge it first")
    (path / FILE).write_text("version https://git-lfs.github.com/spec/v1\n")
    change_config(path, base_model_name_or_path=str(esm2_adapter.with_name("base")))
    check_refused(path, "its adapter_model.safetensors is a pointer of Git LFS")
    (path / FILE).rename(path / "adapter_model.bin")
    check_refused(path, "has adapter_config.json without adapter_model.safetensors: save it again with a newer peft")
    shutil.copy(esm2_adapter / FILE, path)
    shutil.copy(esm2_adapter.with_name("base") / "config.json", path)
    assert open_model(path).vocab_size == 33
    (path / "adapter_config.json").write_text("[")
    check_refused(path, "its adapter_config.json cannot be read as JSON")


def test_gpt2_model_without_a_head(tmp_path: Path) -> None:
    gpt2(tmp_path / "base")
    model: Any = adapt(tmp_path / "adapter", tmp_path / "base", GPT2Model, target_modules=["c_attn", "c_proj"])
    assert not any("transformer" in name for name in load_file(tmp_path / "adapter" / FILE))
    convert(tmp_path / "adapter", tmp_path / "hf", "hf")
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        found, expected = (
            each(tokens).last_hidden_state for each in (GPT2Model.from_pretrained(tmp_path / "hf"), model)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_configuration_that_peft_writes_has_no_unknown_keys(esm2_adapter: Path) -> None:
    """A new version of peft may add keys, which are refused if they are set by default."""
    settings = json.loads((esm2_adapter / "adapter_config.json").read_text())
    assert len(settings) > 30
    assert open_model(esm2_adapter).vocab_size == 33
