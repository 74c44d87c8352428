# SPDX-License-Identifier: Apache-2.0
"""Writing a checkpoint, from one process or from several together."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bionemo.checkpoint.directory import delete, disk_errors, publish, unfinished
from bionemo.checkpoint.json_state import encode
from bionemo.checkpoint.manifest import FORMAT_VERSION, INDEX, MANIFEST, STATE, sealed
from bionemo.checkpoint.tensors import Piece, write, write_text
from bionemo.common.errors import UserError

Exchange = Callable[[Any], list[Any]]  # gives a value of this process to all others, and takes theirs, by rank


def save(path: Path, state: Mapping[str, Any], pieces: Iterable[Piece]) -> None:
    """Write a checkpoint under `path`, or leave nothing there.

    Args:
        path: the directory to make; an existing one is replaced.
        state: nested dicts, lists and tuples of numbers, strings, None and small tensors; `global_step` and `metrics`
            go into the manifest, too, and `run`, the identity of the run that writes, goes there only.
        pieces: of the tensors.

    Raises:
        UserError: when the disk is full or cannot be written; what was there before is untouched.
    """
    save_together(path, state, pieces, rank=0, exchange=lambda value: [value])


def save_together(
    path: Path, state: Mapping[str, Any], pieces: Iterable[Piece], rank: int, exchange: Exchange
) -> None:
    """As `save`, from several processes, each with its own pieces; the state is that of rank 0.

    When one of them fails, all of them raise what it had to say, and nothing is left.
    """
    new = unfinished(path)
    begun: list[Path] = []  # on rank 0, once the directory is its own

    def all_do(work: Callable[[], Any]) -> list[Any]:
        """Work on every process, and only go on when all have succeeded."""
        done, failure = None, None
        try:
            with disk_errors(path):
                done = work()
        except Exception as error:
            failure = error
        results = exchange((done, failure and str(failure)))
        if failures := [failure for _, failure in results if failure is not None]:
            for path_begun in begun:
                delete(path_begun)
            raise failure or UserError(failures[0])
        return [done for done, _ in results]

    def begin() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        delete(new)
        new.mkdir()
        begun.append(new)

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
        kept = {key: value for key, value in state.items() if key != "run"}
        files[STATE] = write_text(new / STATE, json.dumps(encode(kept)))
        manifest = {
            "format": FORMAT_VERSION,
            "step": state["global_step"],
            "metrics": state.get("metrics", {}),
            **({"run": state["run"]} if state.get("run") else {}),
            "bytes": {name: (new / name).stat().st_size for name in files},
            "xxh3_128": files,
        }
        write_text(new / MANIFEST, sealed(manifest))
        publish(path)

    all_do(begin if rank == 0 else lambda: None)
    written = [part for part in all_do(write_pieces) if part]
    all_do((lambda: finish(written)) if rank == 0 else lambda: None)


def _index(written: list[tuple[str, str, list[Any]]]) -> dict[str, Any]:
    index: dict[str, Any] = {}
    for file, _, entries in written:
        for name, shape, key, offset, size in entries:
            index.setdefault(name, {"shape": shape, "pieces": []})["pieces"].append((file, key, offset, size))
    return index
