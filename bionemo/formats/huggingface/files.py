# SPDX-License-Identifier: Apache-2.0
"""The JSON and safetensors files of a Hugging Face directory; nothing that they contain is executed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.regular import load_json, open_regular, require_regular
from bionemo.formats.shape_check import quote_error

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")  # no separators, so no file outside the directory is opened
_MAX_JSON = 1 << 24  # bytes; the index of the largest models takes a tenth of that
_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|model)\.)*")  # added by DDP, torch.compile and modules of users
_OTHER_WEIGHTS = {  # pattern of files -> what they are and what to do
    "pytorch_model*.bin*": "is a pickle, which can run code when it is read: if you trust it, open the model with "
    f"transformers and call save_pretrained, which writes {WEIGHTS}",
    "model.*.safetensors": f"is a variant: rename it to {WEIGHTS}, or save the model without a variant",
    "tf_model*.h5": "has weights of TensorFlow: open the model with transformers 4 and from_tf=True, then call "
    f"save_pretrained, which writes {WEIGHTS}",
    "flax_model*.msgpack": "has weights of Flax: open the model with transformers 4 and from_flax=True, then call "
    f"save_pretrained, which writes {WEIGHTS}",
    "pytorch_model_fsdp*": f"has shards of FSDP: accelerate merge-weights writes {WEIGHTS}",
    "global_step*": f"is a checkpoint of DeepSpeed: zero_to_fp32.py beside it writes weights; then save {WEIGHTS} "
    "with transformers",
    "*.gguf": f"is a GGUF file: save the model with transformers, which writes {WEIGHTS}",
    "*.onnx": f"is an ONNX model: save the model with transformers, which writes {WEIGHTS}",
}


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, read on demand."""

    file: Any  # opened by safetensors
    name: str

    def read(self) -> Tensor:
        """Return its values."""
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def shape(self) -> list[int]:
        """Return its shape."""
        return list(self.file.get_slice(self.name).get_shape())

    def dtype(self) -> str:
        """Return its type, such as "F32"."""
        return str(self.file.get_slice(self.name).get_dtype())


def open_tensors(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the name, without the prefixes of wrappers, and the tensor of all weights of a directory.

    Raises:
        UserError: if a file is missing or cannot be read.
    """
    for file in _weight_files(path):
        try:
            require_regular(path / file)
            opened = safe_open(path / file, framework="pt")
        except Exception as error:  # safetensors raises various types for malformed files
            with open_regular(path / file) as raw:
                pointer = raw.read(32).startswith(b"version https://git-lfs")
            reason = "it is a pointer of Git LFS: run git lfs pull, or download it again" if pointer else None
            raise UserError(f"its {file} cannot be read ({reason or quote_error(error)})") from error
        for name in list(opened.keys()):
            yield _WRAPPERS.sub("", name, count=1), StoredTensor(opened, name)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: if the file is not one.
    """
    try:
        settings = load_json(path, _MAX_JSON)
    except ValueError as error:
        raise UserError(f"its {path.name} cannot be read as JSON ({quote_error(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"its {path.name} is not a JSON object")
    return settings


def _weight_files(path: Path) -> list[str]:
    """Return the names of the files that transformers read, too: a single one is preferred to shards."""
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    if (path / INDEX).is_file():
        shards = read_json(path / INDEX).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
        if not names or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names):
            raise UserError(f"its {INDEX} does not name safetensors files")
        for name in sorted(set(names)):
            if not (path / name).is_file():
                raise UserError(f"{name}, which its {INDEX} names, is missing")
        return sorted(set(names))
    for pattern, text in _OTHER_WEIGHTS.items():
        if others := sorted(path.glob(pattern)):
            raise UserError(f"{others[0].name} {text}")
    raise UserError(f"it contains neither {WEIGHTS} nor {INDEX}")
