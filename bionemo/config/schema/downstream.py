# SPDX-License-Identifier: Apache-2.0
"""The root of a downstream run: a pretrained model, fine-tuned on a labelled task."""

from dataclasses import dataclass

from bionemo.config.schema.preparation import FlipJob


@dataclass(kw_only=True)
class DownstreamDataConfig:
    """A labelled data set."""

    task_name: str | list[str]  # a task of FLIP; several, or all, when data is only prepared
    preprocessed_data_path: str  # directory that holds, or gets, a directory for each task
    dataset_path: str  # directory of the task
    preprocessing: FlipJob


@dataclass(kw_only=True)
class DownstreamModelConfig:
    """What is trained."""

    data: DownstreamDataConfig


@dataclass(kw_only=True)
class DownstreamConfig:
    """Everything a downstream command can be told."""

    name: str  # of the experiment
    do_preprocessing: bool  # prepare the data set
    do_training: bool  # fine-tune; without it data is prepared, as in v1
    do_testing: bool  # run the test set at the end
    model: DownstreamModelConfig
