# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a labelled task: prepare its data, train, test.

python -m bionemo.finetune --config-name=downstream_flip_sec_str model.restore_encoder_path=esm2.nemo
"""

from pathlib import Path

from bionemo.config import run
from bionemo.config.help import Topic
from bionemo.config.schema import DownstreamConfig
from bionemo.errors import UserError

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
    if not cfg.model.encoder_frozen:
        raise UserError("model.encoder_frozen=False: not built yet; for now run with model.encoder_frozen=True")
    from bionemo.interop.quiet import our_messages_to_console, quiet_dependencies

    quiet_dependencies()
    from bionemo.downstream.run import fine_tune_head
    from bionemo.interop.nemo import log_directory, make_directories

    our_messages_to_console()
    directory = log_directory(cfg.exp_manager)
    make_directories(directory)
    fine_tune_head(cfg, directory)


if __name__ == "__main__":
    main()
