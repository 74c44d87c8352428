# SPDX-License-Identifier: Apache-2.0
"""The root of a configuration: what a command is asked to do."""

from dataclasses import dataclass

from bionemo.config.schema.cluster import ClusterConfig
from bionemo.config.schema.exp_manager import ExpManagerConfig
from bionemo.config.schema.model import ModelConfig
from bionemo.config.schema.ranges import Seed
from bionemo.config.schema.trainer import TrainerConfig


@dataclass(kw_only=True)
class RunConfig:
    """Everything a command can be told."""

    name: str  # of the experiment: names its directory and its loggers' runs
    desc: str | None = None  # free text
    do_preprocessing: bool  # prepare the data set, then stop unless do_training
    do_training: bool  # train
    do_testing: bool  # run the test set at the end
    seed: Seed | None = None  # of the data, where model.data.seed follows it (MegaMolBART); model.seed is another
    restore_from_path: str | None  # weights to start from (.nemo or checkpoint directory)
    trainer: TrainerConfig
    exp_manager: ExpManagerConfig
    model: ModelConfig  # the dataclass that `model._target_` is listed with in SCHEMAS
    cluster: ClusterConfig  # where `python -m bionemo.launch` sends it
