# SPDX-License-Identifier: Apache-2.0
"""What a configuration may say that this version does not do yet: refused before anything is read or written."""

import logging

from bionemo.config.schema import RunConfig
from bionemo.errors import UserError

log = logging.getLogger(__name__)


def refuse_unbuilt(cfg: RunConfig) -> None:
    """End a run that asks for what is not there.

    Raises:
        UserError: naming the key and the value to give it.
    """
    model = cfg.model
    asked = {  # key: what it is set to, and what it has to be
        "model.tensor_model_parallel_size": (model.tensor_model_parallel_size, 1),
        "model.pipeline_model_parallel_size": (model.pipeline_model_parallel_size, 1),
        "model.sequence_parallel": (model.sequence_parallel, False),
        "model.activations_checkpoint_granularity": (model.activations_checkpoint_granularity, None),
        "model.activations_checkpoint_method": (model.activations_checkpoint_method, None),
        "model.dwnstr_task_validation.enabled": (model.dwnstr_task_validation.enabled, False),
        "model.validation.validation_enabled": (model.validation.validation_enabled, False),
        "do_preprocessing": (cfg.do_preprocessing, False),
    }
    refused = {key: values for key, values in asked.items() if values[0] != values[1]}
    if refused:
        given = ", ".join(f"{key}={value}" for key, (value, _) in refused.items())
        needed = " ".join(f"{key}={'null' if value is None else value}" for key, (_, value) in refused.items())
        raise UserError(f"{given}: not built yet; for now run with {needed}")
    if cfg.exp_manager.checkpoint_callback_params.always_save_nemo:
        log.warning("exp_manager.checkpoint_callback_params.always_save_nemo=True: no .nemo file is written yet")
