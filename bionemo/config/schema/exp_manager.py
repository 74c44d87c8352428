# SPDX-License-Identifier: Apache-2.0
"""`exp_manager`: directories, loggers and checkpoints of a run, under the names of NeMo's exp_manager.

None selects NeMo's default.
"""

from dataclasses import dataclass
from typing import Any, Literal

from bionemo.config.schema.ranges import (
    DurationOrZero,
    DurationText,
    IntOrUnlimited,
    NonNegativeFloat,
    NonNegativeInt,
    StepCount,
)


@dataclass(kw_only=True)
class WandbLoggerConfig:
    """Arguments of Lightning's WandbLogger and of wandb.init."""

    project: str | None = None  # project
    name: str | None = None  # name of the run
    group: str | None = None  # group of runs
    job_type: str | None = None  # kind of the run
    notes: str | None = None  # notes of the run
    tags: list[str] | None = None  # tags of the run
    offline: bool | None = None  # write only to disk; upload later with `wandb sync`
    entity: str | None = None  # user or team
    id: str | None = None  # id of the run; None: that of the training run, which later starts continue
    version: str | None = None  # the same as id
    dir: str | None = None  # directory of the files
    save_dir: str | None = None  # directory of the files; the same as dir
    prefix: str | None = None  # of metric names
    resume: bool | str | None = None  # continue a run of the same id
    resume_from: str | None = None  # continue a run from a step
    fork_from: str | None = None  # start from a step of another run
    mode: Literal["online", "offline", "disabled", "shared"] | None = None  # whether to upload
    anonymous: bool | None = None  # log without an account
    force: bool | None = None  # end the run if the user is not logged in
    reinit: bool | str | None = None  # start another run in the same process
    save_code: bool | None = None  # upload the main script
    sync_tensorboard: bool | None = None  # upload TensorBoard's values
    allow_val_change: bool | None = None  # allow that configuration values change
    config: dict[str, Any] | None = None  # additional values
    config_exclude_keys: list[str] | None = None  # configuration keys that are not uploaded
    config_include_keys: list[str] | None = None  # configuration keys that are uploaded
    settings: dict[str, Any] | None = None  # arguments of wandb.Settings


@dataclass(kw_only=True)
class MLFlowParams:
    """Arguments of the MLflow logger."""

    experiment_name: str | None = None  # experiment
    run_name: str | None = None  # name of the run
    tracking_uri: str | None = None  # address of the server
    tags: dict[str, str] | None = None  # tags of the run
    save_dir: str | None = None  # directory of the files
    prefix: str | None = None  # of metric names
    artifact_location: str | None = None  # place of artifacts
    run_id: str | None = None  # id of the run; None: that of the training run, which later starts continue


@dataclass(kw_only=True)
class DLLoggerParams:
    """Arguments of the DLLogger."""

    verbose: bool | None = None  # print more
    stdout: bool | None = None  # print values
    json_file: str | None = None  # file of the values; None: dllogger.json in the run's directory


@dataclass(kw_only=True)
class ClearMLParams:
    """Arguments of the ClearML logger."""

    project: str | None = None  # project
    task: str | None = None  # name of the task
    connect_pytorch: bool | None = None  # record what PyTorch saves
    tags: list[str] | None = None  # tags of the task


@dataclass(kw_only=True)
class CallbackParams:
    """Names, frequency and number of checkpoints."""

    dirpath: str | None = None  # directory of checkpoints; None: checkpoints in the run's directory
    filename: str | None = None  # name of checkpoints, with values such as {val_loss:.2f}
    monitor: str | None = None  # the metric that ranks checkpoints
    mode: Literal["min", "max"] | None = None  # whether the lowest or the highest value is best
    save_top_k: IntOrUnlimited | None = None  # number of best checkpoints that are kept; -1: all
    save_weights_only: bool | None = None  # save no optimizer state; such a checkpoint cannot be resumed
    every_n_train_steps: StepCount | None = None  # steps between checkpoints; None: at every validation
    train_time_interval: DurationOrZero | None = None  # time between checkpoints
    prefix: str | None = None  # of the .nemo file; default: exp_manager.name
    postfix: str | None = None  # of the .nemo file; default: .nemo
    save_best_model: bool | None = None  # export the best checkpoint to .nemo instead of the last one
    always_save_nemo: bool | None = None  # export to .nemo at every save, replacing the previous export
    save_nemo_on_train_end: bool | None = None  # export to .nemo at the end
    async_save: bool | None = None  # write during training; None: if training uses a GPU


@dataclass(kw_only=True)
class EarlyStoppingParams:
    """Stop if a metric no longer improves."""

    monitor: str | None = None  # the metric
    mode: Literal["min", "max"] | None = None  # whether a lower or a higher value is better
    min_delta: NonNegativeFloat | None = None  # smallest change that is an improvement
    patience: NonNegativeInt | None = None  # validations without improvement
    verbose: bool | None = None  # print why the run stops
    strict: bool | None = None  # end the run if the metric is missing
    check_finite: bool | None = None  # stop if the metric is not finite
    stopping_threshold: float | None = None  # stop if the metric reaches this value
    divergence_threshold: float | None = None  # stop if the metric is worse than this value
    check_on_train_epoch_end: bool | None = None  # check at the end of epochs instead of validations
    log_rank_zero_only: bool | None = None  # print on rank 0 only


@dataclass(kw_only=True)
class ExpManagerConfig:
    """Directories, resumption, loggers and callbacks of a run."""

    # directory and resumption
    name: str | None  # directory within exp_dir
    exp_dir: str | None  # directory of the run
    explicit_log_dir: str | None  # None: exp_dir/name/version
    version: str | None = None  # directory within exp_dir/name
    use_datetime_version: bool  # keep False: all ranks must use the same directory
    resume_if_exists: bool  # from the newest checkpoint in the directory
    resume_ignore_no_checkpoint: bool  # start a new run if there is none
    resume_from_checkpoint: str | None = None  # a checkpoint to resume from, instead of the newest one of this run
    # loggers
    create_tensorboard_logger: bool  # write TensorBoard events
    summary_writer_kwargs: dict[str, Any] | None = None  # arguments of TensorBoard's SummaryWriter
    create_wandb_logger: bool  # log to Weights & Biases
    wandb_logger_kwargs: WandbLoggerConfig  # settings of Weights & Biases
    create_mlflow_logger: bool | None = None  # log to MLflow
    mlflow_logger_kwargs: MLFlowParams | None = None  # settings of MLflow
    create_dllogger_logger: bool | None = None  # log with DLLogger
    dllogger_logger_kwargs: DLLoggerParams | None = None  # settings of DLLogger
    create_clearml_logger: bool | None = None  # log to ClearML
    clearml_logger_kwargs: ClearMLParams | None = None  # settings of ClearML
    create_neptune_logger: bool | None = None  # log to Neptune
    neptune_logger_kwargs: dict[str, Any] | None = None  # settings of Neptune
    log_global_rank_0_only: bool | None = None  # NeMo 1.23: one log file
    # checkpoints
    create_checkpoint_callback: bool  # save checkpoints
    checkpoint_callback_params: CallbackParams  # names, frequency and number of checkpoints
    # other callbacks
    create_early_stopping_callback: bool | None = None  # stop if a metric no longer improves
    early_stopping_callback_params: EarlyStoppingParams | None = None  # when to stop
    create_straggler_detection_callback: bool | None = None  # detect slow ranks
    straggler_detection_params: dict[str, Any] | None = None  # NeMo's settings of this detection
    create_fault_tolerance_callback: bool | None = None  # detect and restart hung ranks
    fault_tolerance: dict[str, Any] | None = None  # NeMo's settings of this detection
    # other
    files_to_copy: list[str] | None = None  # files that are copied to the run's directory
    max_time_per_run: DurationText | None = None  # DD:HH:MM:SS; the run saves a checkpoint and ends
    seconds_to_sleep: NonNegativeFloat | None = None  # wait before the run starts, for example for a file system
