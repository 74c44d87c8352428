# SPDX-License-Identifier: Apache-2.0
"""Forged checkpoints with valid checksums."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bionemo.checkpoint.manifest import format_manifest
from bionemo.checkpoint.tensors import checksum_file


def forge(path: Path, edit: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Write a manifest with valid checksums of the current files, after editing it."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["seal"]
    files = [name for name in manifest["bytes"] if (path / name).is_file()]
    manifest["bytes"] = {name: (path / name).stat().st_size for name in files}
    manifest["xxh3_128"] = {name: checksum_file(path / name) for name in files}
    edit(manifest)
    (path / "manifest.json").write_text(format_manifest(manifest))
