# SPDX-License-Identifier: Apache-2.0
"""Recognition of a trained model by its files, without reading its weights.

Other formats are recognized by their content too, and nothing is unpickled, so that an error says what a path is and
what to do.
"""

import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path

from bionemo.checkpoint import is_checkpoint, list_complete
from bionemo.checkpoint.manifest import INDEX, MANIFEST, STATE, load_manifest
from bionemo.common.errors import UserError
from bionemo.common.regular import open_regular
from bionemo.config.model_argument import BEST, hub_id

log = logging.getLogger(__name__)
CHECKPOINT, NEMO, NEMO2, HUGGING_FACE, FAIR_ESM = "checkpoint", "nemo", "nemo2", "hf", "fair-esm"
ADAPTER = "adapter"
CONFIG, ADAPTERS, ADAPTER_WEIGHTS = "config.json", "adapter_config.json", "adapter_model.safetensors"
CONTEXT = "context/io.json"  # in directories of NeMo 2
_UNKNOWN = (
    "not a checkpoint, a .nemo archive, a Hugging Face directory or a .pt file of fair-esm: give the path of a model"
)
_SAVE = f"save the model as a directory with {CONFIG} and model.safetensors (save_pretrained of transformers)"
_MERGE = "merge them into the model with peft (merge_and_unload, then save_pretrained) and give the new directory"
_MAX_FILES = 100  # of a directory that are described
_CHECKPOINT_PARTS = {MANIFEST, STATE, INDEX, "tensors-0.safetensors"}
_NEMO_PARTS = {"model_config.yaml", "model_weights.ckpt"}


def detect_format(path: Path) -> str:
    """Return the format of a trained model: CHECKPOINT, NEMO, NEMO2, HUGGING_FACE, FAIR_ESM, or ADAPTER of a model.

    Raises:
        UserError: if there is nothing at the path, or something else; says what it is and what to do.
    """
    if path.suffix == ".nemo" and not path.is_dir():
        return NEMO
    require_model(path)
    try:
        if not path.is_dir():
            if path.suffix == ".pt" and _is_pickle(path):
                return FAIR_ESM
            raise UserError(f"{path} is {_describe_file(path) or _UNKNOWN}")
        names = {each.name for each in path.iterdir()}
        if len(names & _CHECKPOINT_PARTS) > 1:  # even a damaged one
            return CHECKPOINT
        if ADAPTERS in names:
            if CONFIG in names and any(name.startswith(("model", "pytorch_model")) for name in names):
                raise UserError(
                    f"{path} holds adapters of peft ({ADAPTERS}) beside its model, which are not applied: {_MERGE}"
                )
            if ADAPTER_WEIGHTS not in names:
                raise UserError(f"{path} has {ADAPTERS} without {ADAPTER_WEIGHTS}: save it again with a newer peft")
            return ADAPTER
        if CONFIG in names:
            return HUGGING_FACE
        if {"context", "weights"} <= names or (path / "weights" / ".metadata").exists():
            return NEMO2
        raise UserError(f"{path} {_describe_directory(path, names)}")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def locate_model(model: str | Path) -> Path:
    """Return the path of a MODEL: everything that takes one calls this.

    A model of the Hugging Face hub (`hub_id`) is downloaded unless it is in the hub's cache. Others: `locate_path`.

    Raises:
        UserError: if it cannot be downloaded, or there is no best checkpoint.
    """
    found, note = find_model(model)
    if note:
        log.warning(note)
    return found


def find_model(model: str | Path) -> tuple[Path, str]:
    """Return the path of a MODEL, and a note for the user, or ""; see `locate_model`."""
    if (found := hub_id(str(model))) is None:
        return _find_path(Path(model))
    from bionemo.formats.hub import download

    path = download(*found, model=str(model))
    return path, f"{model}: commit {path.name} is used"


def locate_path(path: Path) -> Path:
    """Return the model that a path names.

    The directory of a run, RUN, or that of its checkpoints is the newest complete checkpoint; RUN:best is the one with
    the best monitored metric, among the validations of the same data as the last one. The weights in a directory of
    NeMo 2 are this directory. Other paths are returned unchanged, with `~` expanded.

    Raises:
        UserError: if there is no best checkpoint.
    """
    found, note = _find_path(path)
    if note:
        log.warning(note)
    return found


def _find_path(path: Path) -> tuple[Path, str]:
    path = Path(os.path.expanduser(path))
    run = Path(str(path).removesuffix(BEST))
    wants_best = run != path and not path.exists()
    if not wants_best and (path.suffix == ".nemo" or is_checkpoint(path) or (path / CONFIG).exists()):
        return path, ""
    require_model(run)
    if path.name == "weights" and (path.parent / CONTEXT).is_file():
        return path.parent, ""
    checkpoints = list_complete(run if run.name == "checkpoints" else run / "checkpoints")
    if wants_best:
        found, why = _find_best(run, checkpoints)
    elif checkpoints:
        found, why = checkpoints[0], "newest checkpoint"
    else:
        return path, ""
    return found, f"{run} is the directory of a run: its {why} is used, {found.name}"


def _find_best(run: Path, checkpoints: Iterable[Path]) -> tuple[Path, str]:
    """Return the checkpoint of a run with the best metric, and a description."""
    manifests = {path: load_manifest(path) for path in checkpoints}
    validated = {path: each for path, each in manifests.items() if each.get("metrics") and each.get("validation")}
    if not validated:
        raise UserError(f"{run} has no checkpoint with the metric of a validation: give {run}, its newest checkpoint")
    last, *_ = validated.values()
    (name,) = last["metrics"]
    sign = -1 if str(last["validation"]).endswith(" max") else 1
    ranks = {
        # of two names of the same files, not NAME-last, which a running training deletes
        path: (sign * each["metrics"][name], path.name.endswith("-last"))
        for path, each in validated.items()
        if (each["run"], each["validation"]) == (last["run"], last["validation"])
        and math.isfinite(each["metrics"][name])
    }
    if not ranks:
        raise UserError(f"{run}: {name} is not finite in any checkpoint: give {run}, its newest checkpoint")
    found = min(ranks, key=lambda path: ranks[path])
    return found, f"best checkpoint ({name} {validated[found]['metrics'][name]:.4g})"


def require_model(path: Path) -> None:
    """Raise a UserError if there is nothing at a path."""
    if not path.exists():
        if str(path).startswith("hf:/"):
            raise UserError(f"{path}: a model of the Hugging Face hub is hf://ORG/NAME or hf://ORG/NAME@REVISION")
        hint = f"; a model of the Hugging Face hub would be hf://{path}" if hub_id(f"hf://{path}") else ""
        raise UserError(
            f"{path}: there is no such checkpoint, .nemo archive, Hugging Face directory or .pt file{hint}"
        )


def _describe_directory(path: Path, names: set[str]) -> str:
    if any(name.endswith(".distcp") for name in names):
        return (
            "holds the weights of a distributed checkpoint without their architecture: give the directory that "
            f"contains {CONTEXT} and weights/, as NeMo 2 and BioNeMo 2 write it"
        )
    if names >= _NEMO_PARTS or ("model_config.yaml" in names and any("_rank_" in name for name in names)):
        return f"is an unpacked .nemo archive: pack it with tar -cf NAME.nemo -C {path} ."
    runs = [*sorted(path.glob("*/checkpoints")), *sorted(path.glob("*/*/checkpoints"))]
    if found := list_complete(*runs):
        return f"is not the directory of one run: give that of a run in it, such as {found[0].parent.parent}"
    if "head.safetensors" in names:
        return (
            f"holds the head of a fine-tuning run, not a model: bionemo analysis label --head {path}/head.safetensors "
            "predicts with it"
        )
    if "checkpoints" in names or ".bionemo-run.json" in names:
        return "is the directory of a run that has no complete checkpoint: give another model, or resume the run"
    patterns = (f"*/{CONFIG}", f"snapshots/*/{CONFIG}", f"*/{CONTEXT}", "*.nemo", "*/*.nemo")
    if models := [each for pattern in patterns for each in path.glob(pattern) if each.parent.name != "blobs"]:
        newest = max(models, key=lambda each: each.stat().st_mtime)
        model = newest if newest.suffix == ".nemo" else newest.parents[1 if newest.match(CONTEXT) else 0]
        return f"is not a model: give the path of one in it, such as {model}"
    for name in filter(str.isprintable, sorted(names)[:_MAX_FILES]):
        if (path / name).is_file() and (text := _describe_file(path / name)):
            return f"has no {CONFIG}; its {name} is {text}"
    return f"is {_UNKNOWN}"


def _describe_file(path: Path) -> str:
    """Return what a file is and what to do; "" if it is unknown."""
    with open_regular(path) as file:
        head = file.read(32)
    if head.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS instead of the file: run git lfs pull in its repository, or download it again"
    if _is_pickle(path):
        fair_esm = f"if fair-esm wrote it, give {path}; else " if path.suffix == ".pt" else ""
        return f"a file of torch.save or pickle, which can run code when it is read: {fair_esm}{_SAVE}"
    if path.suffix == ".safetensors":
        return _describe_safetensors(path)
    if (path.parent / CONFIG).is_file() and path.suffix in (".json", ".txt"):
        return f"one file of a model: give its directory, {path.parent}"
    return ""


def _is_pickle(path: Path) -> bool:
    """Return whether a file is one of torch.save or pickle."""
    with open_regular(path) as file:
        return file.read(4).startswith((b"PK\x03\x04", b"\x80"))


def _describe_safetensors(path: Path) -> str:
    if path.name.startswith("adapter"):
        return f"a file of an adapter of peft: give its directory, which has {ADAPTERS}, too"
    if is_checkpoint(path.parent) or (path.parent / CONFIG).is_file():
        return f"one file of a model: give its directory, {path.parent}"
    if path.name == "head.safetensors":
        return f"the head of a fine-tuning run: bionemo analysis label --head {path} predicts with it"
    return f"a safetensors file without its {CONFIG}: put both into one directory, the file as model.safetensors"
