# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as directories: tensors in safetensors files, everything else in JSON, no pickle.

    step-dir/
        tensors.safetensors     every tensor of the state, by number
        state.json              the state with `{"$tensor": number}` in their places
        manifest.json           step, metrics, format version, the sha256 of the two files, and a seal on all of this

A checkpoint exists under its name only when it is complete: it is written beside it under a temporary name, flushed to
disk, hashed, renamed, and the rename flushed too. A manifest that does not match is a checkpoint that is not there.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from bionemo.errors import UserError

FORMAT_VERSION = 1
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_UNFINISHED, _REPLACED = ".unfinished", ".replaced"


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` under `path`, or leave nothing there.

    Args:
        path: the directory to make; an existing one is replaced.
        state: nested dicts, lists and tuples of tensors, numbers, strings and None, with the key `global_step`.

    Raises:
        UserError: when the disk is full or cannot be written; what was there before is untouched.
    """
    with _written_as(path) as unfinished:
        unfinished.mkdir()
        tensors: dict[str, torch.Tensor] = {}
        tree = _encode(state, tensors)
        save_file(tensors, unfinished / _TENSORS)
        (unfinished / _STATE).write_text(json.dumps(tree))
        manifest = {
            "format": FORMAT_VERSION,
            "step": state["global_step"],
            "metrics": state.get("metrics", {}),
            "sha256": {name: _flush_and_hash(unfinished / name) for name in (_TENSORS, _STATE)},
        }
        (unfinished / _MANIFEST).write_text(json.dumps(manifest | {"seal": _seal(manifest)}, indent=1))
        _flush_and_hash(unfinished / _MANIFEST)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint after verifying it.

    Raises:
        UserError: when it is damaged or of a format this version does not know.
    """
    if problem := defect(path):
        raise UserError(f"checkpoint {path} cannot be used: {problem}; take another or remove it")
    state: dict[str, Any] = _decode(json.loads((path / _STATE).read_text()), load_file(path / _TENSORS))
    return state


def defect(path: Path) -> str:
    """Say what is wrong with a checkpoint, "" when it is whole."""
    try:
        manifest = _manifest(path)
        if manifest["format"] != FORMAT_VERSION:
            return f"format {manifest['format']} is not the {FORMAT_VERSION} of this version"
        for name in (_TENSORS, _STATE):
            if _hash(path / name) != manifest["sha256"][name]:
                return f"{name} does not match its checksum"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"it is unreadable ({error})"
    return ""


def manifest_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, empty when it says nothing that can be believed."""
    try:
        return _manifest(path)
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text())
    if not isinstance(manifest, dict) or manifest.pop("seal", "") != _seal(manifest):
        raise ValueError(f"{_MANIFEST} was changed after it was written")
    return manifest


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def complete(directory: Path) -> list[Path]:
    """Checkpoints in a directory by their names, newest step first; not yet verified."""
    found = [d for d in directory.glob("*") if d.is_dir() and not d.name.endswith(_UNFINISHED) and manifest_of(d)]
    return sorted(found, key=lambda d: (manifest_of(d).get("step", -1), d.name), reverse=True)


def link(source: Path, path: Path) -> None:
    """Give a checkpoint a second name without writing it again (hard links; a copy where these are not possible).

    Raises:
        UserError: as `save`.
    """
    with _written_as(path) as unfinished:
        try:
            shutil.copytree(source, unfinished, copy_function=os.link)
        except (OSError, shutil.Error):
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(source, unfinished)


@contextmanager
def _written_as(path: Path) -> Iterator[Path]:
    """Give a temporary name; what was written under it gets its own name when complete, and is removed otherwise."""
    unfinished = path.with_name(path.name + _UNFINISHED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(unfinished, ignore_errors=True)
        yield unfinished
        _publish(unfinished, path)
    except Exception as error:  # safetensors reports a full disk in an exception of its own
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError) and "os error" not in str(error).lower():
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UserError(
            f"checkpoint {path} could not be written ({reason}): make room or point exp_manager.exp_dir elsewhere; "
            "earlier checkpoints are untouched and the same command resumes from them"
        ) from error


def remove(path: Path) -> None:
    """Delete a checkpoint; the rename first, so that a half-deleted one is never taken for one."""
    doomed = path.with_name(path.name + _UNFINISHED)
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def newest(directory: Path, on_defect: Callable[[Path, str], None]) -> Path | None:
    """The checkpoint of the highest step that is whole; `on_defect(path, problem)` hears of those passed over."""
    nameless = [file.parent for file in directory.glob(f"*/{_STATE}") if not manifest_of(file.parent)]
    for path in sorted(path for path in nameless if not path.name.endswith(_UNFINISHED)) + complete(directory):
        if not (problem := defect(path)):
            return path
        on_defect(path, problem)
    return None


def clean(directory: Path) -> None:
    """Remove what interrupted saves left behind."""
    for leftover in directory.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover, ignore_errors=True)


def _publish(unfinished: Path, path: Path) -> None:
    """Move a complete directory to its name, durably; what was there stays whole until then, and findable."""
    _flush_directory(unfinished)
    replaced = path.with_name(path.name + _REPLACED)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(path, replaced)
    os.rename(unfinished, path)
    _flush_directory(path.parent)
    if replaced.exists():
        remove(replaced)


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case torch.Tensor():
            name = str(len(tensors))
            tensors[name] = value.detach().contiguous().cpu()
            return {"$tensor": name}
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_encode(item, tensors) for item in value]
        case tuple():
            return {"$tuple": [_encode(item, tensors) for item in value]}
        case dict():
            return {"$dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    raise TypeError(f"a checkpoint holds tensors, numbers, strings and containers, not {type(value).__name__}")


def _decode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    match value:
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$dict": pairs}:
            return {_decode(k, tensors): _decode(v, tensors) for k, v in pairs}
        case list():
            return [_decode(item, tensors) for item in value]
    return value


def _hash(path: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def _flush_and_hash(path: Path) -> str:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _hash(path)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
