# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint, and verification against it.

A checkpoint is a directory: tensors in safetensors files, everything else in JSON, no pickle.

    step-dir/
        tensors-0.safetensors   blocks of tensors, one file for each process that wrote some
        index.json              shape of every tensor, and the files and blocks that contain it
        state.json              everything that is not a tensor of the model or the optimizer
        manifest.json           step, metrics, run, branch, format version, checksums of the files and of the manifest

A checkpoint whose manifest is missing or invalid is ignored.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from bionemo.checkpoint.pieces import find_defect
from bionemo.checkpoint.tensors import checksum_bytes, checksum_file
from bionemo.common.errors import UserError

FORMAT_VERSION = 2
STATE, INDEX, MANIFEST = "state.json", "index.json", "manifest.json"
_RUN = re.compile(r'"run": "([0-9a-f]{32})"')
_INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Branch(NamedTuple):
    """The part of a run after it was started from a named checkpoint; later branches continue the run."""

    number: int = 0  # 0: the run was not started from a named checkpoint
    start: str = ""  # checksum of the state of the named checkpoint


MAIN_BRANCH = Branch()


class _Damage(ValueError):
    """A defect of a checkpoint, with a message for the user."""


def check(path: Path) -> None:
    """Raise a UserError if a file of a checkpoint is damaged, or has a format version that is not supported."""
    if problem := find_damage(path):
        raise UserError(f"checkpoint {path} cannot be used: {problem}; choose another or remove it")


def find_damage(path: Path) -> str:
    """Verify all files of a checkpoint; return its first defect, "" if there is none."""
    try:
        manifest = _read(path)
        for name, size in manifest["bytes"].items():
            if (found := (path / name).stat().st_size) != size:
                return f"{name} has {found:,} bytes instead of {size:,}"
        for name, expected in manifest["xxh3_128"].items():
            if checksum_file(path / name) != expected:
                return f"{name} does not match its checksum"
        return find_defect(json.loads((path / INDEX).read_text()))
    except _Damage as error:
        return str(error)
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{Path(error.filename).name} is missing"
    except _INVALID as error:
        return f"it is unreadable ({error})"
    return ""


def load_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint; empty if it is missing or invalid."""
    try:
        return _read(path)
    except _INVALID:
        return {}


def read_branch(manifest: dict[str, Any]) -> Branch:
    """Return the branch of a checkpoint from its manifest."""
    match manifest.get("branch"):
        case [int(number), str(start)]:
            return Branch(number, start)
    return MAIN_BRANCH


def state_checksum(path: Path) -> str:
    """Return the checksum of the state of a checkpoint, which identifies it; "" without a valid manifest."""
    checksums: dict[str, str] = load_manifest(path).get("xxh3_128", {})
    return checksums.get(STATE, "")


def read_run_id(path: Path) -> str:
    """Return the ID of the run that wrote a checkpoint, even a damaged one; "" if there is none."""
    try:
        found = _RUN.search((path / MANIFEST).read_text(errors="replace"))
    except _INVALID:
        return ""
    return found[1] if found else ""


def format_manifest(manifest: dict[str, Any]) -> str:
    """Return the text of a manifest with its own checksum; files that differ from it in any byte are rejected."""
    return json.dumps(manifest | {"seal": checksum_bytes(json.dumps(manifest).encode())}, indent=1)


def _read(path: Path) -> dict[str, Any]:
    text = (path / MANIFEST).read_text()
    try:
        manifest: dict[str, Any] = json.loads(text)
        version = manifest["format"]
        del manifest["seal"]
    except _INVALID as error:
        raise _Damage(f"it is unreadable ({MANIFEST}: {error})") from error
    if version != FORMAT_VERSION:
        raise _Damage(f"its format is {version}; this version reads format {FORMAT_VERSION}")
    if text != format_manifest(manifest):
        raise _Damage(f"{MANIFEST} was changed after it was written")
    return manifest
