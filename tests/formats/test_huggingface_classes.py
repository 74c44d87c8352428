# SPDX-License-Identifier: Apache-2.0
"""Directories of other classes of transformers than the language model, and other files that its users save."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    EsmForSequenceClassification,
    EsmForTokenClassification,
    EsmModel,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)

import bionemo
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert, open_model
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.variants import score_variants
from tests.inference.samples import go
from tests.support.finetuning import written
from tests.support.huggingface import check_same_logits, theirs
from tests.support.runs import config, last_checkpoint, read_weights, run, train

FILE = "model.safetensors"
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQ", "ACDEFGHIKL"]
NO_HEAD = "holds an encoder without its language-model head: it has embeddings and can be fine-tuned"
CLASSES: list[tuple[type, dict[str, Any]]] = [
    (EsmModel, {}), (EsmModel, {"add_pooling_layer": False}), (EsmForSequenceClassification, {"num_labels": 3}),
    (EsmForTokenClassification, {"num_labels": 3}),
]  # fmt: skip
POSITIONS: list[dict[str, Any]] = [
    {}, {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "max_position_embeddings": 100},
    {"position_embedding_type": "absolute", "max_position_embeddings": 100},
]  # fmt: skip


def change(path: Path, settings: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> None:
    """Change entries of config.json, and replace the weights."""
    found = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(found | settings))
    if tensors is not None:
        save_file(tensors, path / FILE, {"format": "pt"})


def check_same_embeddings(path: Path, encoder: EsmModel) -> None:
    """Compare with the mean of the last hidden states of transformers."""
    ours = bionemo.load(path, "cpu")
    for ids, found in zip(ours.ids(SEQUENCES), ours.embed(SEQUENCES), strict=True):
        tokens = torch.tensor([[0, *ids.tolist(), 2]])
        with torch.no_grad():
            expected = encoder(tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state[0, 1:-1].mean(0)
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", POSITIONS, ids=["esm2", "esm1b", "esm1v"])
@pytest.mark.parametrize(("kind", "arguments"), CLASSES)
def test_encoders_are_read_for_embeddings(
    kind: Any, arguments: dict[str, Any], positions: dict[str, Any], tmp_path: Path
) -> None:
    model = theirs(tmp_path / "whole", **positions)
    kind.from_pretrained(tmp_path / "whole", **arguments).save_pretrained(tmp_path / "hf")
    assert not any(name.startswith("lm_head") for name in load_file(tmp_path / "hf" / FILE))
    check_same_embeddings(tmp_path / "hf", model.esm.eval())
    ours = bionemo.load(tmp_path / "hf", "cpu")
    for use in (ours.logits, ours.pseudo_perplexity):
        with pytest.raises(UserError, match=NO_HEAD):
            use(SEQUENCES)
    with pytest.raises(UserError, match=NO_HEAD):
        score_variants(ours, SEQUENCES[0], ["M1A"])
    whole = bionemo.load(tmp_path / "whole", "cpu")
    np.testing.assert_array_equal(predict_contacts(ours, SEQUENCES[0]), predict_contacts(whole, SEQUENCES[0]))


def classifier(path: Path) -> Path:
    """Save an encoder with a classifier."""
    theirs(path)
    EsmForSequenceClassification.from_pretrained(path, num_labels=3).save_pretrained(path)
    return path


def test_an_encoder_is_used_by_commands(tmp_path: Path) -> None:
    hf = classifier(tmp_path / "hf")
    (tmp_path / "x.fasta").write_text(">a\nMKTAYIAKQR\n")
    go(hf, tmp_path / "x.fasta", tmp_path / "x.npz")
    with pytest.raises(UserError, match=NO_HEAD):
        go(hf, tmp_path / "x.fasta", tmp_path / "y.npz", "model.downstream_task.outputs=[logits]")
    assert not list(tmp_path.glob("y*"))
    convert(hf, tmp_path / "ours")
    check_same_embeddings(tmp_path / "ours", EsmModel.from_pretrained(hf))
    for name, to in (("x.nemo", None), ("again", "hf")):
        with pytest.raises(UserError, match=r"5 weights are missing: .*: the language-model head, which this"):
            convert(tmp_path / "ours", tmp_path / name, to)
    sizes = ["model.ffn_hidden_size=96", "model.num_attention_heads=4", "model.max_position_embeddings=96"]
    with pytest.raises(UserError, match="pretraining needs the pretrained model"):
        train(config(tmp_path / "run", *sizes, f"restore_from_path={hf}"))


@pytest.mark.slow
def test_an_encoder_is_fine_tuned(tmp_path: Path) -> None:
    hf, data = classifier(tmp_path / "hf"), written(tmp_path / "data")
    overrides = [f"model.restore_encoder_path={hf}", f"model.data.dataset_path={data}", "model.encoder_frozen=False",
                 "model.micro_batch_size=10", "trainer.max_epochs=1"]  # fmt: skip
    status, console = run(tmp_path / "run", *overrides, model="task")
    assert status == 0, console
    tuned = last_checkpoint(tmp_path / "run")
    assert not any("lm_head" in name for name in read_weights(tuned))
    with pytest.raises(UserError, match=NO_HEAD):
        bionemo.load(tuned, "cpu").logits(SEQUENCES)


def test_own_modules_beside_the_encoder_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The class of a user, whose names of weights or of layers in the encoder decide."""
    model = theirs(tmp_path)
    tensors = {name: each for name, each in load_file(tmp_path / FILE).items() if not name.startswith("lm_head")}
    change(tmp_path, {"architectures": ["MyModel"]}, tensors | {"my_head.0.weight": torch.ones(2)})
    check_same_embeddings(tmp_path, model.esm.eval())
    assert "the weights of 'my_head' are not used" in caplog.text
    inside = "esm.encoder.layer.0.attention.self.query.lora_A.weight"
    change(tmp_path, {}, tensors | {inside: torch.ones(2)})
    with pytest.raises(UserError, match=f"1 weights are unknown: '{inside}'"):
        HuggingFaceModel(tmp_path)


@pytest.mark.parametrize("kind", [GPT2Model, GPT2ForSequenceClassification, GPT2DoubleHeadsModel])
def test_classes_of_gpt2(kind: Any, tmp_path: Path) -> None:
    """The head is the table of word embeddings, so these classes are language models."""
    sizes: dict[str, Any] = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "whole")
    kind.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "hf")
    found, whole = (HuggingFaceModel(tmp_path / name) for name in ("hf", "whole"))
    assert found.shapes() == whole.shapes()
    assert all(torch.equal(found.read(name), whole.read(name)) for name in whole.shapes())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "module._orig_mod."])
def test_prefixes_of_wrappers(prefix: str, tmp_path: Path) -> None:
    """DistributedDataParallel, torch.compile and the modules of users add them."""
    model = theirs(tmp_path)
    change(tmp_path, {}, {prefix + name: tensor for name, tensor in load_file(tmp_path / FILE).items()})
    check_same_logits(tmp_path, model)


@pytest.mark.parametrize(
    "settings",
    [{"hidden_act": "relu"}, {"torch_dtype": "bfloat16"}, {"use_cache": False, "attn_implementation": "sdpa"},
     {"architectures": None}, {"id2label": {"0": "a"}, "problem_type": "regression"}],
)  # fmt: skip
def test_settings_that_transformers_ignore(settings: dict[str, Any], tmp_path: Path) -> None:
    model = theirs(tmp_path)
    change(tmp_path, settings)
    check_same_logits(tmp_path, model)


def test_files_of_a_trainer_and_of_the_cache_of_the_hub(tmp_path: Path) -> None:
    """An output directory contains checkpoints; the cache consists of links; a pickle beside weights is not read."""
    model = theirs(tmp_path / "out" / "checkpoint-500")
    torch.save({}, tmp_path / "out" / "checkpoint-500" / "pytorch_model.bin")
    torch.save({}, tmp_path / "out" / "checkpoint-500" / "optimizer.pt")
    check_same_logits(tmp_path / "out" / "checkpoint-500", model)
    with pytest.raises(UserError, match=r"is not a model: give the path of one in it, such as .*/checkpoint-500$"):
        open_model(tmp_path / "out")
    cache = tmp_path / "models--a--b"
    shutil.copytree(tmp_path / "out" / "checkpoint-500", cache / "blobs")
    (cache / "snapshots" / "0a1b").mkdir(parents=True)
    for name in os.listdir(cache / "blobs"):
        (cache / "snapshots" / "0a1b" / name).symlink_to(f"../../blobs/{name}")
    check_same_logits(cache / "snapshots" / "0a1b", model)
    with pytest.raises(UserError, match=r"such as .*/snapshots/0a1b$"):
        open_model(cache)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, "", "its weights are quantized: save the model"),
    ({"vocab_size": 40}, "", "vocab_size is '40'; in ESM-2's vocabulary it is 33, and other vocabularies are not"),
    ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "", "its class is 'BertForMaskedLM'"),
    ({}, "tf_model.h5", "tf_model.h5 has weights of TensorFlow: open the model with transformers 4"),
    ({}, "flax_model.msgpack", "flax_model.msgpack has weights of Flax: open the model with transformers 4"),
    ({}, "model.fp16.safetensors", "model.fp16.safetensors is a variant: rename it to model.safetensors"),
    ({}, "model.onnx", "model.onnx is an ONNX model: save the model with transformers"),
    ({}, "esm2.gguf", "esm2.gguf is a GGUF file: save the model with transformers"),
    ({}, "pytorch_model_fsdp.bin", "pytorch_model_fsdp.bin has shards of FSDP: accelerate merge-weights"),
    ({}, "global_step500", "global_step500 is a checkpoint of DeepSpeed: zero_to_fp32.py"),
    ({}, "model.safetensors", "its model.safetensors is a pointer of Git LFS: run git lfs pull"),
]


@pytest.mark.parametrize(("settings", "file", "message"), REFUSED)
def test_what_is_refused(settings: dict[str, Any], file: str, message: str, tmp_path: Path) -> None:
    theirs(tmp_path)
    change(tmp_path, settings)
    if file:
        (tmp_path / FILE).unlink()
        (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 3\n")
    with pytest.raises(UserError) as caught:
        open_model(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_adapters_beside_a_model_are_refused(tmp_path: Path) -> None:
    theirs(tmp_path / "hf")
    (tmp_path / "hf" / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
    shutil.copy(tmp_path / "hf" / FILE, tmp_path / "hf" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"holds adapters of peft \(adapter_config.json\) beside its model.*merge_and"):
        bionemo.load(tmp_path / "hf")
