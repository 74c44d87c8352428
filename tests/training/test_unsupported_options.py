# SPDX-License-Identifier: Apache-2.0
"""Keys without effect beside the values of others are named once; default values are not."""

import logging

import pytest

from bionemo.config.compose import compose_typed, load
from bionemo.config.paths import find_source
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
        ("pretrain_esm2_8M", ["vocab_file=x", "merge_file=x"]),
        ("pretrain_small_span_aug", ["vocab_file=x"]),
        ("pretrain_gpt3_126m", []),
    ],
)  # fmt: skip
def test_keys_of_the_tokenizer_without_effect(config: str, keys: list[str], caplog: pytest.LogCaptureFixture) -> None:
    overrides = [f"model.tokenizer.{key}" for key in keys]
    assert sorted(noted(caplog, config, *overrides)) == sorted(overrides)


@pytest.mark.parametrize(("directory", "name"), RUNNABLE, ids=str)
def test_shipped_configurations_cause_no_notes(directory: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    cfg, notes = compose_typed(find_source(name, directory), [])
    assert not notes
    with caplog.at_level(logging.WARNING):
        warn_ignored_options(cfg)
    assert not caplog.messages
