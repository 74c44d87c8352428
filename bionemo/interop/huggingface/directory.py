# SPDX-License-Identifier: Apache-2.0
"""Directories in which Hugging Face's transformers keep a trained model.

    config.json                        what kind of model it is, and its sizes
    model.safetensors                  its weights,
    model.safetensors.index.json       or which of several files of that format hold them
    README.md                          the model card
    vocab.txt, ...                     the tokenizer

Reading runs nothing that such a directory holds: only JSON and safetensors are opened.
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
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.checkpoint.tensors import write_text
from bionemo.common.errors import UserError
from bionemo.common.regular import require_regular
from bionemo.interop.huggingface.contacts import ContactHead, contact_shapes, to_head, to_pieces
from bionemo.interop.huggingface.esm import ESM1B, ESM2
from bionemo.interop.huggingface.gpt2 import GPT2
from bionemo.interop.huggingface.names import Architecture
from bionemo.interop.model_card import card
from bionemo.interop.shape_check import Shape, compare, first_few, short

ARCHITECTURES = (ESM2, ESM1B, GPT2)
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
CARD = "README.md"
_WRITTEN = r"README\.md|(config|tokenizer_config|vocab)\.json|(vocab|merges)\.txt|model\.safetensors"
_PICKLED = "pytorch_model*.bin*"
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")  # no path, so nothing outside is ever opened
_MOST_JSON = 1 << 24  # bytes; the index of the largest models takes a tenth of that
_GROUP = "weights/"
_OLD = {"gamma": "weight", "beta": "bias"}  # what transformers call those of layer norms in some versions


def is_directory(path: Path) -> bool:
    """Whether there is such a directory, by what is in it."""
    return (path / CONFIG).is_file()


class _Place(NamedTuple):
    file: Any  # opened by safetensors
    name: str  # of the tensor in it


class HuggingFaceModel:
    """A TensorSource out of a directory that has been looked through; a tensor is read when it is asked for.

    Attributes:
        path: of the directory.
        architecture: what kind of model it is.
        config: the model section of our configuration, as far as it follows from config.json.
        words: size of the vocabulary, without padding.
        contact_head: if there is one; it is no part of the network.

    Raises:
        UserError: when it cannot be read, is of no kind that is known, or its weights are not those that its
            config.json tells of.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            settings = _json(path / CONFIG)
            self.architecture = _to_read(settings)
            self.config, self.words = self.architecture.to_config(settings)
            self.config |= self.architecture.read_tokenizer(path)
            self.contact_head: ContactHead | None = None
            self._table = self.architecture.table(self.config, self.words)
            self._places = self._look_through()
        except UserError as error:
            raise UserError(f"{path} is not opened: {error}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        prefix = "" if group else _GROUP
        return {prefix + name: weight.shape for name, weight in self._table.items()}

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        whole = self._table[name.removeprefix(_GROUP)].to_ours(self._tensor)
        if offset is None or shape is None:
            return whole
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]

    def _tensor(self, theirs: str) -> Tensor:
        file, name = self._places[theirs]
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def _look_through(self) -> dict[str, _Place]:
        """Find the tensor of each of their names, and see that it is what it should be."""
        places: dict[str, _Place] = {}
        copies: dict[str, _Place] = {}
        architecture = self.architecture
        expected = {name: shape for each in self._table.values() for name, shape in each.their_shapes().items()}
        for file in _files(self.path):
            try:
                require_regular(self.path / file)
                opened = safe_open(self.path / file, framework="pt")
            except Exception as error:  # whatever the library makes of hostile bytes
                raise UserError(f"its {file} cannot be read ({short(error)})") from error
            for name in list(opened.keys()):
                bare = _today(name).removeprefix(architecture.prefix)
                if any(re.fullmatch(pattern, bare) for pattern in architecture.computed):
                    continue
                known = copies if bare in architecture.copies else places
                whole = bare if known is copies or bare in expected else architecture.prefix + bare
                if known.setdefault(whole, place := _Place(opened, name)) is not place:
                    raise UserError(f"it has {first_few([whole])} twice")
        shapes = contact_shapes(architecture.contacts, self.config)
        contacts = {name: places.pop(name) for name in shapes if name in places}
        compare(expected, {name: file.get_slice(key).get_shape() for name, (file, key) in places.items()})
        for name, (file, key) in places.items():
            if (dtype := file.get_slice(key).get_dtype()) not in ("F32", "F16", "BF16"):
                raise UserError(f"its {name} is of type {dtype}; F32, F16 and BF16 are read")
        for name, (file, key) in copies.items():
            original = architecture.copies[name]
            one, other = places[original].file.get_tensor(places[original].name), file.get_tensor(key)
            if one.dtype != other.dtype or not torch.equal(one, other):
                raise UserError(
                    f"its {name} is not its {original}: a table of its own for the last product is not read"
                )
        if contacts:
            compare(shapes, {name: file.get_slice(key).get_shape() for name, (file, key) in contacts.items()})
            self.contact_head = to_head(*(contacts[name].file.get_tensor(contacts[name].name) for name in shapes))
        return places


def write(
    path: Path,
    config: Mapping[str, Any],
    words: int,
    source: TensorSource,
    contact_head: ContactHead | None = None,
    history: Mapping[str, str] | None = None,
) -> None:
    """Write a directory that transformers' `from_pretrained` opens; it appears when it is complete.

    Args:
        path: of the directory; what is there is replaced.
        config: the model section of our configuration, of plain values.
        words: size of the vocabulary, without padding.
        source: of the whole model's weights; each is in memory once.
        contact_head: a regression on attention, if there is one; zeros stand for it, which find every contact as
            likely as not.
        history: of its training, for the model card.

    Raises:
        UserError: when there is no such model there, the weights are not those of the configuration, or there is no
            room; what was there before is untouched.
    """
    new = unfinished(path)
    try:
        [architecture] = _architectures("it is of the class", "ours", config.get("_target_"))
        table = architecture.table(config, words)
        settings = architecture.to_settings(config, words)
        compare({name: weight.shape for name, weight in table.items()}, source.shapes("weights"))
        pieces = [
            Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
            for ours, weight in table.items()
            for name, tensor in weight.to_theirs(source.read(_GROUP + ours)).items()
        ]
        if len(types := {piece.values.dtype for piece in pieces}) == 1:
            settings["torch_dtype"] = str(next(iter(types))).removeprefix("torch.")
        dtype = types.pop() if len(types) == 1 else torch.float32
        pieces += to_pieces(contact_shapes(architecture.contacts, config), contact_head, dtype)
        pieces += architecture.computed_pieces(config, dtype)
        texts = {CONFIG: json.dumps(settings, indent=2) + "\n", **architecture.tokenizer(config)}
        texts[CARD] = card(path.name, config, words, source, history or {}, architecture.howto(path.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        delete(new, _WRITTEN)
        new.mkdir()
        write_tensors(new / WEIGHTS, pieces, {"format": "pt"})  # transformers refuse a file that does not say so
        for name, text in texts.items():
            write_text(new / name, text)
        publish(path, is_directory, _WRITTEN)
    except UserError as error:
        raise UserError(f"{path} is not written: {error}") from error
    except OSError as error:
        raise UserError(
            f"{path} could not be written ({error.strerror or error}): make room or choose another path"
        ) from error
    finally:
        delete(new, _WRITTEN)


def _today(name: str) -> str:
    """A weight's name as it is today."""
    module, _, kind = name.rpartition(".")
    return f"{module}.{_OLD.get(kind, kind)}"


def _architectures(says: str, key: str, value: object) -> list[Architecture]:
    if found := [architecture for architecture in ARCHITECTURES if getattr(architecture, key) == value]:
        return found
    known = ", ".join(dict.fromkeys(getattr(architecture, key) for architecture in ARCHITECTURES))
    raise UserError(f"{says} {str(value)[:100]!r}; what can be converted is {known}")


def _to_read(settings: Mapping[str, Any]) -> Architecture:
    found = _architectures("its model_type is", "model_type", settings.get("model_type"))
    kind = settings.get("position_embedding_type", "absolute")  # what is meant when nothing is said
    for architecture in found:
        if architecture.positions in ("", kind):
            return architecture
    known = " and ".join(architecture.positions for architecture in found)
    raise UserError(f"its position_embedding_type is {str(kind)[:50]!r}: {known} are read")


def _files(path: Path) -> list[str]:
    """Names of the files that hold the weights."""
    if (path / WEIGHTS).is_file():
        return [WEIGHTS]
    if (path / INDEX).is_file():
        shards = _json(path / INDEX).get("weight_map")
        names = list(shards.values()) if isinstance(shards, dict) else []
        if not names or not all(isinstance(name, str) and _SHARD.fullmatch(name) for name in names):
            raise UserError(f"its {INDEX} does not name files of weights")
        for name in sorted(set(names)):
            if not (path / name).is_file():
                raise UserError(f"it has no {name}, which its {INDEX} names")
        return sorted(set(names))
    if pickled := sorted(path.glob(_PICKLED)):
        raise UserError(
            f"{pickled[0].name} could run code when it is read: have transformers, where you trust it, open the model "
            f"and save it anew with save_pretrained, which writes {WEIGHTS}"
        )
    raise UserError(f"it has neither {WEIGHTS} nor {INDEX}")


def _json(path: Path) -> dict[str, Any]:
    require_regular(path)
    with path.open("rb") as file:
        data = file.read(_MOST_JSON + 1)
    try:
        settings = json.loads(data) if len(data) <= _MOST_JSON else None
    except (ValueError, RecursionError) as error:
        raise UserError(f"its {path.name} is not JSON ({short(error)})") from error
    if not isinstance(settings, dict):
        raise UserError(f"its {path.name} is no object of keys and values, or too long to be one")
    return settings
