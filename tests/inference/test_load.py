# SPDX-License-Identifier: Apache-2.0
"""Loading trained models: the saved configuration and the maximum length of a sequence."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EsmForMaskedLM

import bionemo
from bionemo.checkpoint import tools
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import ESM2nvConfig
from bionemo.data.batch import PackedBatch
from bionemo.inference.model import TrainedModel
from bionemo.models.esm2nv import ESM2nv
from bionemo.tokenizers import Alphabet, load_tokenizer
from tests.conftest import EXAMPLES
from tests.inference.samples import sequences

_SIZES = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "model.seq_length=64"]


@dataclass(kw_only=True)
class ScaledConfig(ESM2nvConfig):
    embedding_scale: float


class Scaled(ESM2nv):
    """A model class outside the package, with a key that changes no shape."""

    config: ScaledConfig

    def __init__(self, config: ScaledConfig, vocabulary: Alphabet) -> None:
        super().__init__(config, vocabulary)

    def embed(self, batch: PackedBatch, *rest: Any) -> Tensor:
        return super().embed(batch, *rest) * self.config.embedding_scale


def save_scaled(path: Path, **changes: Any) -> tuple[Scaled, dict[str, Any]]:
    """Write a checkpoint of `Scaled` with random weights and these keys; return the model and its configuration."""
    cfg = load("pretrain_esm2_8M", _SIZES, EXAMPLES / "esm2nv" / "conf")
    section = asdict(cfg.model) | {"_target_": f"{__name__}.Scaled", "embedding_scale": 3.0} | changes
    config = ScaledConfig(**{**vars(cfg.model), "_target_": section["_target_"], "embedding_scale": 3.0} | changes)
    vocabulary = load_tokenizer("esm2nv")
    assert isinstance(vocabulary, Alphabet)
    model = Scaled(config, vocabulary)
    model.initialize_weights(seed=1)
    state = {"config": section, "model": {"model._target_": section["_target_"]}}
    tools.write_weights(path, state, iter(dict(model.named_parameters()).items()))
    return model, section


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "tests")


@pytest.mark.parametrize(
    "changes", [{}, {"embedding_scale": 0.5}, {"layernorm_epsilon": 0.1}, {"embedding_token_dropout": False}]
)
def test_keys_that_change_no_shape_keep_their_saved_value(changes: dict[str, Any], tmp_path: Path) -> None:
    model, _ = save_scaled(tmp_path / "model", **changes)
    expected = TrainedModel(model.eval(), tmp_path).embed(sequences((30, 5)))
    loaded = bionemo.load(tmp_path / "model", "cpu")
    assert isinstance(loaded.network.config, ScaledConfig)
    assert {key: getattr(loaded.network.config, key) for key in changes} == changes
    assert np.array_equal(loaded.embed(sequences((30, 5))), expected)
    save_scaled(tmp_path / "other", embedding_scale=7.0, layernorm_epsilon=0.3)
    assert not np.array_equal(bionemo.load(tmp_path / "other", "cpu").embed(sequences((30, 5))), expected)


def test_keys_of_the_training_run_are_replaced(tmp_path: Path) -> None:
    """Parallel sizes and recomputation are set for one device; all other keys come from the checkpoint."""
    _, saved = save_scaled(
        tmp_path / "model", tensor_model_parallel_size=1, global_batch_size=512, seed=7, hidden_dropout=0.25,
        activations_checkpoint_granularity="selective", resume_from_checkpoint="none",
    )  # fmt: skip
    found = asdict(bionemo.load(tmp_path / "model", "cpu").network.config)
    assert {key for key, value in found.items() if value != saved[key]} <= {
        "global_batch_size", "activations_checkpoint_granularity", "activations_checkpoint_num_layers",
        "resume_from_checkpoint", "compile", "data",
    }  # fmt: skip
    assert (found["global_batch_size"], found["resume_from_checkpoint"]) == (None, None)
    assert (found["seed"], found["hidden_dropout"]) == (7, 0.25)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_scale": None}, "model.embedding_scale is null, expected float"),
        ({"embedding_scale": "${oc.env:HOME}"}, r"model.embedding_scale is .\$"),
        ({"num_layer": 1}, "unknown key model.num_layer .*use the version of tests that wrote it"),
        ({"tower": {"depth": 1}}, "unknown key model.tower.depth"),
        ({"layernorm_epsilon": -1.0}, "model.layernorm_epsilon is -1.0, expected"),
    ],
)
def test_invalid_saved_configurations(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, saved = save_scaled(tmp_path / "model")
    state = {"config": saved | changes, "model": {"model._target_": saved["_target_"]}}
    tools.write_weights(tmp_path / "changed", state, iter(dict(model.named_parameters()).items()))
    with pytest.raises(UserError, match=message):
        bionemo.load(tmp_path / "changed", "cpu")


@pytest.mark.parametrize("removed", ["", "num_layers"])
def test_keys_of_other_versions(removed: str, tmp_path: Path) -> None:
    """An ignored key is accepted; a missing key is not replaced by a default value."""
    model, saved = save_scaled(tmp_path / "model")
    saved = {key: value for key, value in saved.items() if key != removed} | {"onnx_safe": True}
    state = {"config": saved, "model": {"model._target_": saved["_target_"]}}
    tools.write_weights(tmp_path / "changed", state, iter(dict(model.named_parameters()).items()))
    if removed:
        with pytest.raises(UserError, match=r"give model\.num_layers=\.\.\. \(use the version of tests that wrote it"):
            bionemo.load(tmp_path / "changed", "cpu")
    else:
        bionemo.load(tmp_path / "changed", "cpu")


def test_a_rotary_model_reads_longer_sequences_on_request(reference: tuple[Path, EsmForMaskedLM]) -> None:
    path, theirs = reference
    (text,) = sequences((150,))
    with pytest.raises(UserError, match="150 tokens, but the model accepts at most 94"):
        bionemo.load(path).embed([text])
    ours = bionemo.load(path, max_length=152)
    ids = torch.tensor([[0, *ours.ids([text])[0].tolist(), 2]])
    with torch.no_grad():
        hidden = theirs.esm(ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0, 1:-1]
    assert np.allclose(ours.embed([text])[0], hidden.mean(0).numpy(), atol=1e-5)
    assert np.array_equal(ours.embed(["MKTAY"]), bionemo.load(path, max_length=10).embed(["MKTAY"]))


def test_longer_sequences_of_a_checkpoint(tmp_path: Path) -> None:
    save_scaled(tmp_path / "model")
    config = bionemo.load(tmp_path / "model", "cpu", max_length=100).network.config
    assert (config.max_position_embeddings, config.seq_length, config.data.max_seq_length) == (100, 100, 100)


def test_learned_positions_have_a_maximum_length(writer: Path) -> None:
    assert bionemo.load(writer, max_length=8).embed(["CCO"]).shape[0] == 1
    with pytest.raises(UserError, match=r"has \d+ learned positions, too few for 100,000 tokens"):
        bionemo.load(writer, max_length=100_000)


def test_weights_converted_once_give_the_same_outputs(tmp_path: Path) -> None:
    """Autocast would convert the same weights in every batch; the checksum is that of the fp32 weights."""
    save_scaled(tmp_path / "x")
    model = bionemo.load(tmp_path / "x", "cpu", "bf16-mixed")
    fp32 = bionemo.load(tmp_path / "x", "cpu")
    autocast = TrainedModel(fp32.network, fp32.path, "bf16-mixed")
    texts = sequences((10, 57, 3))
    assert np.array_equal(model.embed(texts), autocast.embed(texts))
    assert all(map(np.array_equal, model.logits(texts), autocast.logits(texts)))
    assert model.weights_checksum == fp32.weights_checksum
    assert {each.dtype for each in model.network.blocks()[0].layers[0].mlp.parameters()} == {torch.bfloat16}
    assert model.network.word_embeddings.weight.dtype == torch.float32


def test_a_class_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """The same number of tokens, in another order."""
    model, saved = save_scaled(tmp_path / "model")
    tokens = [*model.vocabulary.tokens]
    state = {"config": saved, "model": {"model._target_": saved["_target_"], "vocabulary": tokens}}
    tools.write_weights(tmp_path / "same", state, iter(dict(model.named_parameters()).items()))
    assert bionemo.load(tmp_path / "same", "cpu").alphabet == tokens
    tokens[4], tokens[5] = tokens[5], tokens[4]
    tools.write_weights(tmp_path / "other", state, iter(dict(model.named_parameters()).items()))
    message = (
        "other was trained with another vocabulary than that of .*: it has 33 entries, not 33; entry 4 is A, not L"
    )
    with pytest.raises(UserError, match=message):
        bionemo.load(tmp_path / "other", "cpu")
