# SPDX-License-Identifier: Apache-2.0
"""Tables of weight names: bitwise inverse conversions, and imports without side effects."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from bionemo.common.errors import UserError
from bionemo.formats.model_formats import known_formats
from bionemo.formats.weight_names import WeightNames
from tests.formats.archives import same

CONFIG: dict[str, Any] = {
    "hidden_size": 12, "num_attention_heads": 3, "ffn_hidden_size": 20, "num_layers": 2, "max_position_embeddings": 6,
    "make_vocab_size_divisible_by": 8,
}  # fmt: skip
TABLES = {f"{name} {each.our_class}": each.names for name in ("nemo", "hugging_face") for each in known_formats(name)}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("share", [True, False])
def test_conversions_are_inverse(name: str, share: bool) -> None:
    names: WeightNames = TABLES[name]
    table = names.weights(CONFIG | {"share_decoder_tokens_head_embeddings": share, "embedding_layer_norm": share}, 33)
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(weight.shape, generator=generator) for name, weight in table.items()}
    for padded in {"word_embeddings.weight", "lm_head.bias", "lm_head.weight"} & ours.keys():
        ours[padded][33:] = 0  # not every format stores padding
    theirs = {key: tensor for name, weight in table.items() for key, tensor in weight.to_theirs(ours[name]).items()}
    assert len(theirs) == sum(len(weight.theirs) for weight in table.values())
    assert {key: tuple(tensor.shape) for key, tensor in theirs.items()} == {
        key: shape for weight in table.values() for key, shape in weight.their_shapes().items()
    }
    assert same({name: weight.to_ours(theirs.__getitem__) for name, weight in table.items()}, ours)


def test_importing_the_package_changes_no_other_library() -> None:
    code = (
        "import sys, warnings, logging; before = list(warnings.filters), list(logging.getLogger().handlers)\n"
        "import bionemo; assert 'torch' not in sys.modules\n"
        "assert (list(warnings.filters), list(logging.getLogger().handlers)) == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_shapes_of_own_weights_are_sizes_or_keys_and_unknown_ones_are_an_error() -> None:
    config = {"num_attention_heads": 2, "hidden_size": 8, "ffn_hidden_size": 32, "max_position_embeddings": 4,
              "num_layers": 1, "gate_size": 3}  # fmt: skip
    names = {"gate.score.weight": "gate.score.weight"}
    found = WeightNames(names, shapes={"gate.score.weight": (1, "gate_size")}).weights(config, 10)
    assert found["gate.score.weight"].shape == (1, 3)
    with pytest.raises(UserError, match=r"the shape of gate\.score\.weight is unknown"):
        WeightNames(names).weights(config, 10)
