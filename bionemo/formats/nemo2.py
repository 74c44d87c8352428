# SPDX-License-Identifier: Apache-2.0
"""Directories in which NeMo 2 and BioNeMo 2 store a trained model.

    context/io.json      arguments of the classes of the run, as the package fiddle writes them
    weights/             tensors, see distributed.py

Reading executes nothing that a directory contains. Sources: NeMo 2.5 (`nemo.lightning.io`), BioNeMo 2.7.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bionemo.common.errors import UserError
from bionemo.formats.detect import CONTEXT
from bionemo.formats.distributed import StoredTensor, open_tensors
from bionemo.formats.huggingface.files import read_json
from bionemo.formats.model_formats import SettingsFormat, known_formats
from bionemo.formats.shape_check import MAX_LAYERS, check_shapes
from bionemo.formats.weight_names import StoredWeights, WeightNames

_CONFIG = "<root>.model.config"  # path of the configuration among the objects
_PREFIX = "module."  # of the weights; names of the optimizer state begin otherwise
_STACKED = re.compile(r"(.*\.layers\.)(?!\d+\.)(.+)")  # a tensor of all layers, with the layer as first dimension
_EXPORT = "export it there to Hugging Face (nemo.lightning.io.export_ckpt with target 'hf') and give the new directory"


@dataclass(frozen=True, kw_only=True)
class Nemo2Model(SettingsFormat):
    """A model class in directories of NeMo 2."""

    file: ClassVar[str] = "io.json"
    config_class: str  # class path of its configuration; it is compared, never imported
    defaults: Mapping[str, Any]  # arguments of the class, which io.json contains only if they were given
    names: WeightNames  # without the prefix


class Nemo2Directory(StoredWeights):
    """A TensorSource that reads a directory; names, shapes and types are checked first, tensors are read on demand.

    Attributes:
        path: the directory.
        config: `model` section of our configuration, as far as io.json determines it.
        vocab_size: number of tokens, without padding.

    Raises:
        UserError: if the directory is incomplete or damaged, the model is not supported, or the weights do not match
            its configuration.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            model, arguments = _read_context(path)
            self.config, self.vocab_size = model.to_config({**model.defaults, **arguments})
            self._weights = model.names.weights(self.config, self.vocab_size)
            self._stored = self._find_tensors(model.names)
        except UserError as error:
            raise UserError(f"{path} cannot be opened: {error}") from error
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error

    def _find_tensors(self, names: WeightNames) -> dict[str, StoredTensor]:
        """Return the checked tensors, also those of stacked layers, under the names in `names`."""
        found: dict[str, StoredTensor] = {}
        for name, tensor in open_tensors(self.path / "weights").items():
            bare = name.removeprefix(_PREFIX)
            if bare == name or "._extra_state" in name:  # of the optimizer, or of Transformer Engine
                continue
            if tensor.shape and (stacked := _STACKED.fullmatch(bare)):
                for number in range(min(tensor.shape[0], MAX_LAYERS)):
                    found[f"{stacked[1]}{number}.{stacked[2]}"] = tensor.select(number)
            else:
                found[bare] = tensor
        shapes = {name: tensor.shape for name, tensor in found.items()}
        check_shapes(names.expected_shapes(self._weights, shapes), shapes)
        for name, tensor in found.items():
            if tensor.dtype not in ("float32", "float16", "bfloat16"):
                raise UserError(f"{name} is of type {tensor.dtype}; supported are float32, float16 and bfloat16")
            tensor.check(name)
        return found


def _read_context(path: Path) -> tuple[Nemo2Model, dict[str, Any]]:
    """Return the model and the given arguments of its configuration; classes and functions are texts."""
    if not (path / CONTEXT).is_file():
        raise UserError(f"its {CONTEXT} is missing, which holds the architecture: copy context/ and weights/")
    objects = read_json(path / CONTEXT).get("objects")
    try:
        config = next(each for each in objects.values() if _CONFIG in each.get("paths", ()))  # type: ignore[union-attr]
        items = (*objects[config["metadata"]["key"]]["items"], *config["items"])  # type: ignore[index]
        arguments = {key.split("'")[1]: _value(value) for key, value in items}
        config_class = str(arguments["fn_or_cls"])
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise UserError(f"its {CONTEXT} does not describe a model as NeMo 2 does: {_EXPORT}") from error
    models: dict[str, Nemo2Model] = {each.config_class: each for each in known_formats("nemo2")}
    if config_class not in models:
        supported = ", ".join(name.rpartition(".")[2] for name in models)
        raise UserError(f"models of the class {config_class[:100]!r} are not supported, only {supported}: {_EXPORT}")
    return models[config_class], arguments


def _value(value: dict[str, Any]) -> Any:
    """Return a plain value as it is, and anything else by its name."""
    if value["type"] == "leaf":
        return value["value"]
    return f"{value['module']}.{value['name']}" if value["type"] == "pyref" else value["key"]
