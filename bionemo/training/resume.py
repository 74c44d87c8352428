# SPDX-License-Identifier: Apache-2.0
"""Selection of the checkpoint from which a run resumes, and of the weights with which a new run starts."""

import logging
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bionemo import checkpoint
from bionemo.checkpoint import WEIGHTS, TensorSource
from bionemo.checkpoint.source import Shape, TensorView
from bionemo.common.errors import UserError
from bionemo.config.schema import RunConfig
from bionemo.experiment.run_files import read_run_id
from bionemo.formats.convert import open_model
from bionemo.formats.detect import CHECKPOINT, detect_format, locate_model, locate_path
from bionemo.models.trainable import Trainable
from bionemo.training.identity import log_changed_settings
from bionemo.training.module import TrainingModule
from bionemo.training.muon import MOMENTUM

log = logging.getLogger(__name__)
_POSITION_EMBEDDINGS = "position_embeddings.weight"


def find_resume_checkpoint(cfg: RunConfig, directory: Path, log_dir: Path) -> Path | None:
    """Return the checkpoint to resume from: the newest complete one of this run, else None.

    A configured checkpoint is the start of a branch: the run resumes from it unless it has checkpoints of this branch,
    so that the same command continues a run that was interrupted.

    The newest checkpoint has the highest step, whether it is a `*-last` or a best one. If several runs share a
    checkpoint directory, a run with checkpoints there resumes only from its own.

    Raises:
        UserError: if the configured checkpoint is not usable, or there is no checkpoint and the configuration requires
            one.
    """
    config = cfg.exp_manager
    if named := config.resume_from_checkpoint or cfg.model.resume_from_checkpoint:
        start = Path(named)
        if (model := locate_path(start)) != start:
            raise UserError(f"{named} is the directory of a run: name one of its checkpoints, such as {model}")
        if detect_format(start) != CHECKPOINT:
            raise UserError(f"{named} is not a checkpoint: set restore_from_path instead of resume_from_checkpoint")
        checkpoint.check(start)
        continues = config.resume_if_exists and cfg.do_training
        return _find_in_branch(start, directory) if continues else start
    if not config.resume_if_exists:
        found = None
    else:
        others = _find_other_runs(directory, log_dir)
        found = checkpoint.find_newest(directory, _log_damage, others)
        if found is None and not config.resume_ignore_no_checkpoint:
            raise UserError(
                f"exp_manager.resume_if_exists=True: no checkpoint in {directory}; "
                "set exp_manager.resume_ignore_no_checkpoint=True to start from the beginning"
            )
    if found is None and not (cfg.do_training or cfg.restore_from_path):
        raise UserError(
            f"do_testing=True without do_training: there is no checkpoint in {directory} to test; set "
            "exp_manager.resume_from_checkpoint or restore_from_path"
        )
    return found


def check_resumable(saved: checkpoint.Checkpoint, module: TrainingModule, model: Trainable) -> None:
    """Check that a run can resume from a checkpoint, before it writes anything; log which settings it changes.

    Args:
        saved: the checkpoint.
        module: the module of the run.
        model: the whole model, from `TrainingModule.build_on_meta`.

    Raises:
        UserError: if the checkpoint is incomplete or belongs to another model.
    """
    module.check_weights(saved, model)
    if len(saved.shapes()) == len(saved.shapes(WEIGHTS)):
        raise UserError(
            f"checkpoint {saved.path} contains weights only: a run cannot resume from it; start a new run with "
            f"restore_from_path={saved.path}"
        )
    if _has_momentum(saved) != (module.config.optim.name == "muon"):
        found = "muon" if _has_momentum(saved) else "another optimizer"
        raise UserError(
            f"checkpoint {saved.path} has the state of {found}, but model.optim.name={module.config.optim.name}: a "
            f"run cannot resume from it; start a new run with restore_from_path={saved.path}"
        )
    log_changed_settings(saved.path, saved.config, asdict(module.config))


def _has_momentum(saved: checkpoint.Checkpoint) -> bool:
    return any(name.startswith(f"{MOMENTUM}/") for name in saved.shapes())


def _find_other_runs(checkpoint_dir: Path, log_dir: Path) -> set[Path]:
    """Return the checkpoints of other runs if the run that last wrote to the log directory has checkpoints, too."""
    run_id = read_run_id(log_dir)
    paths = checkpoint.list_complete(checkpoint_dir)
    others = {path for path in paths if checkpoint.read_run_id(path) != run_id}
    return others if len(others) < len(paths) else set()


def _find_in_branch(start: Path, directory: Path) -> Path:
    """Return the newest complete checkpoint of the branch that starts at a checkpoint; without one, its start."""
    checksum = checkpoint.state_checksum(start)
    others = [
        path
        for path in checkpoint.list_complete(directory)
        if checkpoint.read_branch(checkpoint.load_manifest(path)).start != checksum
    ]
    found = checkpoint.find_newest(directory, _log_damage, others)
    if found is not None:
        log.warning("the run that was started from %s has a newer checkpoint and resumes from it", start)
    return found or start


def _log_damage(path: Path, problem: str) -> None:
    log.warning("checkpoint %s skipped: %s", path, problem)


def choose_branch(cfg: RunConfig, resume_path: Path | None, directory: Path) -> checkpoint.Branch:
    """Return the branch of the checkpoints that a run writes.

    A run that resumes from the configured checkpoint starts a new branch.
    """
    if resume_path is None:
        return checkpoint.MAIN_BRANCH
    named = cfg.exp_manager.resume_from_checkpoint or cfg.model.resume_from_checkpoint
    if named is None or resume_path != Path(named):
        return checkpoint.read_branch(checkpoint.load_manifest(resume_path))
    paths = checkpoint.list_complete(directory)
    last = max((checkpoint.read_branch(checkpoint.load_manifest(path)).number for path in paths), default=0)
    return checkpoint.Branch(last + 1, checkpoint.state_checksum(resume_path))


def new_or_resumed_run_id(resume_path: Path | None, directory: Path) -> str:
    """Return the ID that a run writes to its checkpoints; it deletes and replaces only checkpoints with this ID.

    A run that resumes from a checkpoint in its own directory has the ID of that checkpoint. Other runs get a new ID.
    """
    if resume_path is not None and resume_path.resolve().parent == directory.resolve():
        return checkpoint.read_run_id(resume_path)
    return uuid.uuid4().hex


def open_initial_weights(path: str | None, positions: int | None = None) -> TensorSource | None:
    """Open the weights with which a new run starts.

    Args:
        path: `restore_from_path`: a MODEL (`formats.detect.locate_model`); None: random weights.
        positions: `max_position_embeddings`; learned position embeddings are resized to it.

    Raises:
        UserError: if the path does not exist or is not usable.
    """
    if path is None:
        return None
    source = locate_model(path)
    if detect_format(source) == CHECKPOINT:
        checkpoint.check(source)
        weights: TensorSource = checkpoint.Checkpoint(source)
    else:
        model = open_model(source)
        weights = model.weights
        if model.contact_head:  # fitted to the attention of these weights
            log.warning(
                "the contact head of %s is left out; after the run, fit one (bionemo analysis contacts-fit)", source
            )
    learned = weights.shapes(WEIGHTS).get(_POSITION_EMBEDDINGS)
    if positions is None or learned is None or learned[0] == positions:
        return weights
    change = f"{'repeated' if learned[0] < positions else 'truncated'} to model.max_position_embeddings={positions}"
    log.warning("%s has %d learned positions, %s", source, learned[0], change)
    return ResizedPositions(weights, positions)


@dataclass(frozen=True)
class ResizedPositions(TensorView):
    """Weights with resized position embeddings: position p has the embedding of p modulo the saved size, as in v1.

    For example, a model pretrained with 128 tokens can continue with 512.
    """

    positions: int

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        return {
            name: (self.positions, *shape[1:]) if name.endswith(_POSITION_EMBEDDINGS) else shape
            for name, shape in self.base.shapes(group).items()
        }

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        if not name.endswith(_POSITION_EMBEDDINGS):
            return self.base.read(name, offset, shape)
        table_PD = self.base.read(name)  # P positions, D hidden size
        resized = table_PD[torch.arange(self.positions) % len(table_PD)]
        return checkpoint.TensorsInMemory(self.path, {_POSITION_EMBEDDINGS: resized}).read(
            _POSITION_EMBEDDINGS, offset, shape
        )
