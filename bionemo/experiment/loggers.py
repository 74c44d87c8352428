# SPDX-License-Identifier: Apache-2.0
"""Loggers of a run: Weights & Biases, MLflow, DLLogger, ClearML and Neptune; NeMo's exp_manager starts TensorBoard.

They are started here, because exp_manager passes two names to MLflow. An error of a logger, such as a server that does
not answer, is noted and does not end the run.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial, wraps
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from bionemo.common.errors import UserError, optional_dependency
from bionemo.common.redaction import redact_text, redact_tree
from bionemo.config.schema import ExpManagerConfig
from bionemo.config.schema.exp_manager import ClearMLParams, DLLoggerParams, MLFlowParams
from bionemo.experiment.quick_imports import import_exp_manager

nemo = import_exp_manager()
log = logging.getLogger(__name__)
_UNREDACTED = ("settings", "dir", "save_dir", "tracking_uri")  # needed to log in and to write
_MLFLOW_TAG = "bionemo.run"  # ID of the run, by which its later starts find the run in MLflow
_MLFLOW_LENGTH = 250  # characters of a parameter that Lightning logs
_PAUSE = 10  # after an error a logger is not called for this many times as long as the failed call took


def start_loggers(trainer: pl.Trainer, config: ExpManagerConfig, directory: Path, run_id: str) -> None:
    """Start the configured loggers on rank 0 and add them to the trainer; errors of its loggers become notes.

    Raises:
        UserError: if the package of a logger is not installed.
    """
    starts: dict[str, Callable[[], Logger]] = {
        "wandb": partial(_start_wandb, config, directory, run_id),
        "mlflow": partial(_start_mlflow, config, run_id),
        "dllogger": partial(_start_dllogger, config, directory),
        "clearml": partial(_start_clearml, config, directory),
        "neptune": partial(_start_neptune, config),
    }
    for name, start in starts.items():
        key = f"create_{name}_logger"
        if not getattr(config, key):
            continue
        _check_installed(name, f"exp_manager.{key}=True")
        if trainer.is_global_zero:
            try:
                trainer.loggers = [*trainer.loggers, start()]
            except Exception as error:
                log.warning("exp_manager.%s=True: nothing is logged there by this start: %s", key, _one_line(error))
    for logger in trainer.loggers:
        _tolerate_errors(logger)


@contextmanager
def closed_loggers() -> Iterator[None]:
    """End what loggers that start in a `with` block keep in this process; a later run of a sweep would use it, too."""
    earlier = _wandb_run()
    exit_code = 1
    try:
        yield
        exit_code = 0
    finally:
        for package, close in (("wandb", _close_wandb), ("clearml", _close_clearml), ("dllogger", _close_dllogger)):
            try:
                if package in sys.modules and (package != "wandb" or _wandb_run() is not earlier):
                    close(sys.modules[package], exit_code)
            except Exception as error:  # the result of the run must not depend on it
                log.warning("%s: the run cannot be finished (%s)", package, _one_line(error))


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)  # only runs that use W&B import it


def _close_wandb(wandb: Any, exit_code: int) -> None:
    wandb.finish(exit_code)


def _close_clearml(clearml: Any, exit_code: int) -> None:
    if (task := clearml.Task.current_task()) is not None:
        task.close()


def _close_dllogger(dllogger: Any, exit_code: int) -> None:
    dllogger.GLOBAL_LOGGER = dllogger.NotInitializedObject()


def _check_installed(package: str, use: str) -> None:
    if package == "wandb":
        with optional_dependency("wandb", use):
            import_module(package)
        return
    try:
        import_module(package)
    except ImportError as error:
        source = "git+https://github.com/NVIDIA/dllogger" if package == "dllogger" else package
        raise UserError(f"{use}: the package {package} cannot be imported ({error}): pip install {source}") from error
    if package == "neptune" and not hasattr(pl.loggers, "NeptuneLogger"):
        raise UserError(f"{use}: this version of lightning has no logger for Neptune: use another logger")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return redact_text(text if len(text) <= 300 else f"{text[:300]}...") or type(error).__name__


def _tolerate_errors(logger: Logger) -> None:
    """Replace the methods of a logger that training calls by ones that note the first error of each kind."""
    fatal = OSError if isinstance(logger, TensorBoardLogger) else ()  # see log_write_errors.py, and for a full disk
    noted: set[type[Exception]] = set()
    resume_at = 0.0

    def tolerate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal resume_at
            begin = time.monotonic()
            if begin < resume_at:  # do not let training wait again and again for a server that does not answer
                return None
            try:
                return method(*arguments, **keywords)
            except fatal:
                raise
            except Exception as error:
                end = time.monotonic()
                resume_at = end + _PAUSE * (end - begin)
                if type(error) not in noted:
                    noted.add(type(error))
                    name = type(logger).__name__.strip("_")
                    log.warning("%s has lost values, the run goes on: %s", name, _one_line(error))

        return call

    for name in ("log_hyperparams", "log_metrics", "log_graph", "save", "finalize"):
        if hasattr(logger, name):
            setattr(logger, name, tolerate(getattr(logger, name)))


def _arguments(config: Any) -> dict[str, Any]:
    """Return the values that are set, with secrets redacted, because loggers display them."""
    given = {key: value for key, value in asdict(config).items() if value is not None}
    return given | redact_tree({key: value for key, value in given.items() if key not in _UNREDACTED})


def _start_wandb(config: ExpManagerConfig, directory: Path, run_id: str) -> Logger:
    """Start or continue the run with this ID; without access to the server, write it to disk."""
    import wandb

    arguments = {"save_dir": str(directory)} | _arguments(config.wandb_logger_kwargs)
    others = ("id", "version", "resume_from", "fork_from")
    if run_id and "WANDB_RUN_ID" not in os.environ and not any(key in arguments for key in others):
        arguments["id"] = run_id
    if arguments.get("offline"):
        arguments["mode"] = "offline"
    wandb.setup()  # reads WANDB_SILENT before the first warning
    logger = WandbLogger(**arguments)
    reason = "there is no account on this machine"
    try:
        url = logger.experiment.url
    except wandb.Error as error:
        reason = _one_line(error)
        logger = WandbLogger(**arguments | {"offline": True, "mode": "offline"})
        url = logger.experiment.url
    if url:
        log.warning("this run on Weights & Biases: %s", url)
    elif "mode" not in arguments and "WANDB_MODE" not in os.environ:
        log.warning(
            "exp_manager.create_wandb_logger=True: this start is logged offline (%s): log in with `wandb login`, and "
            "upload it with `wandb sync`",
            reason,
        )
    return logger


class _MLflow(MLFlowLogger):
    """Keeps the parameters of the first start, because MLflow refuses other values."""

    def log_hyperparams(self, params: Any) -> None:
        """Log the parameters that the run does not have."""
        from lightning.fabric.utilities.logger import _convert_params, _flatten_dict

        new = {key: str(value)[:_MLFLOW_LENGTH] for key, value in _flatten_dict(_convert_params(params)).items()}
        known = self.experiment.get_run(self.run_id).data.params
        if changed := sorted(key for key in new.keys() & known.keys() if new[key] != known[key]):
            log.warning("MLflow keeps the first values of parameters that have changed: %s", ", ".join(changed[:8]))
        super().log_hyperparams({key: value for key, value in new.items() if key not in known})


def _start_mlflow(config: ExpManagerConfig, run_id: str) -> Logger:
    """Start a run with the ID as a tag, or continue the run that has it."""
    arguments = _arguments(config.mlflow_logger_kwargs or MLFlowParams())
    name = config.name or "default"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # training waits; the default takes minutes
    if "save_dir" not in arguments:
        arguments = {"tracking_uri": import_module("mlflow").get_tracking_uri()} | arguments
    arguments = {"experiment_name": name, "run_name": config.version or name} | arguments
    arguments["tags"] = {**arguments.get("tags", {}), _MLFLOW_TAG: run_id}
    logger = _MLflow(**arguments)
    client = logger._mlflow_client
    experiment = client.get_experiment_by_name(arguments["experiment_name"])
    if run_id and experiment is not None and "run_id" not in arguments:
        found = client.search_runs([experiment.experiment_id], f"tags.`{_MLFLOW_TAG}` = '{run_id}'", max_results=1)
        logger._run_id = found[0].info.run_id if found else None
    client = logger.experiment  # starts or opens the run
    client.update_run(logger.run_id, status="RUNNING")
    return logger


def _start_dllogger(config: ExpManagerConfig, directory: Path) -> Logger:
    """Write a new file, `NAME-1.json` and so on if there is one of an earlier start."""
    arguments = {"verbose": False, "stdout": False} | _arguments(config.dllogger_logger_kwargs or DLLoggerParams())
    path = Path(arguments.get("json_file", directory / "dllogger.json"))
    names = (path.with_name(f"{path.stem}-{number}{path.suffix}" if number else path.name) for number in count())
    arguments["json_file"] = str(next(name for name in names if not name.exists()))
    return nemo.DLLogger(**arguments)


def _start_clearml(config: ExpManagerConfig, directory: Path) -> Logger:
    """Start the task, which NeMo's logger then uses: it would record `git diff` and search a checkout for imports."""
    import clearml

    params, name = nemo.ClearMLParams(**_arguments(config.clearml_logger_kwargs or ClearMLParams())), config.name
    clearml.Task.init(
        project_name=os.getenv("CLEARML_PROJECT", params.project or "NeMo"),  # as in NeMo, otherwise it is an error
        task_name=os.getenv("CLEARML_TASK", params.task or f"Trainer {name or 'default'}"),
        auto_connect_frameworks={"pytorch": params.connect_pytorch, "detect_repository": False},
        output_uri=True,
        tags=["NeMo", *(params.tags or ())],
    )
    return nemo.ClearMLLogger(params, str(directory), name or "default", False)


def _start_neptune(config: ExpManagerConfig) -> Logger:
    module: Any = import_module("lightning.pytorch.loggers.neptune")
    logger: Logger = module.NeptuneLogger(**config.neptune_logger_kwargs or {})
    return logger
