# SPDX-License-Identifier: Apache-2.0
"""Contacts equal those of transformers' ESM-2 with the same head; attention of ESM-1nv equals torch's own."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor
from transformers import EsmForMaskedLM

import bionemo
from bionemo.analysis.contacts import fit_contact_head, precision, read_contact_head, write_contact_head
from bionemo.common.errors import UserError
from bionemo.formats.convert import convert
from bionemo.inference.contacts import average_product_corrected, corrected_attention, predict_contacts
from bionemo.inference.model import TrainedModel
from tests.support.huggingface import theirs
from tests.support.models import build_model
from tests.support.reference_models import TorchBert, to_torch_bert

SEQUENCES = ["MKTAYIAKQRQISFVKSHFSRQLEERLGLIEVQAPILSRVGDGTQDNLSG", "GG", "M", "ACDEFGHIKLMNPQRSTVWYXBUZO" * 3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model whose attention is sharp enough to distinguish residues, with a contact head."""
    path = tmp_path_factory.mktemp("model")
    model = theirs(path, layers=3)
    with torch.no_grad():
        for layer in model.esm.encoder.layer:
            for part in (layer.attention.self.query, layer.attention.self.key):
                part.weight.mul_(12)
        model.esm.contact_head.regression.weight.normal_(0, 3, generator=torch.Generator().manual_seed(1))
        model.esm.contact_head.regression.bias.fill_(-0.5)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(path: Path) -> TrainedModel:
    return bionemo.load(path, "cpu")


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_contacts_equal_those_of_transformers(sequence: str, path: Path, model: TrainedModel) -> None:
    reference = EsmForMaskedLM.from_pretrained(path, attn_implementation="eager").eval()
    tokens = torch.tensor([[0, *model.ids([sequence])[0].tolist(), 2]])
    with torch.no_grad():
        expected = reference.predict_contacts(tokens, torch.ones_like(tokens))[0].numpy()
    found = predict_contacts(model, sequence)
    assert found.dtype == np.float32
    assert found.shape == (len(sequence),) * 2
    assert len(sequence) < 3 or expected.std() > 0.05  # the map is not constant
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(found, found.T, rtol=0, atol=1e-6)
    attention = next(module for name, module in model.network.named_modules() if name.endswith("core_attention"))
    assert not attention._forward_pre_hooks


def test_attention_of_a_model_without_rotary_positions() -> None:
    network = build_model("esm1nv").eval()
    model, config, vocab_size = TrainedModel(network, Path("x")), network.config, network.vocabulary.vocab_size
    reference = TorchBert(config, vocab_size).eval()
    shape = (config.num_layers, config.num_attention_heads, vocab_size)
    reference.load_state_dict(to_torch_bert(dict(network.named_parameters()), *shape))
    ids = [network.vocabulary.bos_id, *model.ids(SEQUENCES[:1])[0].tolist(), network.vocabulary.eos_id]
    with torch.no_grad():
        x_ND = reference.words(torch.tensor(ids)) + reference.positions(torch.arange(len(ids)))
        for layer, found in zip(reference.layers, corrected_attention(model, SEQUENCES[0]), strict=True):
            normed = layer.norm1(x_ND)
            a_Hnn = layer.self_attn(normed, normed, normed, average_attn_weights=False)[1].numpy()[:, 1:-1, 1:-1]
            a_Hnn = a_Hnn + a_Hnn.transpose(0, 2, 1)
            average = np.einsum("hi,hj,h->hij", a_Hnn.sum(2), a_Hnn.sum(1), 1 / a_Hnn.sum((1, 2)))
            np.testing.assert_allclose(found, a_Hnn - average, rtol=0, atol=1e-6)
            x_ND = layer(x_ND[None])[0]


def test_average_product_correction_of_a_product_is_zero() -> None:
    row, column = torch.rand(2, 1, 7, 1), torch.rand(2, 1, 1, 7)
    product = (row[0] * column[0])[None]
    assert average_product_corrected(product).abs().max() < 1e-6
    assert not average_product_corrected(torch.zeros(1, 5, 5)).any()
    corrected = average_product_corrected(torch.rand(3, 7, 7))
    assert corrected.sum(-1).abs().max() < 1e-5


def known_map(model: TrainedModel, sequence: str, head: dict[str, Any]) -> np.ndarray:
    """Return the likeliest tenth of all pairs predicted with a head as contacts; the last residue is unknown."""
    predicted = predict_contacts(model, sequence, head)
    contacts = (predicted > np.quantile(predicted, 0.9)).astype(np.float32)
    contacts[-1] = contacts[:, -1] = np.nan
    return contacts


def test_fitting_a_head(model: TrainedModel) -> None:
    """Compare with scikit-learn on features gathered pair by pair; the head recovers the training contacts."""
    assert model.contact_head is not None
    sequences = [SEQUENCES[0], SEQUENCES[3]]
    maps = [known_map(model, sequence, dict(model.contact_head)) for sequence in sequences]
    advanced: list[int] = []
    head = fit_contact_head(model, sequences, maps, advanced.append)
    assert advanced == [1, 1]
    features, targets = [], []
    for sequence, contacts in zip(sequences, maps, strict=True):
        x_Fnn = torch.cat(list(corrected_attention(model, sequence))).numpy()
        for i in range(len(sequence)):
            for j in range(i + 6, len(sequence) - 1):
                features.append(x_Fnn[:, i, j])
                targets.append(contacts[i, j])
    expected = LogisticRegression(C=0.15, l1_ratio=1.0, solver="liblinear", random_state=0)
    expected.fit(np.array(features), np.array(targets))
    np.testing.assert_allclose(head["weight"], expected.coef_[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(head["bias"], expected.intercept_[0], rtol=1e-4)
    for sequence, contacts in zip(sequences, maps, strict=True):
        assert precision(predict_contacts(model, sequence, head), contacts, 5) > 0.8


def test_precision_counts_long_range_pairs_only() -> None:
    known = np.zeros((30, 30), np.float32)
    predicted = np.random.default_rng(0).random((30, 30)).astype(np.float32) / 2
    predicted[0, 5], known[0, 5] = 1, 1  # too close in sequence
    predicted[2, 29], known[2, 29] = 1, np.nan  # unknown residue
    for j, is_contact in ((24, 1), (25, 1), (26, 1), (27, 1), (28, 0), (29, 0)):
        predicted[0, j], known[0, j] = 0.9 - j / 100, is_contact
    assert precision(predicted, known, 5) == pytest.approx(4 / 6)
    assert precision(predicted, known) == pytest.approx(4 / 20)  # there are 21 such pairs, 20 of them known
    assert precision(predicted, known, 1000) == 1
    assert math.isnan(precision(predicted[:24, :24], known[:24, :24]))


def test_saving_and_loading_a_head(tmp_path: Path, model: TrainedModel) -> None:
    assert model.contact_head is not None
    write_contact_head(tmp_path / "new" / "head.json", model.contact_head, "checksum", {"bionemo": "x"})
    assert read_contact_head(tmp_path / "new" / "head.json") == (model.contact_head, "checksum")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["head.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight": 3, "bias": 0}', '{"weight": ["a"], "bias": 0}', '{"weight": [1]}', "\xff",
             '{"weight": [[1]], "bias": 0}'],
)  # fmt: skip
def test_files_without_a_head(text: str, tmp_path: Path) -> None:
    (tmp_path / "head.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"head.json is not a contact head, \{\"weight\""):
        read_contact_head(tmp_path / "head.json")


def test_heads_that_cannot_be_used(tmp_path: Path, path: Path, model: TrainedModel) -> None:
    convert(path, tmp_path / "plain.nemo")
    with pytest.raises(UserError, match=r"plain.nemo has no contact head: fit one .* or use ESM-1b, ESM-1v or ESM-2"):
        predict_contacts(bionemo.load(tmp_path / "plain.nemo", "cpu"), "MKTAYIAKQR")
    with pytest.raises(UserError, match="the contact head has 4 weights, the model 3 layers of 4 heads"):
        predict_contacts(model, "MKTAYIAKQR", {"weight": [0.0] * 4, "bias": 0.0})
    with pytest.raises(UserError, match="cannot be read"):
        read_contact_head(tmp_path / "none.json")
    (tmp_path / "head.json").write_text(json.dumps({"weight": [1.0, math.nan], "bias": 0}))
    with pytest.raises(UserError, match="not finite"):
        read_contact_head(tmp_path / "head.json")


SQUARE = np.zeros((10, 10))


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (SQUARE[:9], "map 1 is of shape .9, 10., its sequence has 10 residues"),
        (SQUARE - 1, "map 1 holds -1: expected 1 for a contact, 0 for none, nan"),
        (SQUARE + 8.5, "map 1 holds 8.5"),
        (np.full((10, 10), "a"), "map 1 has no numbers"),
        (SQUARE, "of 10 known pairs 6 and more residues apart 0 are contacts"),
        (SQUARE + 1, "of 10 known pairs 6 and more residues apart 10 are contacts"),
        (SQUARE * np.nan, "of 0 known pairs"),
    ],
)
def test_maps_that_cannot_be_fitted(known: np.ndarray, message: str, model: TrainedModel) -> None:
    with pytest.raises(UserError, match=message):
        fit_contact_head(model, ["MKTAYIAKQR"], [known])


def test_sequences_and_models_that_cannot_be_used(model: TrainedModel) -> None:
    with pytest.raises(UserError, match="P1 has 97 residues, but the model accepts at most 94"):
        predict_contacts(model, "A" * 97, name="P1")
    with pytest.raises(UserError, match="x is a ProtT5nv, not a masked language model"):
        head = {"weight": [0.0] * 12, "bias": 0.0}
        predict_contacts(TrainedModel(build_model("prott5nv"), Path("x")), "MKTA", head)
    with pytest.raises(UserError, match="of 0 known pairs"):
        fit_contact_head(model, [], [])


def test_half_precision_is_close(path: Path, model: TrainedModel) -> None:
    half: Any = bionemo.load(path, "cpu", "bf16-mixed")
    difference: Tensor = torch.from_numpy(predict_contacts(half, SEQUENCES[0]) - predict_contacts(model, SEQUENCES[0]))
    assert 0 < difference.abs().mean() < 0.02
