# SPDX-License-Identifier: Apache-2.0
"""The `model` section of a saved model."""

from dataclasses import dataclass, field

import pytest
import yaml

from bionemo.config.saved_model import add_defaults
from bionemo.config.schema import EncoderConfig


@dataclass(kw_only=True)
class Convolution:
    kernel: int = 3


@dataclass(kw_only=True)
class LaterConfig(EncoderConfig):
    """Has two keys more than when the section was saved."""

    convolution: Convolution = field(default_factory=Convolution)
    dilation: int = 1


class Model:
    config: LaterConfig


def test_missing_keys_have_the_plain_value_of_their_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIONEMO_TRUSTED_PACKAGES", "tests")
    section = {"_target_": f"{__name__}.Model", "hidden_size": 8, "dilation": 2}
    found = add_defaults(section, section["_target_"])
    assert section.items() <= found.items()
    assert yaml.safe_load(yaml.safe_dump(found))["convolution"] == {"kernel": 3}
