# SPDX-License-Identifier: Apache-2.0
"""Where a run starts: at a checkpoint of its own, with the weights of another model, or from the beginning."""

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bionemo import checkpoint
from bionemo.checkpoint import TensorSource
from bionemo.common.errors import UserError
from bionemo.config.schema import RunConfig
from bionemo.interop import huggingface, nemo_archive
from bionemo.interop.run_files import recorded_run
from bionemo.interop.v1_models import names_of

log = logging.getLogger(__name__)
_POSITIONS = "position_embeddings.weight"


def find_start(cfg: RunConfig, *directories: Path) -> Path | None:
    """Choose where to go on: the checkpoint that was named, else the newest whole one of this run, else nowhere.

    The newest is that of the highest step, whatever its name: `*-last`, a best one, or Slurm's `hpc_ckpt_*` beside the
    logs. In a checkpoint directory that several runs share, one with checkpoints of its own resumes from these only.

    Raises:
        UserError: when a named checkpoint cannot be used, or there is none and starting afresh was not allowed, or
            nothing is to be trained.
    """
    config = cfg.exp_manager
    if named := config.resume_from_checkpoint or cfg.model.resume_from_checkpoint:
        if not Path(named).is_dir():
            raise UserError(f"resume_from_checkpoint={named}: there is no such checkpoint directory")
        checkpoint.check(Path(named))
        return Path(named)
    if not config.resume_if_exists:
        found = None
    else:
        others = _of_other_runs(*directories)
        found = checkpoint.newest(
            directories, lambda path, why: log.warning("checkpoint %s passed over: %s", path, why), others
        )
        if found is None and not config.resume_ignore_no_checkpoint:
            raise UserError(
                f"exp_manager.resume_if_exists=True: no checkpoint in {directories[0]}; "
                "set exp_manager.resume_ignore_no_checkpoint=True to start from the beginning"
            )
    if found is None and not (cfg.do_training or cfg.restore_from_path):
        raise UserError(
            f"do_testing=True without do_training: there is no checkpoint in {directories[0]} to test; give "
            "exp_manager.resume_from_checkpoint or restore_from_path"
        )
    return found


def _of_other_runs(saved: Path, directory: Path) -> set[Path]:
    """Checkpoints that the run which last logged into a directory has not written, if it has written any."""
    run = recorded_run(directory)
    paths = checkpoint.complete(saved)
    others = {path for path in paths if checkpoint.run_of(path) != run}
    return others if len(others) < len(paths) else set()


def identity_of_run(start: Path | None, *directories: Path) -> str:
    """The identity under which a run writes checkpoints; it deletes and replaces those with the same identity only.

    A run that resumes from a checkpoint in its own directories has the identity of the run that wrote it, "" when that
    was an earlier version, which recorded none. Any other run gets a new one.
    """
    if start is not None and start.absolute().parent in directories:
        return checkpoint.run_of(start)
    return uuid.uuid4().hex


def find_weights(path: str | None, positions: int | None = None) -> TensorSource | None:
    """Open what a new run takes its weights from, if anything: a checkpoint, a .nemo file, or Hugging Face's.

    Args:
        path: of it; `restore_from_path`.
        positions: how many the new model has (`max_position_embeddings`); learned ones are fitted to it.

    Raises:
        UserError: when there is none of that name.
    """
    if path is None:
        return None
    weights = _open(path)
    learned = weights.shapes("weights").get(_POSITIONS)
    if positions is None or learned is None or learned[0] == positions:
        return weights
    fitted = f"{'repeated' if learned[0] < positions else 'cut'} to model.max_position_embeddings={positions}"
    log.warning("%s has %d learned positions, %s", path, learned[0], fitted)
    return FittedPositions(weights, positions)


def _open(path: str) -> TensorSource:
    if path.endswith(".nemo"):
        archive = nemo_archive.read(path)
        config = names_of(archive.config).our_config(archive.config)
        return checkpoint.TensorsInMemory(Path(path), archive.weights, config)
    if not Path(path).is_dir():
        raise UserError(
            f"restore_from_path={path}: there is no such directory; give a .nemo file or a checkpoint, "
            "e.g. RUN/checkpoints/NAME-last"
        )
    if huggingface.is_directory(Path(path)):
        return huggingface.HuggingFaceModel(Path(path))
    checkpoint.check(Path(path))
    return checkpoint.Checkpoint(Path(path))


@dataclass(frozen=True)
class FittedPositions:
    """The weights of a model whose sequences were longer or shorter: position p has the vector of p modulo theirs.

    So a model of 128 tokens goes on with 512; v1 did the same.
    """

    weights: TensorSource
    positions: int

    @property
    def path(self) -> Path:
        """See TensorSource."""
        return self.weights.path

    @property
    def config(self) -> Mapping[str, Any]:
        """See TensorSource."""
        return self.weights.config

    def shapes(self, group: str = "") -> dict[str, tuple[int, ...]]:
        """See TensorSource."""
        return {
            name: (self.positions, *shape[1:]) if name.endswith(_POSITIONS) else shape
            for name, shape in self.weights.shapes(group).items()
        }

    def read(self, name: str, offset: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
        """See TensorSource."""
        if not name.endswith(_POSITIONS):
            return self.weights.read(name, offset, shape)
        table_PD = self.weights.read(name)
        fitted = table_PD[torch.arange(self.positions) % len(table_PD)]
        return checkpoint.TensorsInMemory(self.path, {_POSITIONS: fitted}).read(_POSITIONS, offset, shape)
