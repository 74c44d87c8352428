# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a labelled task: prepare its data, train, test.

python -m bionemo.finetune --config-name=downstream_flip_sec_str model.restore_encoder_path=esm2.nemo
"""

from pathlib import Path

from bionemo.common.errors import UserError
from bionemo.common.launcher_environment import this_process
from bionemo.common.lock import run_lock
from bionemo.config import run
from bionemo.config.help import Topic
from bionemo.config.schema import DownstreamConfig
from bionemo.config.schema.downstream import DownstreamModelConfig
from bionemo.training.unsupported_options import note_ineffective

_TOPIC = Topic(
    DownstreamConfig,
    "model.data.task_name=scl",
    False,
    (
        "do_training=False model.data.preprocessed_data_path=data/FLIP",
        "do_training=False model.data.task_name=all model.data.preprocessed_data_path=data/FLIP",
        "do_training=False model.data.preprocessing.source=downloads/FLIP model.data.preprocessed_data_path=data/FLIP",
        "model.restore_encoder_path=esm2.nemo model.data.preprocessed_data_path=data/FLIP",
        "model.restore_encoder_path=RUN/checkpoints/esm2-8M-last trainer.max_epochs=5 exp_manager.exp_dir=results",
        "model.restore_encoder_path=esm2.nemo model.encoder_frozen=False model.freeze_layers=-2",
        "model.restore_encoder_path=esm2.nemo model.encoder_frozen=False model.restore_head_path=RUN/head.safetensors",
        "model.restore_encoder_path=esm2.nemo model.encoder_frozen=False model.peft.enabled=True",
    ),
)


def main(config_name: str = "downstream_flip_sec_str", config_dir: str | Path | None = None) -> None:
    """Compose the configuration that the command line describes, then do what it asks for."""
    run(carry_out, config_name, config_dir, _TOPIC)


def carry_out(cfg: DownstreamConfig) -> None:
    """Prepare data, train, test: whichever is asked for; without training, data is prepared, as in v1.

    Raises:
        UserError: for what is not built, and for a model or data that cannot be used.
    """
    if cfg.do_preprocessing or not cfg.do_training:
        from bionemo.preparation import prepare

        prepare(cfg.model.data.preprocessing)
    if not cfg.do_training:
        return
    _see_that_it_fits(cfg.model)
    from bionemo.interop.quiet import our_messages_to_console, quiet_dependencies

    quiet_dependencies()
    from bionemo.interop.nemo import log_directory

    quiet_dependencies()
    our_messages_to_console()
    note_ineffective(cfg)
    directory = log_directory(cfg.exp_manager)
    if cfg.model.encoder_frozen:
        process = this_process()
        if process is not None and process.rank:  # the work of one: seconds, once the vectors are there
            return
        from bionemo.finetuning.run import fine_tune_head

        with run_lock(directory):
            fine_tune_head(cfg, directory)
    else:
        from bionemo.finetuning.finetune import fine_tune

        fine_tune(cfg, directory)


def _see_that_it_fits(config: DownstreamModelConfig) -> None:
    """Refuse what contradicts itself.

    Raises:
        UserError: naming the keys.
    """
    if config.restore_encoder_path is None:
        raise UserError("missing value: give model.restore_encoder_path=..., the pretrained model")
    tuned = {
        "model.peft.enabled=True": config.peft.enabled,
        "model.freeze_layers": config.freeze_layers,
        "model.encoder_lr_scale": config.encoder_lr_scale != 1,
        "model.restore_head_path": config.restore_head_path is not None,
    }
    for key, given in tuned.items():
        if config.encoder_frozen and given:
            raise UserError(f"{key} has no effect on an encoder that is frozen: set model.encoder_frozen=False")
    if config.peft.enabled and config.freeze_layers:
        raise UserError("model.freeze_layers: with model.peft.enabled=True all layers stay: leave one of them out")
    if config.peft.enabled and config.encoder_lr_scale != 1:
        raise UserError("model.encoder_lr_scale: with model.peft.enabled=True only adapters learn: leave it out")
