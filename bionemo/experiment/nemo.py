# SPDX-License-Identifier: Apache-2.0
"""Set up directories, loggers and log files with NeMo's exp_manager. Only quick_imports.py imports `nemo`, too."""

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from nemo.utils import logging as nemo_logging
from nemo.utils.exceptions import NeMoBaseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.redaction import LogFilter, redact_arguments
from bionemo.common.version import __version__
from bionemo.config.schema import ExpManagerConfig
from bionemo.config.text_values import escape_interpolations
from bionemo.experiment.console_logging import log_to_file
from bionemo.experiment.log_write_errors import tolerate_write_errors
from bionemo.experiment.loggers import closed_loggers, start_loggers
from bionemo.experiment.quick_imports import import_exp_manager

nemo = import_exp_manager()
log = logging.getLogger(__name__)
_NO_OUTPUT, _REDACTION = logging.NullHandler(), LogFilter()  # shared, so that repeated runs do not add them again
_MIN_SPACE = 1 << 18  # bytes that must fit into a directory when a run starts
_DISABLED_FEATURES = {  # features that this package implements itself; NeMo's checkpoints, for example, are pickles
    "explicit_log_dir": None,
    "exp_dir": None,
    "version": None,
    "resume_if_exists": False,
    "resume_ignore_no_checkpoint": True,
    "resume_from_checkpoint": None,
    "create_wandb_logger": False,  # see loggers.py
    "create_mlflow_logger": False,
    "create_dllogger_logger": False,
    "create_clearml_logger": False,
    "create_neptune_logger": False,
    "wandb_logger_kwargs": None,
    "mlflow_logger_kwargs": None,
    "dllogger_logger_kwargs": None,
    "clearml_logger_kwargs": None,
    "neptune_logger_kwargs": None,
    "max_time_per_run": None,  # NeMo's timer stops without saving
    "create_checkpoint_callback": False,
    "create_preemption_callback": False,
    "create_early_stopping_callback": False,  # see training/early_stopping.py
    "early_stopping_callback_params": None,
    "checkpoint_callback_params": None,
    "disable_validation_on_resume": False,  # NeMo's loop would also skip the next validation
    "log_step_timing": False,
    "log_delta_step_timing": False,
    "log_tflops_per_sec_per_gpu": False,
}


def make_directories(*directories: Path) -> None:
    """Create the directories of a run and check that logs can be written to them.

    Raises:
        UserError: if a directory cannot be written, or the disk is full.
    """
    for path in directories:
        probe = path / f".write-test-{os.getpid()}"
        with directory_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(_MIN_SPACE))
            except OSError as error:
                if error.errno != errno.EFBIG:  # a limit on the size of one file, which logs may not reach
                    raise
            finally:
                probe.unlink(missing_ok=True)


@contextmanager
def directory_errors(path: Path) -> Iterator[None]:
    """Replace an OSError in a directory of the run by a UserError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"exp_manager: {path} cannot be written ({error.strerror or error}): "
            f"{'free disk space or ' if full else ''}choose another exp_manager.exp_dir"
        ) from error


def start_experiment(trainer: pl.Trainer, config: ExpManagerConfig, directory: Path, run_id: str) -> None:
    """Create the log files and loggers of a run, and add the loggers to the trainer; secrets are redacted.

    All starts of a run, which have the same `run_id`, continue one run of Weights & Biases and MLflow.

    Raises:
        UserError: if exp_manager rejects the configuration, or the package of a logger is not installed.
        OSError: if a file cannot be written.
    """
    tolerate_write_errors()
    known = {field.name for field in fields(nemo.ExpManagerConfig)}
    given: dict[str, Any] = {"seconds_to_sleep": 0}  # by default other ranks wait for 5 s; see _OpenLogFile
    given |= {
        key: value
        for key, value in _without_none(asdict(config)).items()
        if key in known and key not in _DISABLED_FEATURES
    }
    given |= {key: value for key, value in _DISABLED_FEATURES.items() if value is not None} | {
        "explicit_log_dir": str(directory)
    }
    nemo_logging.remove_stream_handlers()
    nemo_logging._logger.addHandler(_NO_OUTPUT)  # without any handler, Python prints warnings itself
    try:
        with _adapted_nemo():
            nemo.exp_manager(trainer, OmegaConf.create(escape_interpolations(given)))
            start_loggers(trainer, config, directory, run_id)
    except ImportError as error:
        raise UserError(f"exp_manager: {error}: install it, or disable that callback") from error
    except (ValueError, TypeError, OmegaConfBaseException, NeMoBaseException) as error:
        raise UserError(f"exp_manager: {(str(error) or type(error).__name__).splitlines()[0]}") from error
    for name in ("nemo_logger", "lightning.pytorch"):
        for written in logging.getLogger(name).handlers:
            written.addFilter(_REDACTION)
    name = f"nemo_log_globalrank-{trainer.global_rank}_localrank-{trainer.local_rank}.txt"
    if trainer.is_global_zero:
        write_atomic(directory / "git-info.log", _describe_version())
        _open_log_file(directory / name)
    elif not config.log_global_rank_0_only:
        trainer.callbacks.append(_OpenLogFile(directory / name))  # type: ignore[attr-defined]


@contextmanager
def _adapted_nemo() -> Iterator[None]:
    """Redact sys.argv, which NeMo and W&B record, and disable two functions of exp_manager.

    check_resume would move all files of the log directory (see run_files.py); get_git_hash would make exp_manager
    record `git diff` of the working directory.
    """
    saved = sys.argv, nemo.check_resume, nemo.get_git_hash
    sys.argv = redact_arguments(sys.argv)
    nemo.check_resume, nemo.get_git_hash = lambda *_, **__: None, lambda: (False, "")
    try:
        yield
    finally:
        sys.argv, nemo.check_resume, nemo.get_git_hash = saved


class _OpenLogFile(pl.Callback):
    """Opens the log file of a rank in `setup`, because rank 0 may still be moving old files before that."""

    def __init__(self, path: Path) -> None:
        self._path: Path | None = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open the file, once."""
        if self._path is not None:
            _open_log_file(self._path)
            self._path = None


def _open_log_file(path: Path) -> None:
    nemo_logging.add_file_handler(path)
    for handler in _log_files(nemo_logging._logger):
        handler.addFilter(_REDACTION)
        log_to_file(handler)


@contextmanager
def closed_logs() -> Iterator[None]:
    """Close the log files and loggers that are opened in a `with` block; later runs would write to them, too."""
    try:
        with closed_loggers():
            yield
    finally:
        _close_log_files()


def _close_log_files() -> None:
    for name in ("nemo_logger", "lightning.pytorch", "megatron.core", "bionemo"):
        for handler in _log_files(logging.getLogger(name)):
            logging.getLogger(name).removeHandler(handler)
            handler.close()
    for kind in ("file", "file_err"):  # otherwise NeMo adds them to Megatron's logger
        nemo_logging._handlers.pop(kind, None)


def _log_files(logger: logging.Logger) -> list[logging.FileHandler]:
    return [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _describe_version() -> str:
    """Return the version and, in a git checkout, its commit and the names of changed files."""
    commit, changed = _run_git("rev-parse", "HEAD"), _run_git("status", "--short", "--untracked-files=no")
    lines = [f"bionemo {__version__}"]
    if commit and changed is not None:
        lines += [f"commit hash: {commit}", *changed.splitlines()]
    return "\n".join(lines) + "\n"


def _run_git(*arguments: str) -> str | None:
    """Run git in the directory of this package; None if it fails."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
