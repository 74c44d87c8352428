# SPDX-License-Identifier: Apache-2.0
"""Write checkpoints from one or several processes."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bionemo.checkpoint.directory import delete, disk_errors, publish, unfinished
from bionemo.checkpoint.json_state import encode
from bionemo.checkpoint.manifest import FORMAT_VERSION, INDEX, MANIFEST, STATE, format_manifest
from bionemo.checkpoint.tensors import Piece, write, write_text
from bionemo.common.errors import UserError

_ONLY_IN_MANIFEST = ("run", "branch", "validation")
Exchange = Callable[[Any], list[Any]]  # all-gather: sends a value to all processes and returns theirs, by rank


def save(path: Path, state: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
    """Write a checkpoint; after a failure no files remain.

    Args:
        path: directory to create; an existing checkpoint is replaced.
        state: nested dicts, lists and tuples of numbers, strings, None and small tensors; `global_step` and `metrics`
            are also written to the manifest, `run`, the ID of the run, and `branch`, its `Branch`, and
            `validation`, what its metrics depend on beside the weights, only there.
        pieces: pieces of the tensors.

    Raises:
        UserError: if the disk is full or cannot be written; an existing checkpoint is unchanged.
    """
    save_distributed(path, state, pieces, rank=0, exchange=lambda value: [value])


def save_distributed(
    path: Path, state: Mapping[str, Any], pieces: Iterable[Piece], rank: int, exchange: Exchange
) -> None:
    """Write a checkpoint from several processes, each with its own pieces; the state is that of rank 0.

    When one process fails, all of them raise its error, and no files remain.
    """
    new = unfinished(path)
    created: list[Path] = []  # on rank 0: the directory, after it was created

    def run_on_all(function: Callable[[], Any]) -> list[Any]:
        """Call a function on every process; return the results when it has succeeded on all of them."""
        result, failure = None, None
        try:
            with disk_errors(path):
                result = function()
        except Exception as error:
            failure = error
        results = exchange((result, failure and str(failure)))
        if failures := [failure for _, failure in results if failure is not None]:
            for directory in created:
                delete(directory)
            raise failure or UserError(failures[0])
        return [result for result, _ in results]

    def create_directory() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        delete(new)
        new.mkdir()
        created.append(new)

    def write_pieces() -> tuple[str, str, list[Any]] | None:
        mine = list(pieces)
        if not mine:
            return None
        name = f"tensors-{rank}.safetensors"
        entries = [(p.name, p.shape, p.key, p.offset, tuple(p.values.shape)) for p in mine]
        return name, write(new / name, mine), entries

    def finish(written: list[Any]) -> None:
        files = {name: digest for name, digest, _ in written}
        files[INDEX] = write_text(new / INDEX, json.dumps(_index(written)))
        kept = {key: value for key, value in state.items() if key not in _ONLY_IN_MANIFEST}
        files[STATE] = write_text(new / STATE, json.dumps(encode(kept)))
        manifest = {
            "format": FORMAT_VERSION,
            "step": state["global_step"],
            "metrics": state.get("metrics", {}),
            **{key: state[key] for key in _ONLY_IN_MANIFEST if state.get(key)},
            "bytes": {name: (new / name).stat().st_size for name in files},
            "xxh3_128": files,
        }
        write_text(new / MANIFEST, format_manifest(manifest))
        publish(path)

    run_on_all(create_directory if rank == 0 else lambda: None)
    written = [part for part in run_on_all(write_pieces) if part]
    run_on_all((lambda: finish(written)) if rank == 0 else lambda: None)


def _index(written: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for file, _, entries in written:
        for name, shape, key, offset, size in entries:
            index.setdefault(name, {"shape": shape, "pieces": []})["pieces"].append((file, key, offset, size))
    return index
