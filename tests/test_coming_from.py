# SPDX-License-Identifier: Apache-2.0
"""The code of the page "Coming from another package" runs, and both packages compute the same vectors."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import EsmcConfig, EsmcForMaskedLM, EsmModel

from bionemo.formats.convert import convert
from tests.conftest import ROOT
from tests.formats import test_fair_esm, test_huggingface_recipes
from tests.support import adapters, nemo2
from tests.support.huggingface import theirs

PAGE = (ROOT / "docs" / "how-to" / "coming-from.md").read_text()
SECTIONS = {part.splitlines()[0]: part for part in PAGE.split("\n## ")[1:]}
MODEL = "esm2_t6_8M_UR50D"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NDArray[np.float32]]:
    """Write all models of the page into a directory; return vectors of the code that cannot run here."""
    directory = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_fair_esm, "LAYERS", 6)
        test_fair_esm.write(directory, "esm2_t6").rename(directory / f"{MODEL}.pt")
    regression = directory / "esm2_t6-contact-regression.pt"
    regression.rename(directory / f"{MODEL}-contact-regression.pt")
    convert(directory / f"{MODEL}.pt", directory / MODEL, to="hf")
    small = theirs(directory / "small")
    convert(directory / "small", directory / "esm2nv.nemo")
    nemo2.write(directory / "ESM2", nemo2.weights(small))
    recipes = test_huggingface_recipes.recipes(directory / "nv_esm2")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
    }
    esmc = EsmcForMaskedLM(EsmcConfig(vocab_size=64, intermediate_size=96, **sizes)).eval()
    esmc.save_pretrained(directory / "ESMC-300M")
    settings = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "dense"]}
    adapters.adapt(directory / "adapter", directory / MODEL, EsmModel, **settings)
    found = {"directory": np.array(str(directory))}
    for name, model in (
        ("BioNeMo v1", small),
        ("BioNeMo 2", small),
        ("bionemo-recipes", recipes),
        ("esm (ESMC)", esmc),
    ):
        tokens = torch.tensor([[0, 20, 15, 11, 5, 19, 12, 5, 15, 16, 10, 2]])  # MKTAYIAKQR
        with torch.no_grad():
            states = model(tokens, output_hidden_states=True).hidden_states
        found[name] = states[-1][:, 1:-1].mean(1).numpy()
    return found


@pytest.mark.parametrize("name", SECTIONS)
def test_both_packages_compute_the_same(
    name: str, reference: dict[str, NDArray[np.float32]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(reference["directory"]))
    *their_code, our_code = re.findall(r"```python\n(.*?)```", SECTIONS[name], flags=re.DOTALL)
    if name in reference:  # the package is not installed
        expected = reference[name]
    else:
        namespace: dict[str, object] = {}
        exec(their_code[0], namespace)
        expected = np.asarray(namespace["vectors"])
    namespace = {}
    exec(our_code, namespace)
    np.testing.assert_allclose(namespace["vectors"], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_all_packages_are_on_the_page() -> None:
    assert list(SECTIONS) == [
        "fair-esm", "transformers", "esm (ESMC)", "BioNeMo v1", "BioNeMo 2", "bionemo-recipes", "peft"
    ]  # fmt: skip
    assert Path(ROOT / "mkdocs.yml").read_text().count("how-to/coming-from.md") == 1
