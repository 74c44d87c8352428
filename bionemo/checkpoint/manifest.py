# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of itself, and whether it can be believed.

A checkpoint is a directory: tensors in safetensors files, everything else in JSON, no pickle.

    step-dir/
        tensors-0.safetensors   pieces of tensors, a file for each process that wrote some
        index.json              whole shape of every tensor, and which pieces in which file make it up
        state.json              everything that is not a tensor of the model or the optimizer
        manifest.json           step, metrics, run, format version, checksum of every file, and one of all this

A manifest that does not match is a checkpoint that is not there.
"""

import json
import re
import stat
from pathlib import Path
from typing import Any

from bionemo.checkpoint.tensors import checksum, checksum_of
from bionemo.common.errors import UserError

FORMAT_VERSION = 2
STATE, INDEX, MANIFEST = "state.json", "index.json", "manifest.json"
_FILE = re.compile(r"index\.json|state\.json|tensors-\d+\.safetensors")  # no path, so nothing outside is ever opened
_RUN = re.compile(r'"run": "([0-9a-f]{32})"')


def check(path: Path) -> None:
    """Verify a checkpoint.

    Raises:
        UserError: when it is damaged or of a format this version does not know.
    """
    if problem := defect(path):
        raise UserError(f"checkpoint {path} cannot be used: {problem}; take another or remove it")


class _Defect(ValueError):
    """What is wrong with a checkpoint."""


_UNREADABLE = (OSError, ValueError, KeyError, TypeError, RecursionError)


def defect(path: Path) -> str:
    """Say what is wrong with a checkpoint, "" when it is whole."""
    try:
        manifest = _manifest(path)
        for name, size in manifest["bytes"].items():
            if (found := _size(path / name)) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        for name, expected in manifest["xxh3_128"].items():
            if checksum(path / name) != expected:
                return f"{name} does not match its checksum"
    except _Defect as error:
        return str(error)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except _UNREADABLE as error:
        return f"it is unreadable ({error})"
    return ""


def manifest_of(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, empty when it says nothing that can be believed."""
    try:
        return _manifest(path)
    except _UNREADABLE:
        return {}


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; `manifest_of` returns {} instead of raising an error.

    Raises:
        UserError: when it is invalid.
        OSError: when it cannot be read.
    """
    try:
        return _manifest(path)
    except OSError:
        raise
    except _UNREADABLE as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}; take another or remove it") from error


def run_of(path: Path) -> str:
    """The identity of the run that wrote a checkpoint, also of a damaged one; "" when it names none."""
    try:
        _size(path / MANIFEST)
        found = _RUN.search((path / MANIFEST).read_text(errors="replace"))
    except _UNREADABLE:
        return ""
    return found[1] if found else ""


def _manifest(path: Path) -> dict[str, Any]:
    _size(path / MANIFEST)
    text = (path / MANIFEST).read_text()
    manifest: dict[str, Any] = json.loads(text)
    if (version := manifest["format"]) != FORMAT_VERSION:
        raise _Defect(f"format {version} is not the {FORMAT_VERSION} of this version")
    del manifest["seal"]
    if text != sealed(manifest):
        raise _Defect(f"{MANIFEST} was changed after it was written")
    match manifest:
        case {"step": int(), "metrics": dict(), "bytes": dict(sizes), "xxh3_128": dict(files)}:
            if {INDEX, STATE} <= files.keys() == sizes.keys() and all(map(_FILE.fullmatch, files)):
                return manifest
    raise _Defect(f"{MANIFEST} does not describe a checkpoint")


def sealed(manifest: dict[str, Any]) -> str:
    """Text of a manifest; a file that differs from it by as much as a space was not written here."""
    return json.dumps(manifest | {"seal": checksum_of(json.dumps(manifest).encode())}, indent=1)


def _size(file: Path) -> int:
    """Bytes of a plain file; whoever wrote the checkpoint may have put a link or a pipe there."""
    status = file.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise _Defect(f"{file.name} is not a plain file")
    return status.st_size
