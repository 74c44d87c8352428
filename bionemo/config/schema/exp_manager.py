# SPDX-License-Identifier: Apache-2.0
"""`exp_manager`: directories, loggers and checkpoints of a run, under the names of NeMo's exp_manager.

Only what our YAML gives is required; what is None is left to NeMo's own default.
"""

from dataclasses import dataclass
from typing import Any, Literal

from bionemo.config.schema.ranges import (
    DurationOrZero,
    DurationText,
    NotNegative,
    NotNegativeFloat,
    Positive,
    PositiveFloat,
    Share,
    Steps,
    Unlimited,
)


@dataclass(kw_only=True)
class WandbLoggerConfig:
    """Arguments of Lightning's WandbLogger and, through it, of wandb.init."""

    project: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    offline: bool | None = None  # write to disk only; `wandb sync` uploads later
    entity: str | None = None  # user or team
    id: str | None = None
    version: str | None = None  # the same as id
    dir: str | None = None
    save_dir: str | None = None
    prefix: str | None = None  # put before every metric's name
    log_model: bool | Literal["all"] | None = None
    checkpoint_name: str | None = None
    resume: bool | str | None = None
    resume_from: str | None = None
    fork_from: str | None = None
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    anonymous: bool | None = None
    force: bool | None = None
    reinit: bool | str | None = None
    save_code: bool | None = None
    sync_tensorboard: bool | None = None
    allow_val_change: bool | None = None
    config: dict[str, Any] | None = None  # more values to show beside the run's own
    config_exclude_keys: list[str] | None = None
    config_include_keys: list[str] | None = None
    settings: dict[str, Any] | None = None


@dataclass(kw_only=True)
class MLFlowParams:
    """Arguments of the MLflow logger."""

    experiment_name: str | None = None
    run_name: str | None = None
    tracking_uri: str | None = None
    tags: dict[str, Any] | None = None
    save_dir: str | None = None
    prefix: str | None = None
    artifact_location: str | None = None
    run_id: str | None = None
    log_model: bool | None = None


@dataclass(kw_only=True)
class DLLoggerParams:
    """Arguments of the DLLogger."""

    verbose: bool | None = None
    stdout: bool | None = None
    json_file: str | None = None


@dataclass(kw_only=True)
class ClearMLParams:
    """Arguments of the ClearML logger."""

    project: str | None = None
    task: str | None = None
    connect_pytorch: bool | None = None
    model_name: str | None = None
    tags: list[str] | None = None
    log_model: bool | None = None
    log_cfg: bool | None = None
    log_metrics: bool | None = None


@dataclass(kw_only=True)
class CallbackParams:
    """Which checkpoints are kept, when they are written and what they are called."""

    filepath: str | None = None
    dirpath: str | None = None
    filename: str | None = None
    monitor: str | None = None  # the metric that ranks checkpoints
    mode: Literal["min", "max"] | None = None
    verbose: bool | None = None
    save_last: bool | None = None
    save_top_k: Unlimited | None = None
    save_weights_only: bool | None = None
    auto_insert_metric_name: bool | None = None
    every_n_epochs: NotNegative | None = None
    every_n_train_steps: Steps | None = None
    train_time_interval: DurationOrZero | None = None
    prefix: str | None = None  # of the .nemo file, exp_manager.name by default
    postfix: str | None = None  # .nemo by default
    save_best_model: bool | None = None  # the .nemo file is of the best checkpoint instead of the last
    always_save_nemo: bool | None = None  # export a .nemo file at every save; the next one replaces it
    save_nemo_on_train_end: bool | None = None
    model_parallel_size: Positive | None = None
    save_on_train_epoch_end: bool | None = None
    async_save: bool | None = None  # write while training goes on; None: when it computes on a GPU
    save_last_n_optim_states: Unlimited | None = None


@dataclass(kw_only=True)
class EarlyStoppingParams:
    """When to stop because nothing improves."""

    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    min_delta: NotNegativeFloat | None = None
    patience: NotNegative | None = None  # validations without improvement
    verbose: bool | None = None
    strict: bool | None = None
    check_finite: bool | None = None
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None
    log_rank_zero_only: bool | None = None


@dataclass(kw_only=True)
class IPLEpochStopperParams:
    """When to stop for new pseudo-labels (speech models)."""

    enable_stop: bool | None = None
    stop_every_n_epochs: Positive | None = None


@dataclass(kw_only=True)
class StepTimingParams:
    """How step times are averaged."""

    reduction: str | None = None
    sync_cuda: bool | None = None
    buffer_size: Positive | None = None


@dataclass(kw_only=True)
class EMAParams:
    """A moving average of the weights."""

    enable: bool | None = None
    decay: Share | None = None
    cpu_offload: bool | None = None
    validate_original_weights: bool | None = None
    every_n_steps: Positive | None = None


@dataclass(kw_only=True)
class StragglerDetectionParams:
    """How slow ranks are found."""

    report_time_interval: PositiveFloat | None = None
    calc_relative_gpu_perf: bool | None = None
    calc_individual_gpu_perf: bool | None = None
    num_gpu_perf_scores_to_log: NotNegative | None = None
    gpu_relative_perf_threshold: Share | None = None
    gpu_individual_perf_threshold: Share | None = None
    stop_if_detected: bool | None = None


@dataclass(kw_only=True)
class FaultToleranceParams:
    """How hung ranks are found and restarted."""

    workload_check_interval: PositiveFloat | None = None
    initial_rank_heartbeat_timeout: PositiveFloat | None = None
    rank_heartbeat_timeout: PositiveFloat | None = None
    calculate_timeouts: bool | None = None
    safety_factor: PositiveFloat | None = None
    rank_termination_signal: str | None = None
    log_level: str | None = None
    max_rank_restarts: NotNegative | None = None
    max_subsequent_job_failures: NotNegative | None = None
    additional_ft_launcher_args: str | None = None
    simulated_fault: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ExpManagerConfig:
    """Where a run writes, how it resumes, whom it tells."""

    # directory and resumption
    name: str | None
    exp_dir: str | None
    explicit_log_dir: str | None  # used as it stands when given; else exp_dir/name/version
    version: str | None = None
    use_datetime_version: bool  # a directory per start: every rank must agree on it, so off
    resume_if_exists: bool  # go on from the newest checkpoint of the same directory
    resume_ignore_no_checkpoint: bool  # and start afresh when there is none
    resume_past_end: bool | None = None
    resume_from_checkpoint: str | None = None
    # loggers
    create_tensorboard_logger: bool
    summary_writer_kwargs: dict[str, Any] | None = None
    create_wandb_logger: bool
    wandb_logger_kwargs: WandbLoggerConfig
    create_mlflow_logger: bool | None = None
    mlflow_logger_kwargs: MLFlowParams | None = None
    create_dllogger_logger: bool | None = None
    dllogger_logger_kwargs: DLLoggerParams | None = None
    create_clearml_logger: bool | None = None
    clearml_logger_kwargs: ClearMLParams | None = None
    create_neptune_logger: bool | None = None
    neptune_logger_kwargs: dict[str, Any] | None = None
    log_local_rank_0_only: bool | None = None  # of NeMo 1.23: one log file per node
    log_global_rank_0_only: bool | None = None  # of NeMo 1.23: one log file in all
    # checkpoints
    create_checkpoint_callback: bool
    checkpoint_callback_params: CallbackParams
    create_preemption_callback: bool | None = None
    disable_validation_on_resume: bool | None = None
    # other callbacks
    create_early_stopping_callback: bool | None = None
    early_stopping_callback_params: EarlyStoppingParams | None = None
    create_ipl_epoch_stopper_callback: bool | None = None
    ipl_epoch_stopper_callback_params: IPLEpochStopperParams | None = None
    ema: EMAParams | None = None
    create_straggler_detection_callback: bool | None = None
    straggler_detection_params: StragglerDetectionParams | None = None
    create_fault_tolerance_callback: bool | None = None
    fault_tolerance: FaultToleranceParams | None = None
    # the rest
    files_to_copy: list[str] | None = None
    log_step_timing: bool | None = None
    log_delta_step_timing: bool | None = None
    step_timing_kwargs: StepTimingParams | None = None
    log_tflops_per_sec_per_gpu: bool | None = None
    max_time_per_run: DurationText | None = None  # DD:HH:MM:SS; saves and stops
    seconds_to_sleep: NotNegativeFloat | None = None
