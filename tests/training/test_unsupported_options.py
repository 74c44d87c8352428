# SPDX-License-Identifier: Apache-2.0
"""Keys that request unsupported features are named once; default values are not."""

import logging

import pytest

from bionemo.config.compose import load
from bionemo.config.schema import DownstreamConfig
from bionemo.training.unsupported_options import warn_ignored_options
from tests.conftest import RUNNABLE
from tests.support.v1_configs import v1_overrides


def noted(caplog: pytest.LogCaptureFixture, name: str, *overrides: str, schema: type | None = None) -> list[str]:
    """Return the keys that are noted for a configuration."""
    cfg = load(name, overrides, schema=schema) if schema else load(name, overrides)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        warn_ignored_options(cfg)
    return [message.split()[0] for message in caplog.messages if "has no effect" in message]


ASKED = [
    "trainer.logger=True", "trainer.enable_checkpointing=True", "trainer.use_distributed_sampler=True",
    "exp_manager.create_preemption_callback=False", "exp_manager.log_step_timing=False",
    "exp_manager.log_delta_step_timing=True", "exp_manager.log_tflops_per_sec_per_gpu=True",
    "exp_manager.disable_validation_on_resume=False", "model.optim.sched.last_epoch=7",
    "model.data.ngc_registry_target=other", "model.data.ngc_registry_version=v99",
]  # fmt: skip


@pytest.mark.parametrize("override", ASKED)
def test_a_key_without_effect_is_named(override: str, caplog: pytest.LogCaptureFixture) -> None:
    assert noted(caplog, "pretrain_esm2_8M", override) == [override]


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


def test_notes_about_molecules(caplog: pytest.LogCaptureFixture) -> None:
    found = noted(caplog, "pretrain_small_span_aug", "model.data.canonicalize_target_smile=False")
    assert found == ["model.data.canonicalize_target_smile=False"]


def test_notes_about_fine_tuning(caplog: pytest.LogCaptureFixture) -> None:
    found = noted(caplog, "downstream_flip_sec_str", "trainer.logger=True", schema=DownstreamConfig)
    assert found == ["trainer.logger=True"]


@pytest.mark.parametrize(("directory", "name"), RUNNABLE, ids=str)
def test_shipped_configurations_cause_no_notes(directory: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_ignored_options(load(name, [], directory))
    assert not caplog.messages


def test_default_behaviour_is_not_noted(caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["create_preemption_callback=True", "log_step_timing=True", "disable_validation_on_resume=True"]
    assert noted(caplog, "pretrain_esm2_8M", *(f"exp_manager.{override}" for override in overrides)) == []


def test_v1_defaults_cause_no_notes_except_for_missing_files(caplog: pytest.LogCaptureFixture) -> None:
    found = noted(caplog, "pretrain_gpt3_126m", *v1_overrides("gpt3"))
    assert not [key for key in found if "timing" in key or key.startswith("trainer.")]
