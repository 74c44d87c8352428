# SPDX-License-Identifier: Apache-2.0
"""Directories in which Hugging Face's transformers store a trained model.

    config.json                        architecture and sizes
    model.safetensors                  weights,
    model.safetensors.index.json       or a list of several safetensors files that contain them
    README.md                          model card
    vocab.txt, ...                     tokenizer

Reading executes nothing that a directory contains: only JSON and safetensors files are opened.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from bionemo.checkpoint import Piece, TensorSource
from bionemo.checkpoint.directory import delete, publish, unfinished
from bionemo.checkpoint.source import read_block
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.checkpoint.tensors import write_text
from bionemo.common.errors import UserError
from bionemo.common.regular import load_json, require_regular
from bionemo.interop import model_card
from bionemo.interop.huggingface.architecture import Architecture
from bionemo.interop.huggingface.contacts import ContactHead, contact_shapes, to_contact_head, to_pieces
from bionemo.interop.model_formats import format_of, known_formats
from bionemo.interop.shape_check import MAX_LAYERS, Shape, check_shapes, format_names, get_size, quote_error
from bionemo.interop.weight_names import head_size

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
_WRITTEN = r"README\.md|(config|tokenizer_config|vocab)\.json|(vocab|merges)\.txt|model\.safetensors"
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")  # no separators, so no file outside the directory is opened
_MAX_JSON = 1 << 24  # bytes; the index of the largest models takes a tenth of that
_GROUP = "weights/"
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}  # names of layer norm weights in old versions of transformers


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory of a Hugging Face model."""
    return (path / CONFIG).is_file()


class _StoredTensor(NamedTuple):
    file: Any  # opened by safetensors
    name: str

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def shape(self) -> list[int]:
        return list(self.file.get_slice(self.name).get_shape())

    def dtype(self) -> str:
        return str(self.file.get_slice(self.name).get_dtype())


class HuggingFaceModel:
    """A TensorSource that reads a directory; names, shapes and types are checked first, tensors are read on demand.

    Attributes:
        path: the directory.
        architecture: architecture of the model.
        config: `model` section of our configuration, as far as config.json determines it.
        vocab_size: number of tokens, without padding.
        contact_head: contact regression, which is not part of the network; None if there is none.

    Raises:
        UserError: if the directory cannot be read, the architecture is not supported, or the weights do not match
            config.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contact_head: ContactHead | None = None
        try:
            settings = _load_json(path / CONFIG)
            self.architecture = _find_readable(settings)
            self.config, self.vocab_size = self.architecture.to_config(settings)
            self.config |= self.architecture.read_tokenizer(path)
            self._weights = self.architecture.names.weights(self.config, self.vocab_size)
            self._stored = self._check_tensors()
        except UserError as error:
            raise UserError(f"{path} cannot be opened: {error}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        prefix = "" if group else _GROUP
        return {prefix + name: weight.shape for name, weight in self._weights.items()}

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        weight = self._weights[name.removeprefix(_GROUP)]
        return read_block(weight.to_ours(lambda theirs: self._stored[theirs].read()), offset, shape)

    def _check_tensors(self) -> dict[str, _StoredTensor]:
        """Find the tensors of all files, check them, and read the contact head."""
        names, architecture = self.architecture.names, self.architecture
        expected = {name: shape for weight in self._weights.values() for name, shape in weight.their_shapes().items()}
        stored: dict[str, _StoredTensor] = {}
        copies: dict[str, _StoredTensor] = {}
        for file in _weight_files(self.path):
            try:
                require_regular(self.path / file)
                opened = safe_open(self.path / file, framework="pt")
            except Exception as error:  # safetensors raises various types for malformed files
                raise UserError(f"its {file} cannot be read ({quote_error(error)})") from error
            for name in list(opened.keys()):
                module, _, kind = name.rpartition(".")
                bare = f"{module}.{_OLD_KINDS.get(kind, kind)}".removeprefix(architecture.prefix)
                if any(re.fullmatch(pattern, bare) for pattern in architecture.ignored):
                    continue
                found = copies if bare in names.copies else stored
                full = bare if found is copies or bare in expected else architecture.prefix + bare
                if full in found:
                    raise UserError(f"it contains {format_names([full])} twice")
                found[full] = _StoredTensor(opened, name)
        contact = contact_shapes(architecture.contact_head, self.config)
        contact_tensors = {name: stored.pop(name) for name in contact if name in stored}
        check_shapes(expected, {name: tensor.shape() for name, tensor in stored.items()})
        for name, tensor in stored.items():
            if tensor.dtype() not in ("F32", "F16", "BF16"):
                raise UserError(f"{name} is of type {tensor.dtype()}; supported are F32, F16 and BF16")
        for name, tensor in copies.items():
            original = names.copies[name]
            first, second = stored[original].read(), tensor.read()
            if first.dtype != second.dtype or not torch.equal(first, second):
                raise UserError(f"{name} differs from {original}; separate output embeddings are not supported")
        if contact_tensors:
            check_shapes(contact, {name: tensor.shape() for name, tensor in contact_tensors.items()})
            weight, bias = (contact_tensors[name].read() for name in contact)
            if weight.any():  # `write` writes zeros for a model without contact regression
                self.contact_head = to_contact_head(weight, bias)
        return stored


def write(
    path: Path, config: Mapping[str, Any], vocab_size: int, source: TensorSource,
    contact_head: ContactHead | None = None, history: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a directory that transformers' `from_pretrained` opens; it appears when it is complete.

    An existing Hugging Face model is replaced. `config` is the `model` section of our configuration, of plain values;
    `vocab_size` does not count padding. All weights are held in memory. A missing contact head is replaced by zeros,
    with which every contact has probability 0.5.

    Raises:
        UserError: if the architecture is not supported, the weights do not match the configuration, or the disk is
            full; existing files stay as they were.
    """
    new = unfinished(path)
    try:
        if (architecture := format_of(config, "hugging_face")) is None:
            raise _unsupported("the class", "our_class", config.get("_target_"))
        weights = architecture.names.weights(config, vocab_size)
        settings = architecture.to_settings(config, vocab_size)
        check_shapes({name: weight.shape for name, weight in weights.items()}, source.shapes("weights"))
        tensors = {
            name: tensor
            for ours, weight in weights.items()
            for name, tensor in weight.to_theirs(source.read(_GROUP + ours)).items()
        }
        types = {tensor.dtype for tensor in tensors.values()}
        dtype = types.pop() if len(types) == 1 else None
        if dtype is not None:
            settings["torch_dtype"] = str(dtype).removeprefix("torch.")
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        pieces += to_pieces(contact_shapes(architecture.contact_head, config), contact_head, dtype or torch.float32)
        pieces += _inverse_frequencies(architecture.inverse_frequencies, config, dtype or torch.float32)
        texts = {CONFIG: json.dumps(settings, indent=2) + "\n", **architecture.write_tokenizer(config)}
        name = architecture.class_name
        usage = f"from transformers import {name}\n\nmodel = {name}.from_pretrained({path.name!r})"
        texts[CARD] = model_card.render(path.name, config, vocab_size, source, history or {}, usage)
        path.parent.mkdir(parents=True, exist_ok=True)
        delete(new, _WRITTEN)
        new.mkdir()
        write_tensors(new / WEIGHTS, pieces, {"format": "pt"})  # transformers require this entry
        for file, text in texts.items():
            write_text(new / file, text)
        publish(path, is_directory, _WRITTEN)
    except UserError as error:
        raise UserError(f"{path} cannot be written: {error}") from error
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}): free disk space or choose another path"
        ) from error
    finally:
        delete(new, _WRITTEN)


def _inverse_frequencies(pattern: str, config: Mapping[str, Any], dtype: torch.dtype) -> list[Piece]:
    """Return the rotary frequencies of each layer."""
    size = head_size(config)
    values = (1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)).to(dtype)
    layers = range(get_size(config, "num_layers", MAX_LAYERS)) if pattern else ()
    return [Piece.whole(pattern.format(layer), values) for layer in layers]


def _unsupported(what: str, attribute: str, value: object) -> UserError:
    supported = ", ".join(dict.fromkeys(getattr(each, attribute) for each in known_formats("hugging_face")))
    return UserError(f"{what} {str(value)[:100]!r} has no Hugging Face format here; supported: {supported}")


def _find_readable(settings: Mapping[str, Any]) -> Architecture:
    model_type = settings.get("model_type")
    positions = settings.get("position_embedding_type", "absolute")  # the default of transformers
    found: list[Architecture] = [each for each in known_formats("hugging_face") if each.model_type == model_type]
    if not found:
        raise _unsupported("the model_type", "model_type", model_type)
    for architecture in found:
        if architecture.position_type in ("", positions):
            return architecture
    supported = " and ".join(architecture.position_type for architecture in found)
    raise UserError(f"position_embedding_type is {str(positions)[:50]!r}; supported are {supported}")


def _weight_files(path: Path) -> list[str]:
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    if (path / INDEX).is_file():
        shards = _load_json(path / INDEX).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
        if not names or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names):
            raise UserError(f"its {INDEX} does not name safetensors files")
        for name in sorted(set(names)):
            if not (path / name).is_file():
                raise UserError(f"{name}, which its {INDEX} names, is missing")
        return sorted(set(names))
    if pickled := sorted(path.glob("pytorch_model*.bin*")):
        raise UserError(
            f"{pickled[0].name} is a pickle, which can run code when it is read: if you trust it, open the model with "
            f"transformers and call save_pretrained, which writes {WEIGHTS}"
        )
    raise UserError(f"it contains neither {WEIGHTS} nor {INDEX}")


def _load_json(path: Path) -> dict[str, Any]:
    try:
        settings = load_json(path, _MAX_JSON)
    except ValueError as error:
        raise UserError(f"its {path.name} cannot be read as JSON ({quote_error(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"its {path.name} is not a JSON object")
    return settings
