# SPDX-License-Identifier: Apache-2.0
"""Pretraining runs in processes of their own, and their validation losses."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bionemo.common.errors import UserError, signal_name
from bionemo.common.launcher_environment import without_launcher
from bionemo.evaluation.event_files import PATTERN, join, read_events

Curve = dict[int, float]
"""Validation loss in nats by step."""


def pretrain(directory: Path, arguments: Sequence[str], last_step: int) -> Curve:
    """Pretrain a model in a process of its own, and return the validation losses.

    Args:
        directory: directory of the run. It also receives `train.log`, the output of the process. A run that was
            interrupted is continued, one that is complete is not repeated.
        arguments: `--config-name=NAME` and overrides.
        last_step: the run is complete if this step has a validation loss.

    Raises:
        UserError: if the run fails.
    """
    if last_step in (curve := _read_curve(directory)):
        return curve
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "bionemo.pretrain", *arguments, f"exp_manager.exp_dir={directory}",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
        "exp_manager.checkpoint_callback_params.save_top_k=1",
    ]  # fmt: skip
    log = directory / "train.log"
    with log.open("ab") as file:
        done = subprocess.run(command, stdout=file, stderr=file, check=False, env=without_launcher())
    if done.returncode:
        lines = log.read_text(errors="replace").splitlines()
        how = f"was ended by {signal_name(-done.returncode)}" if done.returncode < 0 else f"failed: {lines[-1]}"
        raise UserError(f"the run in {directory} {how} (see {log})")
    return _read_curve(directory)


def _read_curve(directory: Path) -> Curve:
    files = sorted(map(read_events, directory.glob(PATTERN)), key=lambda each: each.begin)
    losses = [each.scalars["val_loss"] for each in files if "val_loss" in each.scalars]
    if not losses:
        return {}
    curve = join(losses)
    return dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True))
