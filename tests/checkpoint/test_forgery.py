# SPDX-License-Identifier: Apache-2.0
"""A forged checkpoint cannot read, write or run other files; errors are one line.

All checksums in these checkpoints are valid.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bionemo import checkpoint
from bionemo.checkpoint.tensors import checksum_file
from bionemo.common.errors import UserError
from tests.checkpoint.samples import FILES, newest, weights
from tests.support.forged_checkpoints import forge


def test_forged_checkpoint_passes_verification(two: tuple[Path, Path]) -> None:
    (two[1] / "state.json").write_text('{"$dict": [["global_step", 3]]}')
    forge(two[1])
    checkpoint.check(two[1])
    assert checkpoint.Checkpoint(two[1]).state == {"global_step": 3}


@pytest.mark.parametrize(
    "value",
    [
        {"step": "2"}, {"step": None}, {"step": [2]}, {"metrics": []}, {"metrics": None}, {"metrics": {"a": "x"}},
        {"bytes": []}, {"bytes": {}},
        {"xxh3_128": {}}, {"xxh3_128": [1]},
        {"names": "../outside"}, {"names": "/etc/passwd"}, {"names": "a/../../outside"}, {"names": "sub/state.json"},
        {"names": ""}, {"names": "."}, {"names": ".."}, {"names": "tensors-0.safetensors\n"}, {"names": "weights.pkl"},
        {"names": "tensors-x.safetensors"}, {"names": "manifest.json"},
    ],
    ids=str,
)  # fmt: skip
def test_a_forged_manifest_names_nothing_outside(two: tuple[Path, Path], value: dict[str, Any]) -> None:
    first, second = two
    (first.parent / "outside").write_text("secret")

    def edit(manifest: dict[str, Any]) -> None:
        if "names" in value:
            manifest["bytes"][value["names"]] = 6
            manifest["xxh3_128"][value["names"]] = checksum_file(first.parent / "outside")
        else:
            manifest |= value

    forge(second, edit)
    assert newest(first.parent) == (first, ["step=2: manifest.json does not describe a checkpoint"])
    with pytest.raises(UserError, match="does not describe a checkpoint"):
        checkpoint.check(second)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "\udcff", "{}", "NaN", '{"format": 2}']
)
def test_malformed_manifests_are_skipped(two: tuple[Path, Path], text: str) -> None:
    (two[1] / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    found, (messages,) = newest(two[0].parent)
    assert found == two[0]
    assert messages.startswith("step=2: it is unreadable (")


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("absolute", [True, False])
def test_links_are_rejected(two: tuple[Path, Path], name: str, absolute: bool) -> None:
    first, second = two
    outside = first.parent / "outside"
    shutil.move(second / name, outside)
    (second / name).symlink_to(outside if absolute else Path("..") / "outside")
    forge(second)
    assert newest(first.parent) == (first, [f"step=2: {name} is not a regular file"])


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "{parent}/outside.safetensors", "../step=1/tensors-0.safetensors", "/etc/passwd",
     "tensors-7.safetensors", "", ".", 3, None, ["tensors-0.safetensors"]],
    ids=str,
)  # fmt: skip
def test_a_forged_index_reads_no_other_file(two: tuple[Path, Path], file: Any) -> None:
    """Not even a valid tensor file is read."""
    first, second = two
    save_file({"weights/matrix": torch.zeros(6, 5)}, first.parent / "outside.safetensors")
    save_file({"weights/matrix": torch.zeros(6, 5)}, second / "tensors-7.safetensors")  # not listed in a manifest
    index = json.loads((second / "index.json").read_text())
    name = file.format(parent=first.parent) if isinstance(file, str) else file
    index["weights/matrix"]["pieces"] = [[name, "weights/matrix", [0, 0], [6, 5]]]
    (second / "index.json").write_text(json.dumps(index))
    forge(second)
    checkpoint.check(second)
    saved = checkpoint.Checkpoint(second)
    one_line(second, lambda: saved.read("weights/matrix"))
    assert torch.equal(saved.read("weights/bias"), weights(2)["weights/bias"])


def one_line(path: Path, work: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        work()
    assert str(caught.value).startswith(f"checkpoint {path} cannot be used: ")
    assert "\n" not in str(caught.value)


def entry(shape: Any, offset: Any, size: Any, key: Any = "weights/matrix") -> dict[str, Any]:
    return {"shape": shape, "pieces": [["tensors-0.safetensors", key, offset, size]]}


HUGE = [10**6, 10**9]


@pytest.mark.parametrize(
    "entry",
    [
        [], None, 1, "text", {"shape": 3, "pieces": []}, {"shape": None, "pieces": []}, {"shape": [6, 5]},
        {"pieces": []},
        {"shape": [6, 5], "pieces": []}, {"shape": [6, 5], "pieces": [[]]}, {"shape": [6, 5], "pieces": 3},
        entry([6, 6], [0, 0], [6, 5]), entry([6, 6], [0, 0], [6, 6]), entry([6, 5], [0], [6]), entry([], [], []),
        entry(HUGE, [0, 0], [6, 5]), entry(HUGE, [0, 0], HUGE), entry([10**30], [0], [10**30]), entry([30], [0], [30]),
        entry([6, 5], [3, 0], [6, 5]), entry([6, 5], [-1, 0], [7, 5]), entry([6, 5], [0, 0], [6, 1]),
        entry([6, 5], ["0", "0"], [6, 5]), entry([6.5, 5], [0, 0], [6, 5]), entry([-6, -5], [0, 0], [6, 5]),
        *(entry([6, 5], [0, 0], [6, 5], key) for key in ("nothing", 3, None)),
    ],
    ids=str,
)  # fmt: skip
def test_forged_index_gives_no_uninitialized_values(two: tuple[Path, Path], entry: Any) -> None:
    """In particular, no previous memory content is returned."""
    _, second = two
    index = json.loads((second / "index.json").read_text())
    (second / "index.json").write_text(json.dumps(index | {"weights/matrix": entry}))
    forge(second)
    saved = checkpoint.Checkpoint(second)
    one_line(second, lambda: saved.read("weights/matrix"))
    if not isinstance(entry, dict):
        one_line(second, saved.shapes)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "1" * 10_000, "[]", "3", "{", '{"$code": 1}'])
@pytest.mark.parametrize("name", ["index.json", "state.json"])
def test_forged_json_is_one_line(two: tuple[Path, Path], name: str, text: str) -> None:
    (two[1] / name).write_text(text)
    forge(two[1])
    if name == "index.json":
        one_line(two[1], lambda: checkpoint.check(two[1]))
    saved = checkpoint.Checkpoint(two[1])
    if name == "index.json" or text not in ("[]", "3"):  # a number is valid JSON state, although not of a run
        one_line(two[1], saved.shapes if name == "index.json" else lambda: saved.state)


class Command:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


@pytest.mark.parametrize("write", ["pickle", "torch", "garbage", "long header"])
def test_a_pickle_is_never_loaded(two: tuple[Path, Path], write: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = two
    monkeypatch.chdir(first.parent)
    file = second / "tensors-0.safetensors"
    if write == "pickle":
        file.write_bytes(pickle.dumps(Command()))
    elif write == "torch":
        torch.save({"weights/matrix": Command()}, file)
    elif write == "garbage":
        file.write_bytes(b"\xff" * 1000)
    else:
        file.write_bytes((2**62).to_bytes(8, "little") + b"{}" * 100)
    forge(second)
    checkpoint.check(second)
    one_line(second, lambda: checkpoint.Checkpoint(second).read("weights/matrix"))
    for name in ("state.json", "index.json", "manifest.json"):
        (second / name).write_bytes(pickle.dumps(Command()))
    assert newest(first.parent)[0] == first
    assert not Path("ran").exists()
    pickle.loads(pickle.dumps(Command()))  # loading it with pickle runs the command
    assert Path("ran").exists()
