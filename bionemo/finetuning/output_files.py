# SPDX-License-Identifier: Apache-2.0
"""The files that a downstream run leaves, and which run they are of: a result is never replaced by another run's."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from bionemo.common.errors import UserError
from bionemo.config.schema import DownstreamConfig
from bionemo.finetuning.task import Split
from bionemo.inference.identity import digest_of

HEAD, REPORT, PICTURE = "head.safetensors", "report.json", "report.png"  # written in this order
RUN = "run"  # key of the run's identity in the description of the head's task, and in the report
# Settings of the model that cannot change the result, or whose content is part of the identity.
_NOT_OF_MODEL = ("restore_encoder_path", "restore_head_path", "data")
# Of a run that trains the model: it goes on from its checkpoints, with other settings of the optimizer or of devices.
_OF_TUNED_MODEL = ("seq_length", "encoder_frozen", "freeze_layers", "peft", "downstream_task")


def identity_of_run(cfg: DownstreamConfig, model: str, splits: Mapping[str, Split]) -> str:
    """A digest of everything that determines what a run leaves.

    Args:
        cfg: of the run.
        model: digest of the pretrained model.
        splits: the labelled data.
    """
    settings = asdict(cfg.model)
    if cfg.model.encoder_frozen:
        trainer = [cfg.trainer.max_epochs, cfg.trainer.gradient_clip_val, str(cfg.trainer.precision)]
        known = [{key: value for key, value in settings.items() if key not in _NOT_OF_MODEL}, trainer, cfg.name]
    else:
        known = [{key: settings[key] for key in _OF_TUNED_MODEL}]
    return digest_of([known, cfg.model.data.task_type, cfg.model.data.shuffle, model, _digest_of_splits(splits)])


def is_complete(directory: Path, run: str) -> bool:
    """Whether the whole result of a run is in its directory.

    Args:
        directory: of the run.
        run: its identity.

    Raises:
        UserError: when something else has one of the names that the run writes.
    """
    head, report = _run_of_head(directory / HEAD), _run_of_report(directory / REPORT)
    there = [name for name in (HEAD, REPORT, PICTURE) if (directory / name).exists()]
    if there and (head != run or (REPORT in there and report != run)):
        raise UserError(
            f"{directory / there[0]} is not the result of this command, which would replace it: choose another "
            "exp_manager.exp_dir, or move it away"
        )
    return len(there) == 3


def _run_of_head(path: Path) -> str | None:
    try:
        with safe_open(path, "np") as file:
            task = json.loads((file.metadata() or {}).get("task", "{}"))
    except (OSError, SafetensorError, ValueError, RecursionError):
        return None
    return task.get(RUN) if isinstance(task, dict) else None


def _run_of_report(path: Path) -> str | None:
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    return report.get(RUN) if isinstance(report, dict) else None


def _digest_of_splits(splits: Mapping[str, Split]) -> str:
    digest = xxhash.xxh3_128()
    for name, split in splits.items():
        digest.update(f"{name} {len(split.texts)}".encode())
        for text, target in zip(split.texts, split.targets, strict=True):
            digest.update(f"\n{text}\t{target.dtype.str}{target.shape}\t".encode())
            digest.update(np.ascontiguousarray(target).tobytes())
    return digest.hexdigest()
