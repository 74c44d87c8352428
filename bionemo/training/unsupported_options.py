# SPDX-License-Identifier: Apache-2.0
"""Options without effect beside the values of others."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from bionemo.config.schema import (
    DownstreamConfig,
    ESM1bConfig,
    ESM1nvConfig,
    ESM2nvConfig,
    GPT3Config,
    MegaMolBARTConfig,
    ModelConfig,
    ProtT5nvConfig,
    RunConfig,
)

log = logging.getLogger(__name__)
_BUILT_IN = "the vocabularies are part of the package"


def _differs_from(*values: Any) -> Callable[[Any], bool]:
    """Return a condition that holds for all values but None and these."""
    return lambda value: value not in (None, *values)


_LOGGERS = ("wandb", "mlflow", "dllogger", "clearml", "neptune")

# key, condition under which its value has no effect, reason or alternative
_Option = tuple[str, Callable[[Any], Any], str]
# libraries in files of v1 and ours
_LIBRARIES = {
    ESM1nvConfig: ("sentencepiece", "megatron"), ESM1bConfig: ("huggingface",), ESM2nvConfig: ("huggingface",),
    ProtT5nvConfig: ("sentencepiece",), MegaMolBARTConfig: ("regex",), GPT3Config: ("megatron",),
}  # fmt: skip


def warn_ignored_options(cfg: RunConfig | DownstreamConfig) -> None:
    """Log a warning for each option that has no effect."""
    options: list[_Option] = []
    if isinstance(cfg.trainer.val_check_interval, int):
        reason = "trainer.val_check_interval counts steps"
        options.append(("trainer.check_val_every_n_epoch", _differs_from(1), reason))
    if isinstance(cfg, RunConfig):
        if cfg.model.tensor_model_parallel_size == 1:
            options.append(("model.sequence_parallel", bool, "it requires tensor_model_parallel_size > 1"))
        options += _tokenizer_options(cfg.model)
    elif cfg.model.encoder_frozen:
        reason = "the metrics of a head on a frozen encoder are in the directory of the run"
        options += [(f"exp_manager.create_{name}_logger", bool, reason) for name in _LOGGERS]
    for key, has_no_effect, reason in options:
        if has_no_effect(value := _read(cfg, key)):
            log.warning("%s=%s has no effect: %s", key, value, reason)


def _tokenizer_options(model: ModelConfig) -> Iterator[_Option]:
    """Yield the options of the tokenizer that have no effect; a class of the user may use all of them."""
    if not model._target_.startswith("bionemo."):
        return
    has_mask_id = isinstance(model, ESM2nvConfig | ESM1bConfig)
    conditions: dict[str, Callable[[Any], bool]] = {
        "library": _differs_from(*_LIBRARIES.get(type(model), ())),
        "type": _differs_from("GPT2BPETokenizer" if isinstance(model, GPT3Config) else "BertWordPieceLowerCase"),
        "model": bool,
        "model_name": lambda name: name and not (has_mask_id and name.startswith("facebook/esm")),
        "mask_id": _differs_from(*([32] if has_mask_id else [])),
    }
    if not isinstance(model, GPT3Config):
        conditions |= {"vocab_file": bool, "merge_file": bool}
    if not isinstance(model, ProtT5nvConfig):
        conditions["num_sentinel_tokens"] = _differs_from()
    reason = "model.tokenizer.vocab_file and merge_file define it" if isinstance(model, GPT3Config) else _BUILT_IN
    yield from ((f"model.tokenizer.{key}", has_no_effect, reason) for key, has_no_effect in conditions.items())


def _read(cfg: RunConfig | DownstreamConfig, key: str) -> Any:
    """Return the value of a dotted key; None if this configuration does not have the key."""
    value: Any = cfg
    for name in key.split("."):
        value = getattr(value, name, None)
    return value
