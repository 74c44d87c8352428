# SPDX-License-Identifier: Apache-2.0
"""`exp_manager`: directories, loggers and checkpoints of a run, under the names of NeMo's exp_manager.

None selects NeMo's default.
"""

from dataclasses import dataclass
from typing import Any, Literal

from bionemo.config.schema.ranges import (
    DurationOrZero,
    DurationText,
    Fraction,
    IntOrUnlimited,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    StepCount,
)


@dataclass(kw_only=True)
class WandbLoggerConfig:
    """Arguments of Lightning's WandbLogger and of wandb.init."""

    project: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    notes: str | None = None
    tags: list[str] | None = None
    offline: bool | None = None  # write only to disk; upload later with `wandb sync`
    entity: str | None = None  # user or team
    id: str | None = None
    version: str | None = None  # the same as id
    dir: str | None = None
    save_dir: str | None = None
    prefix: str | None = None  # of metric names
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
    config: dict[str, Any] | None = None  # additional values
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
    """Names, frequency and number of checkpoints."""

    filepath: str | None = None
    dirpath: str | None = None
    filename: str | None = None
    monitor: str | None = None  # the metric that ranks checkpoints
    mode: Literal["min", "max"] | None = None
    verbose: bool | None = None
    save_last: bool | None = None
    save_top_k: IntOrUnlimited | None = None
    save_weights_only: bool | None = None
    auto_insert_metric_name: bool | None = None
    every_n_epochs: NonNegativeInt | None = None
    every_n_train_steps: StepCount | None = None
    train_time_interval: DurationOrZero | None = None
    prefix: str | None = None  # of the .nemo file; default: exp_manager.name
    postfix: str | None = None  # of the .nemo file; default: .nemo
    save_best_model: bool | None = None  # export the best checkpoint to .nemo instead of the last one
    always_save_nemo: bool | None = None  # export to .nemo at every save, replacing the previous export
    save_nemo_on_train_end: bool | None = None
    model_parallel_size: PositiveInt | None = None
    save_on_train_epoch_end: bool | None = None
    async_save: bool | None = None  # write during training; None: if training uses a GPU
    save_last_n_optim_states: IntOrUnlimited | None = None


@dataclass(kw_only=True)
class EarlyStoppingParams:
    """Stop if a metric no longer improves."""

    monitor: str | None = None
    mode: Literal["min", "max"] | None = None
    min_delta: NonNegativeFloat | None = None
    patience: NonNegativeInt | None = None  # validations without improvement
    verbose: bool | None = None
    strict: bool | None = None
    check_finite: bool | None = None
    stopping_threshold: float | None = None
    divergence_threshold: float | None = None
    check_on_train_epoch_end: bool | None = None
    log_rank_zero_only: bool | None = None


@dataclass(kw_only=True)
class IPLEpochStopperParams:
    """Stop for new pseudo-labels (speech models)."""

    enable_stop: bool | None = None
    stop_every_n_epochs: PositiveInt | None = None


@dataclass(kw_only=True)
class StepTimingParams:
    """Averaging of step times."""

    reduction: str | None = None
    sync_cuda: bool | None = None
    buffer_size: PositiveInt | None = None


@dataclass(kw_only=True)
class EMAParams:
    """Exponential moving average of the weights."""

    enable: bool | None = None
    decay: Fraction | None = None
    cpu_offload: bool | None = None
    validate_original_weights: bool | None = None
    every_n_steps: PositiveInt | None = None


@dataclass(kw_only=True)
class StragglerDetectionParams:
    """Detection of slow ranks."""

    report_time_interval: PositiveFloat | None = None
    calc_relative_gpu_perf: bool | None = None
    calc_individual_gpu_perf: bool | None = None
    num_gpu_perf_scores_to_log: NonNegativeInt | None = None
    gpu_relative_perf_threshold: Fraction | None = None
    gpu_individual_perf_threshold: Fraction | None = None
    stop_if_detected: bool | None = None


@dataclass(kw_only=True)
class FaultToleranceParams:
    """Detection and restart of hung ranks."""

    workload_check_interval: PositiveFloat | None = None
    initial_rank_heartbeat_timeout: PositiveFloat | None = None
    rank_heartbeat_timeout: PositiveFloat | None = None
    calculate_timeouts: bool | None = None
    safety_factor: PositiveFloat | None = None
    rank_termination_signal: str | None = None
    log_level: str | None = None
    max_rank_restarts: NonNegativeInt | None = None
    max_subsequent_job_failures: NonNegativeInt | None = None
    additional_ft_launcher_args: str | None = None
    simulated_fault: dict[str, Any] | None = None


@dataclass(kw_only=True)
class ExpManagerConfig:
    """Directories, resumption, loggers and callbacks of a run."""

    # directory and resumption
    name: str | None
    exp_dir: str | None
    explicit_log_dir: str | None  # None: exp_dir/name/version
    version: str | None = None
    use_datetime_version: bool  # keep False: all ranks must use the same directory
    resume_if_exists: bool  # from the newest checkpoint in the directory
    resume_ignore_no_checkpoint: bool  # start a new run if there is none
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
    log_local_rank_0_only: bool | None = None  # NeMo 1.23: one log file per node
    log_global_rank_0_only: bool | None = None  # NeMo 1.23: one log file
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
    # other
    files_to_copy: list[str] | None = None
    log_step_timing: bool | None = None
    log_delta_step_timing: bool | None = None
    step_timing_kwargs: StepTimingParams | None = None
    log_tflops_per_sec_per_gpu: bool | None = None
    max_time_per_run: DurationText | None = None  # DD:HH:MM:SS; the run saves a checkpoint and ends
    seconds_to_sleep: NonNegativeFloat | None = None
