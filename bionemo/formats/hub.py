# SPDX-License-Identifier: Apache-2.0
"""Models of the Hugging Face hub, downloaded into the hub's cache by huggingface_hub.

The library reads HF_TOKEN, HF_ENDPOINT, HF_HUB_CACHE, HF_HOME and HF_HUB_OFFLINE, and locks each file while a process
downloads it.
"""

import logging
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path

from bionemo.checkpoint import Checkpoint, is_checkpoint
from bionemo.common.errors import HostError, UserError, optional_dependency
from bionemo.common.launcher_environment import is_global_rank_zero
from bionemo.common.redaction import LogFilter, redact_text
from bionemo.formats.detect import ADAPTERS, CONFIG
from bionemo.formats.huggingface.directory import find_readable
from bionemo.formats.huggingface.files import INDEX, WEIGHTS, read_json

_SETTINGS = (CONFIG, ADAPTERS, "tokenizer*.json", "vocab.json", "vocab.txt", "merges.txt")
_SAFETENSORS = (WEIGHTS, INDEX, "model-*.safetensors", "adapter_model.safetensors")
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")
_MAX_NAMES = 8  # of files in a message
_SNAPSHOT = re.compile(r"(?:.*/)?models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})")
_FILTER = LogFilter()


def download(name: str, revision: str | None, model: str) -> Path:
    """Return the directory in the cache with the files of a model that are read here; download those that are missing.

    The weights are downloaded if the configuration is supported: safetensors, or pickles if there are none.

    Args:
        name: ORG/NAME.
        revision: a branch, a tag or a commit; None: the default branch.
        model: the MODEL of the user, for messages.

    Raises:
        HostError: if the model does not exist, is not accessible or not supported, or this host cannot download it.
        UserError: if huggingface_hub is missing.
    """
    label = model if model.startswith("hf:") else f"{model} (no path here, so a model of the Hugging Face hub)"
    with optional_dependency("hub", label):
        from huggingface_hub import errors, get_cached_repo_tree, utils
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_FILTER)  # HF_ENDPOINT may contain a password
    command = f"hf download {name}{f' --revision {revision}' if revision else ''}"
    try:
        with utils.disable_progress_bars():
            directory = _fetch(name, revision, _SETTINGS, command)
        try:
            files = [file.path for file in get_cached_repo_tree(name, revision=directory.name)]
        except errors.CachedRepoTreeNotFoundError:  # offline, and an old release of the library has filled the cache
            files = [path.name for path in directory.iterdir()]
        weights = _choose_weights(directory, files, command)
        with nullcontext() if sys.stderr.isatty() and is_global_rank_zero() else utils.disable_progress_bars():
            return _fetch(name, directory.name, weights, command)
    except UserError as error:
        raise HostError(f"{label}: {error}") from None


def _fetch(name: str, revision: str | None, patterns: Sequence[str], command: str) -> Path:
    """Download files of a model; `command` does so, too. Error texts of the library may contain the token."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:
        raise UserError(_explain(error, command)) from None


def _choose_weights(directory: Path, files: Sequence[str], command: str) -> Sequence[str]:
    """Return patterns of the weights among the files of a repository, whose settings are in a directory.

    Raises:
        UserError: if the model is not supported, or lacks settings or weights; `command` downloads all of it.
    """
    names = (name for name in files if name.isprintable() and not name.startswith("."))
    held = f"only {', '.join(sorted(names)[:_MAX_NAMES]) or 'no files'}: give a model among all files of {command}"
    if ADAPTERS not in files:
        if CONFIG not in files:
            raise UserError(f"it has no {CONFIG}, {held}")
        find_readable(read_json(directory / CONFIG))
    for patterns in (_SAFETENSORS, _PICKLES):
        if any(fnmatchcase(file, pattern) for file in files for pattern in patterns):
            return patterns
    raise UserError(f"it has no {WEIGHTS} or pytorch_model.bin, {held}")


def _explain(error: Exception, command: str) -> str:
    from huggingface_hub import constants, errors

    cause = (isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__) or error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    endpoint = redact_text(constants.ENDPOINT)
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"not all of it is in the cache, and HF_HUB_OFFLINE is set: run {command} where there is a network"
    if isinstance(cause, errors.RevisionNotFoundError):
        return "there is no such revision: give another branch, tag or commit"
    if isinstance(cause, errors.RepositoryNotFoundError) and not isinstance(cause, errors.GatedRepoError):
        return "there is no such model, or it is private or gated: check the name, or set HF_TOKEN to a valid token"
    if status in (401, 403):
        return f"access is refused ({status}): accept the conditions on its page, and set HF_TOKEN to a valid token"
    if status == 404:
        return f"{endpoint} does not have it (404): check the name, or set HF_ENDPOINT to another mirror"
    if isinstance(cause, OSError) and cause.errno:
        return f"it cannot be downloaded ({cause.strerror}): check the disk, or set HF_HUB_CACHE to another directory"
    return (
        f"it cannot be downloaded from {endpoint} ({status or type(cause).__name__}): check the network and "
        f"HF_ENDPOINT, or copy the cache of a machine that has run {command}"
    )


def base_model(path: Path) -> str:
    """Return ORG/NAME@COMMIT of the model of the hub that a model is or was made from, or "" if none is known.

    `path` is a checkpoint, a `.nemo` archive or a Hugging Face directory.
    """
    if found := _SNAPSHOT.fullmatch(str(path)):
        return f"{found[1]}/{found[2]}@{found[3]}"
    return str(Checkpoint(path).state.get("base_model", "")) if is_checkpoint(path) else ""


def base_name(path: Path) -> str:
    """Return `base_model` of the model that a training starts from, or else the name of its file or directory."""
    return base_model(path) or ("" if is_checkpoint(path) else path.name)
