# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies of ESM-2 that a file in half precision contains, rounded: transformers use them.

transformers 5.24 writes one tensor for all layers, with `*` in its name; 4.57 and earlier versions write one for each
layer. Both read those of each layer, in fp32 whatever the type of the model: with 4.57.6 and 5.24.0 a directory that
4.57.6 had saved in bf16 has logits that are equal to 6 digits and differ from those with exact frequencies. 5.24 also
reads its own name and `rotary_embeddings.inv_freq`, which 4.57.6 ignores.
"""

import re
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
from bionemo.formats import nemo_archive
from bionemo.formats.convert import convert
from bionemo.formats.huggingface.directory import HuggingFaceModel
from bionemo.formats.safe_load import load_tensors, open_tar
from tests.support.huggingface import check_same_logits, theirs
from tests.support.runs import config, last_checkpoint, run, run_on_ranks, train

LAYER = "esm.encoder.layer.{}.attention.self.rotary_embeddings.inv_freq"
FILE = "model.safetensors"
SIZE = 32  # of a head
EXACT = 10000.0 ** -(torch.arange(0, SIZE, 2) / SIZE)
SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSGAEKAVQVKVKALPDAQFEVV" * 5, "MKTAYIAKQR"]
SIZES = {"max_position_embeddings": 402, "layers": 3}


def sharp(path: Path, **settings: Any) -> EsmForMaskedLM:
    """Save a model whose attention depends strongly on positions."""
    model = theirs(path, heads=2, size=SIZE, **(SIZES | settings))
    with torch.no_grad():
        for layer in model.esm.encoder.layer:
            for module in (layer.attention.self.query, layer.attention.self.key):
                module.weight.mul_(12)
    model.save_pretrained(path)
    return model


def replace_frequencies(path: Path, frequencies: dict[str, Tensor]) -> None:
    tensors = {name: each for name, each in load_file(path / FILE).items() if "inv_freq" not in name}
    save_file(tensors | frequencies, path / FILE, {"format": "pt"})


def saved(path: Path, dtype: torch.dtype, layout: str) -> EsmForMaskedLM:
    """Save a model in half precision; return what transformers reads in fp32."""
    sharp(path).to(dtype).save_pretrained(path)
    rounded = EXACT.to(dtype)
    layouts = {
        "installed version": None,
        "layers": {LAYER.format(layer): rounded.clone() for layer in range(3)},
        "layers in fp32": {LAYER.format(layer): rounded.float() for layer in range(3)},
        "star": {LAYER.format("*"): rounded},
        "model": {"esm.rotary_embeddings.inv_freq": rounded},
    }
    if (frequencies := layouts[layout]) is not None:
        replace_frequencies(path, frequencies)
    return EsmForMaskedLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("layout", ["installed version", "layers", "layers in fp32", "star", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_equal_transformers(dtype: torch.dtype, layout: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "hf", dtype, layout)
    check_same_logits(tmp_path / "hf", model, SEQUENCES)
    found = bionemo.load(tmp_path / "hf", "cpu").logits(SEQUENCES)[0]
    replace_frequencies(tmp_path / "hf", {})
    exact = bionemo.load(tmp_path / "hf", "cpu").logits(SEQUENCES)[0]
    assert np.abs(found - exact).max() > 1e-3  # so that the frequencies matter


def test_frequencies_are_kept_by_conversions(tmp_path: Path) -> None:
    model = saved(tmp_path / "hf", torch.bfloat16, "layers")
    for source, target, to in (("hf", "ours", None), ("ours", "x.nemo", None), ("x.nemo", "back", None),
                               ("back", "again", "hf")):  # fmt: skip
        convert(tmp_path / source, tmp_path / target, to)
        check_same_logits(tmp_path / target, model, SEQUENCES)
    with open_tar(tmp_path / "x.nemo") as members:
        tensors = load_tensors(members["model_weights.ckpt"])
    assert torch.equal(tensors["model.language_model.rotary_pos_emb.inv_freq"], EXACT.bfloat16().float())
    again = EsmForMaskedLM.from_pretrained(tmp_path / "again", dtype=torch.float32).eval()
    check_same_logits(tmp_path / "hf", again, SEQUENCES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_exported_frequencies_are_exact(dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint in half precision is exported with frequencies in fp32, which transformers use in any type."""
    sharp(tmp_path / "hf").to(dtype).save_pretrained(tmp_path / "hf")
    replace_frequencies(tmp_path / "hf", {})
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "again", "hf")
    tensors = load_file(tmp_path / "again" / FILE)
    assert {str(tensors.pop(LAYER.format(layer)).dtype) for layer in range(3)} == {"torch.float32"}
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    for read_as in (torch.float32, "auto"):
        again = EsmForMaskedLM.from_pretrained(tmp_path / "again", dtype=read_as).eval()
        torch.testing.assert_close(again.esm.rotary_embeddings.inv_freq, EXACT, rtol=1e-6, atol=0)
    check_same_logits(tmp_path / "ours", again.float(), SEQUENCES)


def test_frequencies_computed_elsewhere_are_exact(tmp_path: Path) -> None:
    """The last bit of frequencies in fp32 depends on the machine; it does not change the configuration."""
    sharp(tmp_path)
    replace_frequencies(tmp_path, {LAYER.format(layer): EXACT * (1 + 1e-7) for layer in range(3)})
    assert "rotary_frequencies" not in HuggingFaceModel(tmp_path).config


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ([torch.tensor(1.0), torch.tensor(2.0)], "its layers have different rotary frequencies"),
        ([torch.tensor(float("nan"))] * 3, "its rotary frequencies are not 16 positive numbers"),
        ([torch.tensor([[1.0]])] * 3, "its rotary frequencies are not 16 positive numbers"),
    ],
)
def test_unusable_frequencies_are_refused(factors: list[Tensor], message: str, tmp_path: Path) -> None:
    sharp(tmp_path)
    replace_frequencies(tmp_path, {LAYER.format(layer): EXACT * factor for layer, factor in enumerate(factors)})
    with pytest.raises(UserError, match=message):
        HuggingFaceModel(tmp_path)


@pytest.mark.slow
def test_training_starts_with_the_same_frequencies(tmp_path: Path) -> None:
    """A run that starts from these weights needs the frequencies in its configuration; all ranks use them."""
    saved(tmp_path / "hf", torch.bfloat16, "star")
    overrides = [f"restore_from_path={tmp_path / 'hf'}", "model.ffn_hidden_size=96", "model.hidden_size=64",
                 "model.num_layers=3", "model.max_position_embeddings=400", "trainer.max_steps=2",
                 "trainer.val_check_interval=2"]  # fmt: skip
    with pytest.raises(UserError) as caught:
        train(config(tmp_path / "one", *overrides))
    override = re.search(r"set (model\.rotary_frequencies=\[\S+\]), or", str(caught.value))
    assert override is not None
    train(config(tmp_path / "one", *overrides, override[1]))
    network = bionemo.load(last_checkpoint(tmp_path / "one"), "cpu").network
    assert network.config.rotary_frequencies == EXACT.bfloat16().tolist()
    two = [*overrides, override[1], "model.tensor_model_parallel_size=2"]
    ended = run_on_ranks(tmp_path / "two", *two, ranks=2)
    assert [status for status, _ in ended] == [0, 0], ended
    first, second = (bionemo.load(last_checkpoint(tmp_path / name), "cpu") for name in ("one", "two"))
    np.testing.assert_allclose(first.logits(SEQUENCES)[0], second.logits(SEQUENCES)[0], atol=1e-3)
    status, lines = run(tmp_path / "three", *overrides, "model.rotary_frequencies=[1.0]")
    assert status == 1
    assert lines[-1] == "error: model.rotary_frequencies has 1 numbers, expected 16"


def test_archives_with_exact_frequencies_do_not_have_the_key(tmp_path: Path) -> None:
    """BioNeMo v1, which does not know it, reads them."""
    train(config(tmp_path, "trainer.max_steps=1", "trainer.val_check_interval=1"))
    convert(last_checkpoint(tmp_path), tmp_path / "x.nemo")
    assert "rotary_frequencies" not in nemo_archive.read(tmp_path / "x.nemo").config
