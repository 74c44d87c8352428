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
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bionemo.checkpoint import WEIGHTS as WEIGHTS_GROUP
from bionemo.checkpoint import Piece, TensorSource
from bionemo.checkpoint.directory import delete, publish, unfinished
from bionemo.checkpoint.tensors import write as write_tensors
from bionemo.checkpoint.tensors import write_text
from bionemo.common.errors import UserError
from bionemo.formats import model_card
from bionemo.formats.detect import CONFIG
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.huggingface.contacts import ContactHead, contact_shapes, to_contact_head, to_pieces
from bionemo.formats.huggingface.files import WEIGHTS, LoadedTensor, StoredTensor, open_tensors, read_json
from bionemo.formats.model_formats import format_of, known_formats
from bionemo.formats.shape_check import MAX_LAYERS, Shape, check_shapes, format_names, get_size
from bionemo.formats.weight_names import FREQUENCIES, StoredWeights, WeightNames, rotary_frequencies

log = logging.getLogger(__name__)
CARD = "README.md"
_WRITTEN = r"README\.md|(config|tokenizer_config|vocab)\.json|(vocab|merges)\.txt|model\.safetensors"
_FREQUENCIES = "rotary_embeddings.inv_freq"  # end of the names of rotary frequencies
_ROUNDING = 1e-6  # relative difference of frequencies that were computed in fp32
# content of config.json, and the names and tensors of all weights
Opened = tuple[Mapping[str, Any], Iterable[tuple[str, StoredTensor | LoadedTensor]]]
_OLD_KINDS = {"gamma": "weight", "beta": "bias"}  # names of layer norm weights in old versions of transformers


def is_directory(path: Path) -> bool:
    """Return whether a path is a directory of a Hugging Face model."""
    return (path / CONFIG).is_file()


def _open(path: Path) -> Opened:
    return read_json(path / CONFIG), open_tensors(path)


class HuggingFaceModel(StoredWeights):
    """A TensorSource that reads a directory; names, shapes and types are checked first, tensors are read on demand.

    Args:
        path: the directory.
        open_model: returns the content of config.json, and the tensors by the names of transformers. A reader of other
            files can replace it.

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

    def __init__(self, path: Path, open_model: Callable[[Path], Opened] = _open) -> None:
        self.path = path
        self.contact_head: ContactHead | None = None
        try:
            found, opened = open_model(path)
            self.architecture = find_readable(found)
            settings = self.architecture.update_settings(found)
            self.config, self.vocab_size = self.architecture.to_config(settings)
            self.config |= self.architecture.read_tokenizer(path)
            tensors = list(opened)
            self._names = self._find_names({name.removeprefix(self.architecture.prefix) for name, _ in tensors})
            self._weights = self._names.weights(self.config, self.vocab_size)
            self._stored = self._check_tensors(tensors, settings.get("architectures"))
        except UserError as error:
            raise UserError(f"{path} cannot be opened: {error}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error

    def _find_names(self, found: set[str]) -> WeightNames:
        """Return the names, of the present or an older form, that most of the tensors have."""

        def count(names: WeightNames) -> int:
            theirs = (
                each for weight in names.weights(self.config, self.vocab_size).values() for each in weight.theirs
            )
            return sum(name.removeprefix(self.architecture.prefix) in found for name in theirs)

        return max((self.architecture.names, *self.architecture.other_names), key=count)

    def _find_tensors(
        self, tensors: Iterable[tuple[str, StoredTensor | LoadedTensor]], class_names: object
    ) -> tuple[dict[str, StoredTensor | LoadedTensor], dict[str, StoredTensor | LoadedTensor], set[str]]:
        """Return the weights and the copies of weights of all files, and read the rotary frequencies.

        Modules of other classes than the language model, such as a classifier, are left out; their names are returned,
        too. `class_names` is the entry `architectures` of config.json.
        """
        names, architecture, expected = self._names, self.architecture, self._expected()
        contact = contact_shapes(architecture.contact_head, self.config)
        without_prefix = {*expected, *names.copies, *architecture.zeros}
        modules = {_module(name.removeprefix(architecture.prefix)) for name in (*without_prefix, *contact)}
        is_language_model = class_names == [architecture.class_name]
        stored: dict[str, StoredTensor | LoadedTensor] = {}
        copies: dict[str, StoredTensor | LoadedTensor] = {}
        frequencies: list[Tensor] = []
        others: set[str] = set()
        for name, tensor in tensors:
            module, _, kind = name.rpartition(".")
            bare = f"{module}.{_OLD_KINDS.get(kind, kind)}".removeprefix(architecture.prefix).lstrip(".")
            if architecture.inverse_frequencies and bare.endswith(_FREQUENCIES):
                frequencies.append(tensor.read().float())
            elif any(re.fullmatch(pattern, bare) for pattern in architecture.ignored):
                continue
            elif not is_language_model and _module(bare) not in modules:
                others.add(_module(bare))
            else:
                full = bare if bare in without_prefix else architecture.prefix + bare
                found = copies if full in names.copies else stored
                if full in found:
                    raise UserError(f"it contains {format_names([full])} twice")
                found[full] = tensor
        self._read_frequencies(frequencies)
        return stored, copies, others

    def _check_tensors(
        self, tensors: Iterable[tuple[str, StoredTensor | LoadedTensor]], class_names: object
    ) -> dict[str, StoredTensor | LoadedTensor]:
        """Find the tensors of all files, check them, and read the contact head."""
        names, architecture = self._names, self.architecture
        stored, copies, others = self._find_tensors(tensors, class_names)
        notes = [f"the weights of {format_names(sorted(others))} are not used"] if others else []
        contact = contact_shapes(architecture.contact_head, self.config)
        contact_tensors = {name: stored.pop(name) for name in contact if name in stored}
        for name in architecture.zeros.keys() - self._expected():
            if (found := stored.pop(name, None)) is not None and found.read().any():
                raise UserError(f"{name} is not 0, which {architecture.title} cannot express")
        head = {name for name in self._expected() if not name.startswith(architecture.prefix)}
        if head and {_module(name) for name in head}.isdisjoint(map(_module, (*stored, *copies))):
            self._weights = {ours: weight for ours, weight in self._weights.items() if weight.theirs[0] not in head}
            notes.append("only its embeddings can be used, because it has no language-model head")
        if notes:
            log.warning("%s: %s", self.path, "; ".join(notes))
        shapes = {name: tensor.shape() for name, tensor in stored.items()}
        check_shapes(names.expected_shapes(self._weights, shapes), shapes)
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

    def _expected(self) -> dict[str, Shape]:
        return self._names.expected_shapes(self._weights, {})

    def _read_frequencies(self, stored: list[Tensor]) -> None:
        """Keep rotary frequencies that differ from the exact ones: transformers use the stored ones.

        A file saved in half precision has rounded frequencies, one tensor for each layer (transformers 4) or a single
        one (5).
        """
        exact = rotary_frequencies(self.config)
        for each in stored:
            if each.shape != exact.shape or not bool((each.isfinite() & (each > 0)).all()):
                raise UserError(f"its rotary frequencies are not {len(exact)} positive numbers")
            if not torch.equal(each, stored[0]):
                raise UserError("its layers have different rotary frequencies, which are not supported")
        if stored and not torch.allclose(stored[0], exact, rtol=_ROUNDING, atol=0):
            self.config[FREQUENCIES] = stored[0].tolist()


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
        check_shapes({name: weight.shape for name, weight in weights.items()}, source.shapes(WEIGHTS_GROUP))
        tensors = {
            name: tensor
            for ours, weight in weights.items()
            for name, tensor in weight.to_theirs(source.read(f"{WEIGHTS_GROUP}/{ours}")).items()
        }
        types = {tensor.dtype for tensor in tensors.values()}
        dtype = types.pop() if len(types) == 1 else None
        if dtype is not None:
            settings["torch_dtype"] = str(dtype).removeprefix("torch.")
        pieces = [Piece.whole(name, tensor) for name, tensor in tensors.items()]
        pieces += to_pieces(contact_shapes(architecture.contact_head, config), contact_head, dtype or torch.float32)
        copies = architecture.names.copies
        pieces += [Piece.whole(copy, tensors[copies[copy]]) for copy in architecture.written_copies(config)]
        for name in architecture.zeros.keys() - tensors:
            sizes = {**config, "vocab_size": vocab_size}
            shape = [each if isinstance(each, int) else get_size(sizes, each) for each in architecture.zeros[name]]
            pieces.append(Piece.whole(name, torch.zeros(shape, dtype=dtype or torch.float32)))
        pieces += _inverse_frequencies(architecture.inverse_frequencies, config)
        if architecture.contact_head and not contact_head:
            log.warning(
                "%s has no contact head: transformers predict a probability of 0.5 for all contacts "
                "(`bionemo analysis contacts-fit` fits a head)", path,
            )  # fmt: skip
        texts = {CONFIG: json.dumps(settings, indent=2) + "\n", **architecture.write_tokenizer(config)}
        kind = architecture.class_name
        usage = f"from transformers import {kind}\n\nmodel = {kind}.from_pretrained({path.name!r})"
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


def _inverse_frequencies(pattern: str, config: Mapping[str, Any]) -> list[Piece]:
    """Return the rotary frequencies of each layer, always in fp32: rounded ones would change the function."""
    layers = range(get_size(config, "num_layers", MAX_LAYERS)) if pattern else ()
    return [Piece.whole(pattern.format(layer), rotary_frequencies(config)) for layer in layers]


def _module(name: str) -> str:
    """Return the first part of a name, such as `lm_head`."""
    return name.partition(".")[0]


def _unsupported(what: str, attribute: str, value: object, class_names: object = None) -> UserError:
    supported = ", ".join(dict.fromkeys(getattr(each, attribute) for each in known_formats("hugging_face")))
    of_class = f"; its class is {str(class_names[0])[:100]!r}" if isinstance(class_names, list) and class_names else ""
    return UserError(f"{what} {str(value)[:100]!r} has no Hugging Face format here; supported: {supported}{of_class}")


def find_readable(settings: Mapping[str, Any]) -> Architecture:
    """Return the architecture of a config.json.

    Raises:
        UserError: if it is not supported.
    """
    if settings.get("quantization_config") is not None:
        raise UserError("its weights are quantized: save the model without quantization_config, in bf16 or fp32")
    model_type = settings.get("model_type")
    positions = settings.get("position_embedding_type", "absolute")  # the default of transformers
    found: list[Architecture] = [
        each for each in known_formats("hugging_face") if model_type in (each.model_type, *each.other_types)
    ]
    if not found:
        code = "Python code that comes with a model (auto_map) is never run, and " if settings.get("auto_map") else ""
        raise _unsupported(f"{code}the model_type", "model_type", model_type, settings.get("architectures"))
    for architecture in found:
        if architecture.position_type in ("", positions) and architecture.recognizes(settings):
            return architecture
    if not all(architecture.position_type for architecture in found):
        titles = " and ".join(architecture.title for architecture in found)
        raise UserError(f"its vocabulary has {str(settings.get('vocab_size'))[:50]} tokens; supported are {titles}")
    supported = " and ".join(architecture.position_type for architecture in found)
    raise UserError(f"position_embedding_type is {str(positions)[:50]!r}; supported are {supported}")
