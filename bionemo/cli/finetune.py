# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a labelled task: prepare its data, train, test.

bionemo finetune --config-name=downstream_flip_sec_str esm2.nemo
"""

import json
import sys
from pathlib import Path

from bionemo.cli.command import run
from bionemo.cli.finetune_arguments import one_target_each, replace_table_arguments
from bionemo.cli.help import CommandSpec
from bionemo.common.console import notify, one_line_errors
from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import is_global_rank_zero, launched_process
from bionemo.common.limits import check_address_space
from bionemo.common.lock import run_lock
from bionemo.config.directories import log_directory
from bionemo.config.schema import DownstreamConfig
from bionemo.config.schema.downstream import DownstreamModelConfig
from bionemo.training.unsupported_options import warn_ignored_options

_SPEC = CommandSpec(
    schema=DownstreamConfig,
    description="Trains a prediction head, and optionally the model, on labelled sequences.",
    example="model.data.task_name=scl",
    has_groups=False,
    examples=(
        "esm2.nemo data=labels.csv",
        "esm2.nemo data=labels.csv model.data.target_column=Tm model.data.split=random",
        "do_training=False model.data.preprocessed_data_path=data/FLIP",
        "do_training=False model.data.task_name=all model.data.preprocessed_data_path=data/FLIP",
        "do_training=False model.data.preprocessing.source=downloads/FLIP model.data.preprocessed_data_path=data/FLIP",
        "esm2.nemo model.data.preprocessed_data_path=data/FLIP",
        "RUN:best trainer.max_epochs=5 exp_manager.exp_dir=results",
        "esm2.nemo model.encoder_frozen=False model.freeze_layers=-2",
        "esm2.nemo model.encoder_frozen=False model.restore_head_path=RUN/head.safetensors",
        "esm2.nemo model.encoder_frozen=False model.peft.enabled=True",
    ),
    model_key="model.restore_encoder_path",
    keys="""\
  data=FILE                 table of sequences and labels; its columns are found, unless these keys name them:
  model.data.sequence_column=NAME, model.data.target_column=NAME (the labels; A,B: a head with an output for
                            each; -m and A,B: one run for each)
  model.data.split=HOW      auto (by a column of the table, else at random), random, scaffold (of molecules), or
                            similarity (of proteins: related ones, by min_seq_id and coverage, are in one split)
""",
)


def main(config_name: str = "downstream_flip_sec_str", config_dir: str | Path | None = None) -> None:
    """Run `bionemo finetune`."""
    with one_line_errors():
        runs = [replace_table_arguments(arguments) for arguments in one_target_each(sys.argv[1:])]
    has_failed = False
    for arguments, found in runs:
        sys.argv[1:] = arguments
        if found:
            notify(found)
        try:
            run(prepare_and_fine_tune, config_name, config_dir, _SPEC)
        except SystemExit as end:
            if end.code != 1 or len(runs) == 1:  # a signal ends all
                raise
            has_failed = True
    if has_failed:
        sys.exit(1)


def prepare_and_fine_tune(cfg: DownstreamConfig) -> dict[str, float]:
    """Prepare the data, train and test, as configured; return the metrics of validation and test.

    Without training, the data is prepared, as in v1.

    Raises:
        UserError: if the configuration contradicts itself, or the model or the data cannot be used.
    """
    if cfg.do_preprocessing or not cfg.do_training:
        from bionemo.preparation import prepare

        if cfg.model.data.preprocessing is None:
            raise UserError("model.data.preprocessing is null, so there is nothing to prepare: set do_training=True")
        prepare(cfg.model.data.preprocessing)
    if not cfg.do_training:
        return {}
    _check(cfg.model)
    from bionemo.experiment.console_logging import log_to_console, silence_dependencies

    check_address_space()
    silence_dependencies()
    from bionemo.experiment.quick_imports import quick_imports

    with quick_imports():
        import bionemo.megatron  # noqa: F401  # before NeMo, which would import more of Megatron-Core
        from bionemo.finetuning.results import REPORT

        if not cfg.model.encoder_frozen:
            from bionemo.finetuning.finetune import fine_tune

    silence_dependencies()
    log_to_console()
    warn_ignored_options(cfg)
    directory = log_directory(cfg.exp_manager)
    if cfg.model.encoder_frozen:
        process = launched_process()
        if process is not None and process.rank:  # one process is enough to train a head
            return {}
        from bionemo.finetuning.linear_probe import run_linear_probe

        with run_lock(directory):
            run_linear_probe(cfg, directory)
    else:
        fine_tune(cfg, directory)
    if not is_global_rank_zero():
        return {}
    report = json.loads((directory / REPORT).read_text())
    return {
        name: value
        for name, value in report.items()
        if name.startswith(("val_", "test_")) and isinstance(value, int | float)
    }


def _check(config: DownstreamModelConfig) -> None:
    if config.restore_encoder_path is None:
        raise UserError("missing value: give MODEL, or model.restore_encoder_path=..., the pretrained model")
    without_effect = {
        "model.peft.enabled=True": config.peft.enabled,
        "model.freeze_layers": config.freeze_layers,
        "model.encoder_lr_scale": config.encoder_lr_scale != 1,
        "model.restore_head_path": config.restore_head_path is not None,
    }
    for key, is_set in without_effect.items():
        if config.encoder_frozen and is_set:
            raise UserError(f"{key} has no effect on a frozen encoder: set model.encoder_frozen=False")
    if config.data.wild_type is not None:
        if not config.encoder_frozen:
            raise UserError("model.data.wild_type: the encoder must be frozen: set model.encoder_frozen=True")
        if config.data.task_type.startswith("token-level"):
            raise UserError("model.data.wild_type: variants need a label for each sequence, not for each residue")
    if config.peft.enabled and config.freeze_layers:
        raise UserError("model.freeze_layers: model.peft.enabled=True freezes all layers: remove one of the two")
    if config.peft.enabled and config.encoder_lr_scale != 1:
        raise UserError("model.encoder_lr_scale: with model.peft.enabled=True only adapters are trained: remove it")
