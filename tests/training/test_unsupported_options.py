# SPDX-License-Identifier: Apache-2.0
"""Keys without effect beside the values of others are named once; default values are not."""

import logging

import pytest

from bionemo.config.compose import load
from bionemo.training.unsupported_options import warn_ignored_options
from tests.conftest import RUNNABLE


def noted(caplog: pytest.LogCaptureFixture, name: str, *overrides: str, schema: type | None = None) -> list[str]:
    """Return the keys that are noted for a configuration."""
    cfg = load(name, overrides, schema=schema) if schema else load(name, overrides)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_ignored_options(cfg)
    return [message.split()[0] for message in caplog.messages if "has no effect" in message]


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ("pretrain_esm2_8M", ["library=regex", "type=x", "model=x", "model_name=x", "vocab_file=x", "merge_file=x",
                              "mask_id=31", "num_sentinel_tokens=9"]),
        ("pretrain_small_span_aug", ["library=megatron", "type=x", "model=x", "vocab_file=x", "mask_id=32"]),
        ("pretrain_gpt3_126m", ["library=regex", "type=x", "model=x", "model_name=facebook/esm2", "mask_id=32"]),
    ],
)  # fmt: skip
def test_keys_of_the_tokenizer_without_effect(config: str, keys: list[str], caplog: pytest.LogCaptureFixture) -> None:
    overrides = [f"model.tokenizer.{key}" for key in keys]
    assert sorted(noted(caplog, config, *overrides)) == sorted(overrides)


@pytest.mark.parametrize(("directory", "name"), RUNNABLE, ids=str)
def test_shipped_configurations_cause_no_notes(directory: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_ignored_options(load(name, [], directory))
    assert not caplog.messages
