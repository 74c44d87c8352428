# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a labelled task: so far its data is prepared, training comes later."""

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
    ),
)


def main(config_name: str = "downstream_flip_sec_str", config_dir: str | Path | None = None) -> None:
    """Compose the configuration that the command line describes, then do what it asks for."""
    run(carry_out, config_name, config_dir, _TOPIC)


def carry_out(cfg: DownstreamConfig) -> None:
    """Prepare the data of the task.

    Raises:
        UserError: when training or testing is asked for.
    """
    if cfg.do_training or cfg.do_testing:
        raise UserError("fine-tuning is not built yet: for now run with do_training=False do_testing=False")
    from bionemo.preparation import prepare

    prepare(cfg.model.data.preprocessing)


if __name__ == "__main__":
    main()
