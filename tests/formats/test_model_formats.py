# SPDX-License-Identifier: Apache-2.0
"""A model outside the package is converted with its own descriptions of other formats."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from bionemo.checkpoint import tools
from bionemo.common.errors import UserError
from bionemo.config.compose import load
from bionemo.config.schema import ESM2nvConfig
from bionemo.formats import model_formats
from bionemo.formats.convert import convert
from bionemo.formats.nemo_archive import read
from bionemo.models.esm2nv import ESM2nv
from bionemo.tokenizers import load_tokenizer
from tests.conftest import EXAMPLES
from tests.support.runs import read_weights


class Renamed(ESM2nv):
    """ESM-2 under another name. Its weights are the same."""

    config: ESM2nvConfig
    card_tag = "tests"
    nemo = replace(ESM2nv.nemo, nemo_class="tests.models.RenamedModel", base_class="")
    hugging_face = replace(ESM2nv.hugging_face, model_type="renamed-esm")


class Derived(Renamed):
    """A subclass without descriptions of its own."""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*model_formats.known_models(), f"{__name__}.Renamed"]
    monkeypatch.setattr(model_formats, "known_models", lambda: names)
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "tests")


def checkpoint(path: Path, model_class: type[ESM2nv]) -> dict[str, torch.Tensor]:
    """Write a checkpoint; return its weights."""
    sizes = ["model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2"]
    config = replace(
        load("pretrain_esm2_8M", sizes, EXAMPLES / "esm2nv" / "conf").model,
        _target_=f"{__name__}.{model_class.__name__}",
    )
    model = model_class(config, load_tokenizer("esm2nv"))
    model.initialize_weights(seed=1)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tools.write_weights(path, {"config": asdict(config), "model": model.identity}, iter(weights.items()))
    return weights


@pytest.mark.parametrize(("name", "to"), [("x.nemo", None), ("hf", "hf")])
def test_round_trip(name: str, to: str | None, tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "model", Renamed)
    convert(tmp_path / "model", tmp_path / name, to)
    convert(tmp_path / name, tmp_path / "back")
    found = read_weights(tmp_path / "back")
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        rows = 33 if key in ("word_embeddings.weight", "lm_head.bias") else None  # padding is not stored
        assert torch.equal(found[key][:rows], weight[:rows]), key
    assert f'"{__name__}.Renamed"' in (tmp_path / "back" / "state.json").read_text()


def test_the_class_and_the_card_are_those_of_the_model(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model", Renamed)
    convert(tmp_path / "model", tmp_path / "x.nemo")
    assert read(tmp_path / "x.nemo").config["target"] == "tests.models.RenamedModel"
    convert(tmp_path / "model", tmp_path / "hf", "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "| class | Renamed: ESM-2 under another name |" in card
    assert "- Renamed\n- tests\n" in card


@pytest.mark.parametrize(("name", "to"), [("x.nemo", None), ("hf", "hf")])
def test_a_subclass_does_not_inherit_a_description(name: str, to: str | None, tmp_path: Path) -> None:
    """It may compute another function."""
    checkpoint(tmp_path / "model", Derived)
    with pytest.raises(UserError, match=r"test_model_formats\.Derived' ha(s|ve) no (\.nemo|Hugging Face) format"):
        convert(tmp_path / "model", tmp_path / name, to)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["none", "none.nemo"])
def test_a_missing_source_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name}: there is no such checkpoint"):
        convert(tmp_path / name, tmp_path / ("x" if name.endswith(".nemo") else "x.nemo"))
