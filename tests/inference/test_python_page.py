# SPDX-License-Identifier: Apache-2.0
"""The code blocks of the page on Python run in order and print what the page shows; methods of `bionemo.load`."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from esm.data import Alphabet

import bionemo
from bionemo.common.errors import UserError
from bionemo.inference.contacts import predict_contacts
from bionemo.inference.model import TrainedModel
from bionemo.inference.variants import score_variants
from tests.conftest import ROOT
from tests.support.huggingface import theirs
from tests.support.models import build_model

PAGE = (ROOT / "docs" / "reference" / "python.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_page(writer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    theirs(tmp_path / "esm2_t6_8M_UR50D", heads=20, size=16, layers=6, intermediate_size=1280)
    (tmp_path / "MegaMolBART").symlink_to(writer)
    assert len(BLOCKS) == PAGE.count("```python") == 6
    namespace: dict[str, object] = {}
    for code, expected in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        assert printed.getvalue() == expected, code
    assert isinstance(namespace["contacts"], torch.Tensor)


SEQUENCES = ["MKTAYIAKQR", "GSHM"]


@pytest.mark.parametrize(
    "compute",
    [
        lambda model, texts: model.embed(texts),
        lambda model, texts: model.embed(texts, "begin", 1),
        lambda model, texts: model.hidden_states(texts),
        lambda model, texts: model.hidden_states(texts, range(3)),
        lambda model, texts: model.attentions(texts, [2]),
        lambda model, texts: model.logits(texts),
        lambda model, texts: model.pseudo_perplexity(texts),
    ],
)
def test_one_sequence_gives_the_item_of_a_list(compute: object, model: Path) -> None:
    ours = bionemo.load(model, "cpu")
    assert callable(compute)
    several = compute(ours, SEQUENCES)
    for text, expected in zip(SEQUENCES, several, strict=True):
        assert torch.equal(compute(ours, text), expected) and expected.dtype == torch.float32
        assert torch.equal(compute(ours, ours.ids(text)[0]), expected)
    assert len(compute(ours, [])) == 0


def test_several_layers_are_stacked(model: Path) -> None:
    ours = bionemo.load(model, "cpu")
    found = ours.hidden_states(SEQUENCES[0], [2, 0])
    assert torch.equal(found, torch.stack([ours.hidden_states(SEQUENCES[0], layer) for layer in (2, 0)]))
    for layers, message in (([], "layers is empty"), ([3], "hiddens_3: ESM2nv has the layers 0 to 2")):
        with pytest.raises(UserError, match=message):
            ours.hidden_states(SEQUENCES[0], layers)


def test_variants_contacts_and_alphabet(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours, variants = bionemo.load(model, "cpu"), ["K2A", "wt", "M1A:K2W"]
    scores = ours.score_variants(SEQUENCES[0], variants)
    assert np.array_equal(scores, score_variants(ours, SEQUENCES[0], variants))
    assert torch.equal(ours.score_variants(SEQUENCES[0], "K2A"), scores[0])
    assert torch.equal(ours.score_variants(SEQUENCES[0], ["K12A"], offset=10), scores[:1])
    table = ours.scan(SEQUENCES[0], offset=10)
    assert table.loc["K12", "A"] == pytest.approx(float(scores[0]), abs=1e-6)
    assert table.loc["M11", "A"] + table.loc["K12", "W"] == pytest.approx(float(scores[2]), abs=1e-6)
    assert np.array_equal(ours.contacts(SEQUENCES[0]), predict_contacts(ours, SEQUENCES[0]))
    assert ours.alphabet == Alphabet.from_architecture("ESM-1b").all_toks
    assert not caplog.records
    ours.contacts("MKJTA")
    assert "J" in caplog.text


@pytest.mark.parametrize("name", ["gpt3", "megamolbart", "prott5nv"])
def test_methods_that_a_model_does_not_have(name: str) -> None:
    model = TrainedModel(build_model(name).eval(), Path("x"))
    for compute in (
        lambda: model.score_variants("MKT", ["M1A"]),
        lambda: model.scan("MKT"),
        lambda: model.contacts("MKT"),
    ):
        with pytest.raises(UserError, match="not a masked language model: use ESM1nv, ESM1b, ESM2nv or ESMC"):
            compute()
    if name != "gpt3":
        with pytest.raises(
            UserError, match=r"logits is not available .*: use embeddings or hidden states, or ESM2nv or GPT3"
        ):
            model.logits("CCO")
    if name != "megamolbart":
        with pytest.raises(UserError, match="use a model of molecules, such as MegaMolBART"):
            model.generate("CCO")


def test_a_single_molecule(writer: Path) -> None:
    model = bionemo.load(writer, "cpu")
    assert model.reconstruct("CCO") == model.reconstruct(["CCO"])[0] == "CCO"
    assert model.generate("CCO", num_samples=2) == model.sample(["CCO"], num_samples=2)[0]
