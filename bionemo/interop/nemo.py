# SPDX-License-Identifier: Apache-2.0
"""The edge to NeMo: its exp_manager sets up directories, loggers and log files. No other module imports `nemo`."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from nemo.utils import exp_manager as nemo
from nemo.utils import logging as nemo_logging
from nemo.utils.exceptions import NeMoBaseException
from omegaconf import OmegaConf

from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.redaction import LogFilter, redact_arguments
from bionemo.config.references import as_literals
from bionemo.config.schema import ExpManagerConfig
from bionemo.interop import full_disk
from bionemo.interop.quiet import our_messages_to
from bionemo.interop.revision import revision
from bionemo.interop.wandb import start_wandb

_ROOM = 1 << 18  # bytes that a directory must have room for before a run begins to write
# What we do ourselves, so NeMo must not: it knows checkpoints as pickles and resumes from a name pattern.
_OURS = {
    "explicit_log_dir": None,
    "exp_dir": None,
    "version": None,
    "resume_if_exists": False,
    "resume_ignore_no_checkpoint": True,
    "resume_from_checkpoint": None,
    "create_wandb_logger": False,  # interop/wandb.py
    "wandb_logger_kwargs": None,
    "max_time_per_run": None,  # training/checkpointing.py; NeMo's timer leaves without saving
    "create_checkpoint_callback": False,
    "create_preemption_callback": False,
    "checkpoint_callback_params": None,
    "disable_validation_on_resume": False,  # never repeated here; NeMo's loop would also skip the one that is due next
    "log_step_timing": False,
    "log_delta_step_timing": False,
    "log_tflops_per_sec_per_gpu": False,
}

# It would move every file of the log directory, whoever it belongs to (see run_files.py), and run `git diff`.
nemo.check_resume = lambda *_, **__: None
nemo.get_git_hash = lambda: (False, "")


def log_directory(config: ExpManagerConfig) -> Path:
    """Where a run writes: explicit_log_dir as it stands, else exp_dir/name[/version]."""
    if config.explicit_log_dir:
        return Path(config.explicit_log_dir).absolute()
    parent = Path(config.exp_dir or "nemo_experiments").absolute()
    return parent / (config.name or "default") / (config.version or "")


def checkpoint_directory(config: ExpManagerConfig, directory: Path) -> Path:
    """Where a run's checkpoints go: dirpath, else beside its logs."""
    named = config.checkpoint_callback_params.dirpath
    return Path(named).absolute() if named else directory / "checkpoints"


def make_directories(*directories: Path) -> None:
    """Make the run's directories, and see that they can be written and have room for logs.

    Raises:
        UserError: when one cannot, or has none.
    """
    for path in directories:
        probe = path / f".write-test-{os.getpid()}"
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(_ROOM))
            except OSError as error:
                if error.errno != errno.EFBIG:  # a limit on the size of a single file, which logs may stay below
                    raise
            finally:
                probe.unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the file system about a directory of the run into a UserError."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"exp_manager: {path} cannot be written ({error.strerror or error}): "
            f"{'free disk space or ' if full else ''}choose another exp_manager.exp_dir"
        ) from error


def start_experiment(trainer: pl.Trainer, config: ExpManagerConfig, directory: Path) -> None:
    """Let exp_manager make the run's files and loggers, with secrets hidden and the console left to us.

    Args:
        trainer: gets the loggers and callbacks.
        config: `exp_manager` of the configuration.
        directory: for logs; see `started_logs`.

    Raises:
        UserError: when it, or a logger, does not accept the configuration.
        OSError: when a file cannot be written.
    """
    full_disk.tolerate()
    known = {field.name for field in fields(nemo.ExpManagerConfig)}
    given: dict[str, Any] = {"seconds_to_sleep": 0}  # NeMo lets all ranks but the first wait for 5 s; see _LogFile
    given |= {k: v for k, v in _without_none(asdict(config)).items() if k in known and k not in _OURS}
    given |= {k: v for k, v in _OURS.items() if v is not None} | {"explicit_log_dir": str(directory)}
    arguments, sys.argv = sys.argv, redact_arguments(sys.argv)  # NeMo and W&B write them down
    nemo_logging.remove_stream_handlers()
    nemo_logging._logger.addHandler(logging.NullHandler())  # without any handler, Python prints warnings itself
    for handler in _log_files():  # of a run before this one in the same process
        nemo_logging._logger.removeHandler(handler)
    try:
        nemo.exp_manager(trainer, OmegaConf.create(as_literals(given)))
        if config.create_wandb_logger:
            trainer.loggers = [*trainer.loggers, start_wandb(config.wandb_logger_kwargs, directory)]
    except ImportError as error:
        raise UserError(f"exp_manager: {error}: install it, or leave that logger or callback off") from error
    except (ValueError, TypeError, NeMoBaseException) as error:
        raise UserError(f"exp_manager: {error}") from error
    finally:
        sys.argv = arguments
    for name in ("nemo_logger", "lightning.pytorch"):
        for written in logging.getLogger(name).handlers:
            written.addFilter(LogFilter())
    name = f"nemo_log_globalrank-{trainer.global_rank}_localrank-{trainer.local_rank}.txt"
    if trainer.is_global_zero:
        # NeMo would tell of the repository around the working directory, with every line that differs in it
        write_atomic(directory / "git-info.log", revision())
        _log_to(directory / name)
    elif not config.log_global_rank_0_only:
        trainer.callbacks.append(_LogFile(directory / name))  # type: ignore[attr-defined]


class _LogFile(pl.Callback):
    """Opens a rank's log file when all ranks are there: until then the first one may be moving older files away."""

    def __init__(self, path: Path) -> None:
        self._path: Path | None = path

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Open it once."""
        if self._path is not None:
            _log_to(self._path)
            self._path = None


def _log_to(path: Path) -> None:
    nemo_logging.add_file_handler(path)
    for handler in _log_files():  # our own messages belong in the same files
        handler.addFilter(LogFilter())
        our_messages_to(handler)


def _log_files() -> list[logging.FileHandler]:
    return [handler for handler in nemo_logging._logger.handlers if isinstance(handler, logging.FileHandler)]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return value
