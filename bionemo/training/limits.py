# SPDX-License-Identifier: Apache-2.0
"""What a configuration may say that this version does not do: refused, or noted where nothing is lost by it."""

import logging
from typing import Any

from bionemo.config.schema import GPT3Config, ProteinDataConfig, RunConfig
from bionemo.errors import UserError

log = logging.getLogger(__name__)


def refuse_unbuilt(cfg: RunConfig) -> None:
    """End a run that asks for what is not there, before anything is imported, read or written for it.

    Raises:
        UserError: naming the key and the value to give it.
    """
    model, manager = cfg.model, cfg.exp_manager
    asked: dict[str, tuple[Any, Any]] = {  # key: what it is set to, and what it has to be
        "model.validation.validation_enabled": (model.validation.validation_enabled, False),
        "exp_manager.ema.enable": (bool(manager.ema and manager.ema.enable), False),
    }
    refused = {key: values for key, values in asked.items() if values[0] != values[1]}
    if refused:
        given = ", ".join(f"{key}={value}" for key, (value, _) in refused.items())
        needed = " ".join(f"{key}={'null' if value is None else value}" for key, (_, value) in refused.items())
        raise UserError(f"{given}: not built yet; for now run with {needed}")


def note_ineffective(cfg: RunConfig) -> None:
    """Say which keys were set and change nothing, and what to do instead."""
    data, tokenizer = cfg.model.data, cfg.model.tokenizer
    saving = cfg.exp_manager.checkpoint_callback_params
    proteins = data if isinstance(data, ProteinDataConfig) else None
    own_files = isinstance(cfg.model, GPT3Config)
    own_alphabet = "the alphabets are part of the package"
    by_step = "set every_n_train_steps or train_time_interval"
    by_name = "checkpoints are directories named by filename"
    ineffective = {  # key: whether it was set, and why that changes nothing
        "model.data.dataloader_type": (data.dataloader_type != "single", "the order follows from model.data.shuffle"),
        "model.data.force_regen_sample_mapping": (
            proteins is not None and proteins.force_regen_sample_mapping,
            "the order is never stored",
        ),
        "model.sequence_parallel": (
            cfg.model.sequence_parallel and cfg.model.tensor_model_parallel_size == 1,
            "it divides the sequence over tensor ranks, of which there is one",
        ),
        "model.data.train.sort_fastas=False": (
            proteins is not None and proteins.train.sort_fastas is False,
            "members are always put beside their cluster",
        ),
        "model.tokenizer.model": (tokenizer.model, own_alphabet),
        "model.tokenizer.vocab_file": (tokenizer.vocab_file and not own_files, own_alphabet),
        **{
            f"exp_manager.checkpoint_callback_params.{key}": (getattr(saving, key), reason)
            for key, reason in {
                "every_n_epochs": by_step,
                "save_on_train_epoch_end": by_step,
                "save_last_n_optim_states": "every checkpoint holds the optimizer, unless save_weights_only",
                "filepath": by_name,
            }.items()
        },
        "exp_manager.checkpoint_callback_params.save_last=False": (
            saving.save_last is False,
            "the last one is always kept: a run goes on from it",
        ),
    }
    for key, (given, reason) in ineffective.items():
        if given:
            log.warning("%s has no effect: %s", key, reason)
