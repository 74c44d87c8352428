# SPDX-License-Identifier: Apache-2.0
"""The JSON, safetensors and PyTorch files of a Hugging Face directory; nothing that they contain is executed."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from bionemo.common.errors import UserError
from bionemo.common.regular import load_json, open_regular, require_regular
from bionemo.formats.safe_load import check_tensors, load_file
from bionemo.formats.shape_check import quote_error

log = logging.getLogger(__name__)
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FORMS = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")  # transformers read the first
_SHARD = r"[\w-][\w.-]*\."  # no separators, so no file outside the directory is opened
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MAPPED = 1 << 26
_MAX_JSON = 1 << 24  # bytes; the index of the largest models takes a tenth of that
_WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|model)\.)*")  # added by DDP, torch.compile and modules of users
_OTHER_WEIGHTS = {  # pattern of files -> what they are and what to do
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


class _SafetensorsFile:
    """A safetensors file, which is mapped anew after `_MAPPED` bytes, so that pages that were read are released."""

    def __init__(self, path: Path) -> None:
        self._path, self._read, self._identity = path, 0, self._identify(path)
        self.opened: Any = safe_open(path, framework="pt")

    @staticmethod
    def _identify(path: Path) -> tuple[int, ...]:
        status = path.stat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def get_tensor(self, name: str) -> Tensor:
        if self._read > _MAPPED:
            if self._identify(self._path) != self._identity:
                raise UserError(f"{self._path} was changed while it was read: run the command again")
            self._read, self.opened = 0, safe_open(self._path, framework="pt")
        tensor: Tensor = self.opened.get_tensor(name)
        self._read += tensor.nbytes
        return tensor


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file, read on demand."""

    file: _SafetensorsFile
    name: str

    def read(self) -> Tensor:
        """Return its values."""
        return self.file.get_tensor(self.name)

    def shape(self) -> list[int]:
        """Return its shape."""
        return list(self.file.opened.get_slice(self.name).get_shape())

    def dtype(self) -> str:
        """Return its type, such as "F32"."""
        return str(self.file.opened.get_slice(self.name).get_dtype())


class LoadedTensor(NamedTuple):
    """A tensor of a file of PyTorch, mapped into memory."""

    tensor: Tensor

    def read(self) -> Tensor:
        """Return its values."""
        return self.tensor

    def shape(self) -> list[int]:
        """Return its shape."""
        return list(self.tensor.shape)

    def dtype(self) -> str:
        """Return its type, such as "F32"."""
        return _TYPES.get(self.tensor.dtype, str(self.tensor.dtype))


def open_tensors(path: Path) -> Iterator[tuple[str, StoredTensor | LoadedTensor]]:
    """Yield the name, without the prefixes of wrappers, and the tensor of all weights of a directory.

    Raises:
        UserError: if a file is missing or cannot be read.
    """
    for file in _weight_files(path):
        for name, tensor in open_file(path / file):
            yield _WRAPPERS.sub("", name, count=1), tensor


def open_file(path: Path) -> Iterator[tuple[str, StoredTensor | LoadedTensor]]:
    """Yield the names and tensors of a file of safetensors or PyTorch.

    Raises:
        UserError: if it cannot be read.
    """
    require_regular(path)
    with open_regular(path) as raw:
        if raw.read(32).startswith(b"version https://git-lfs"):
            raise UserError(f"its {path.name} is a pointer of Git LFS: run git lfs pull, or download it again")
    if path.suffix == ".bin":
        yield from ((name, LoadedTensor(tensor)) for name, tensor in check_tensors(load_file(path)).items())
        return
    try:
        file = _SafetensorsFile(path)
    except Exception as error:  # safetensors raises various types for malformed files
        raise UserError(f"its {path.name} cannot be read ({quote_error(error)})") from error
    yield from ((name, StoredTensor(file, name)) for name in list(file.opened.keys()))


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
    """Return the names of the files that transformers read, too."""
    forms = [name for name in _FORMS if (path / name).is_file()]
    if not forms:
        for pattern, text in _OTHER_WEIGHTS.items():
            if others := sorted(path.glob(pattern)):
                raise UserError(f"{others[0].name} {text}")
        raise UserError(f"it contains none of {', '.join(_FORMS)}")
    if {WEIGHTS, INDEX} <= set(forms):  # saved twice, with different sizes of shards
        log.warning("%s: %s is read; remove it to read the files that %s names", path, WEIGHTS, INDEX)
    if not forms[0].endswith(".json"):
        return forms[:1]
    shards = read_json(path / forms[0]).get("weight_map")
    names, suffix = list(shards.values()) if isinstance(shards, dict) else [], forms[0].split(".")[1]
    if not names or not all(isinstance(name, str) and re.fullmatch(_SHARD + suffix, name) for name in names):
        raise UserError(f"its {forms[0]} does not name {suffix} files")
    for name in sorted(set(names)):
        if not (path / name).is_file():
            raise UserError(f"{name}, which its {forms[0]} names, is missing")
    return sorted(set(names))
