# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of Hugging Face's peft: a directory with changes of the weights of a base model, which it names.

    adapter_config.json          base, adapted modules, ranks and scalings
    adapter_model.safetensors    matrices A and B of each adapted module

An adapted weight is W + s B A (Hu et al. 2021, eq. 3), where s = alpha / R, or alpha / sqrt(R) with `use_rslora`
(Kalajdzievski 2023). In our own adapters, D is A and U is s B. Shapes: W [out, in], A [R, in], B [out, R], rank R.

Sources: LoraConfig, LoraModel and get_pattern_key of peft 0.21.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from bionemo.checkpoint import WEIGHTS, Checkpoint, TensorSource
from bionemo.checkpoint.merged_lora import DOWN, ENCODER, UP
from bionemo.checkpoint.source import read_block
from bionemo.common.errors import UserError
from bionemo.common.files import write_atomic
from bionemo.common.redaction import redact_text
from bionemo.formats.detect import ADAPTER_WEIGHTS, ADAPTERS
from bionemo.formats.huggingface.architecture import Architecture
from bionemo.formats.huggingface.files import LoadedTensor, StoredTensor, open_file, read_json
from bionemo.formats.model_formats import format_of
from bionemo.formats.shape_check import Shape, check_shapes, format_names, get_size
from bionemo.formats.weight_names import Weight

log = logging.getLogger(__name__)
_GROUP, _OF_MODEL = f"{WEIGHTS}/", "base_model.model."  # prefixes of our names and of peft's
_REQUIRED = "peft_type", "base_model_name_or_path", "r", "lora_alpha"
# Keys of adapter_config.json that may have any value of this type: they are read below, or do not change the function.
# fan_in_fan_out follows from the class of the module, by which peft corrects it.
_TYPES: Mapping[str, Any] = {
    "r": int, "lora_alpha": (int, float), "rank_pattern": dict, "alpha_pattern": dict, "use_rslora": bool,
    "target_modules": (list, str), "exclude_modules": (list, str), "modules_to_save": list,
    "base_model_name_or_path": str,
    **dict.fromkeys((
        "fan_in_fan_out", "lora_dropout", "task_type", "auto_mapping", "revision", "peft_version", "inference_mode",
        "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config", "loftq_config", "eva_config",
        "corda_config", "lora_ga_config",
    ), object),
}  # fmt: skip
# Supported values of the others, besides those that mean "unset".
_VALUES: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",), "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),  # others change the weights of the base
}  # fmt: skip


def read_settings(path: Path) -> dict[str, Any]:
    """Read adapter_config.json, and check what does not depend on the base.

    Raises:
        UserError: if it cannot be read, or a key has a value that changes the function and is not supported.
        OSError: if it cannot be read.
    """
    settings = {**dict.fromkeys(_REQUIRED), **read_json(path / ADAPTERS)}
    for key, value in settings.items():
        is_unset = key not in _REQUIRED and (value is None or value is False or value in ([], {}))
        is_known = isinstance(value, _TYPES.get(key, ())) and not (
            key == "alpha_pattern" and any(not isinstance(alpha, int | float) for alpha in value.values())
        )
        if not (is_unset or is_known or value in _VALUES.get(key, ())):
            supported = f"; supported: {', '.join(map(str, _VALUES[key]))}" if key in _VALUES else ""
            raise UserError(f"{key} in its {ADAPTERS} is {str(value)[:50]!r}, which is not supported{supported}")
    return settings


class MergedAdapter:
    """A TensorSource of a base with the adapter merged, computed in fp32 and rounded once to the type of the base.

    Names, shapes and targets are checked first; matrices are read on demand.

    Args:
        path: directory of the adapter.
        settings: its `read_settings`.
        base: weights of the base.
        config: `model` section of its configuration.
        vocab_size: its number of tokens without padding.

    Raises:
        UserError: if the adapter belongs to another base, or changes it in a way that is not supported.
        OSError, re.error: if a file cannot be read, or a pattern is invalid.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], base: TensorSource, config: Mapping[str, Any],
        vocab_size: int | None,
    ) -> None:  # fmt: skip
        self.path, self.settings, self.base, self.config = path, settings, base, config
        architecture: Architecture | None = format_of(config, "hugging_face")
        if architecture is None or vocab_size is None:
            raise UserError(f"its base {base.path} has no Hugging Face format here")
        self._architecture, present = architecture, base.shapes(WEIGHTS)
        weights = architecture.names.weights(config, vocab_size).items()
        self._weights = {ours: weight for ours, weight in weights if ours in present}
        self._tensors: dict[str, StoredTensor | LoadedTensor] = {}  # of the file
        self._scalings: dict[str, tuple[str, float]] = {}  # adapted weight -> module in the file, and s
        self._head: set[str] = set()  # weights of the language-model head that the file replaces
        self._find_tensors()

    def shapes(self, group: str = "") -> dict[str, Shape]:
        """See TensorSource."""
        return self.base.shapes(group)

    def read(self, name: str, offset: Shape | None = None, shape: Shape | None = None) -> Tensor:
        """See TensorSource."""
        weight = self._weights.get(name.removeprefix(_GROUP))
        if weight is None or {*weight.theirs}.isdisjoint((*self._scalings, *self._head)):
            return self.base.read(name, offset, shape)
        theirs = weight.to_theirs(self.base.read(name))
        return read_block(weight.to_ours(lambda each: self._merge(each, theirs[each])), offset, shape)

    def _merge(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the base, in their layout, with the adapter merged."""
        if name in self._head:
            return self._tensors[name].read()
        if name not in self._scalings:
            return tensor
        down, up = self._read_pair(name)
        delta = up @ down * self._scalings[name][1]
        return (tensor.float() + (delta.T if self._architecture.names.transposes else delta)).to(tensor.dtype)

    def _read_pair(self, name: str) -> list[Tensor]:
        """Return A and B of an adapted weight."""
        module, _ = self._scalings[name]
        return [self._tensors[f"{module}.lora_{part}.weight"].read().float() for part in "AB"]

    def separate(self, trainable: str) -> dict[str, Tensor]:
        """Return the adapter as one of ours, D and U by our names, with which the training of the base can continue.

        The matrices of query, key and value, or of gate and up, become one pair: D has the rows of all different A, so
        their ranks add. Other modules than those whose name matches `trainable` are left out if B is 0.

        Raises:
            UserError: if the adapter changes other modules.
        """
        found: dict[str, Tensor] = {}
        others = {name for name in self._scalings if self._read_pair(name)[1].any()} | self._head
        for ours, weight in self._weights.items():
            module = ours.removesuffix("weight")
            if re.fullmatch(rf"{trainable}\.", module) and not self._scalings.keys().isdisjoint(weight.theirs):
                found[module + DOWN], found[module + UP] = self._join(weight)
                others -= {*weight.theirs}
        if others:
            raise UserError(
                f"{self.path} changes {format_names(sorted(others))}, which is not trained here: merge it first with "
                f"bionemo checkpoint convert {self.path} NEW, and give NEW"
            )
        return found

    def _join(self, weight: Weight) -> tuple[Tensor, Tensor]:
        """Return D and U of one of our weights."""
        pairs = {name: self._read_pair(name) for name in weight.theirs if name in self._scalings}
        downs = {down.numpy().tobytes(): down for down, _ in pairs.values()}  # equal ones once
        transposes = self._architecture.names.transposes
        joined: dict[str, Tensor] = {}
        for name, shape in weight.their_shapes().items():  # s B is in the columns of its A
            parts = {key: torch.zeros(shape[-1 if transposes else 0], len(down)) for key, down in downs.items()}
            if name in pairs:
                down, up = pairs[name]
                parts[down.numpy().tobytes()] = up * self._scalings[name][1]
            columns = torch.cat([*parts.values()], 1)
            joined[name] = columns.T if transposes else columns
        return torch.cat([*downs.values()]), weight.to_ours(joined.__getitem__)

    def _find_tensors(self) -> None:
        """Compare the tensors of the file with those that its configuration demands for the base."""
        architecture, prefix = self._architecture, self._architecture.prefix
        shapes = {name: shape for weight in self._weights.values() for name, shape in weight.their_shapes().items()}
        modules = {name.removeprefix(prefix).partition(".")[0] for name in shapes}
        # The contact head is not part of the network. Most trainings do not change it: its B is 0.
        contact = rf"{re.escape(architecture.contact_head.removeprefix(prefix))}\.lora_(A|B)\.weight"
        unused = set()
        for name, tensor in open_file(self.path / ADAPTER_WEIGHTS):
            full = name.removeprefix(_OF_MODEL)
            bare = full.removeprefix(prefix)
            is_contact = (match := re.fullmatch(contact, bare)) and match[1] == "B" and tensor.read().any()
            if is_contact or (self._is_saved(full) and bare.partition(".")[0] not in modules):
                unused.add(bare.partition(".")[0])
            elif not any(re.fullmatch(pattern, bare) for pattern in (*architecture.ignored, contact)):
                self._tensors[full] = tensor
        if unused:
            log.warning("%s: the weights of %s are not used", self.path, format_names(sorted(unused)))
        saved = {name for name in self._tensors if self._is_saved(name) and not name.startswith(prefix)}
        tied = {copy: name for copy, name in architecture.names.copies.items() if copy in saved}
        self._head = saved & shapes.keys()
        expected = self._expected_pairs(shapes) | {name: shapes[name] for name in self._head}
        expected |= {copy: shapes[name] for copy, name in tied.items()}
        check_shapes(expected, {name: tensor.shape() for name, tensor in self._tensors.items()})
        for ours, weight in self._weights.items():
            for copy in [copy for copy, name in tied.items() if name in weight.theirs]:
                original = weight.to_theirs(self.read(_GROUP + ours))[tied[copy]]
                if not torch.equal(self._tensors[copy].read().float(), original.float()):
                    raise UserError(f"{copy} differs from {tied[copy]}, to which it is tied")

    def _expected_pairs(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the shapes of A and B for all targets among the base's weights, and find the scalings."""
        expected: dict[str, Shape] = {}
        prefix, settings = self._architecture.prefix, self.settings
        targets, excluded = (settings.get(key) or [] for key in ("target_modules", "exclude_modules"))
        removed = "" if any(name.startswith(prefix) for name in self._tensors) else prefix
        for name, shape in shapes.items():
            module = name.removesuffix(".weight").removeprefix(removed)
            down, up = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
            is_present = name.startswith(prefix) or down in self._tensors  # classes may lack modules of the head
            if (
                is_present and name.endswith(".weight") and len(shape) == 2 and _matches(targets, module)
                and not _matches(excluded, module) and not self._is_saved(module)
            ):  # fmt: skip
                rank = get_size({"r": _find(settings, "rank_pattern", module, "r")}, "r")
                rows, columns = reversed(shape) if self._architecture.names.transposes else shape
                expected |= {down: (rank, columns), up: (rows, rank)}
                alpha = _find(settings, "alpha_pattern", module, "lora_alpha")
                self._scalings[name] = module, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        return expected

    def _is_saved(self, name: str) -> bool:
        """Return whether a module, or the module of a weight, is one of modules_to_save."""
        return any(re.match(rf"(^|.*\.){each}($|\..*)", name) for each in self.settings.get("modules_to_save") or ())


def write_adapter(path: Path, checkpoint: Path, base: str) -> bool:
    """Write the adapters of a checkpoint as a directory that peft's `PeftModel.from_pretrained` reads.

    Query, key and value, or gate and up, share D as their A. alpha is R, so that s = 1.

    Args:
        path: the directory; existing files are replaced.
        checkpoint: checkpoint of a fine-tuned model with adapters.
        base: path of the model that they change, or its ORG/NAME@COMMIT on the hub.

    Returns:
        Whether it was written: not if there are no adapters, or the model class has no Hugging Face format.

    Raises:
        OSError: if a file cannot be written.
    """
    saved = Checkpoint(checkpoint)
    names = [name for name in saved.shapes(WEIGHTS) if name.endswith(UP)]
    architecture: Architecture | None = format_of(saved.config, "hugging_face")
    if architecture is None or not names:
        return False
    transposes = architecture.names.transposes
    weights = architecture.names.weights(saved.config, vocab_size=1)  # those of layers do not depend on it
    tensors, ranks = {}, {}
    for name in names:
        down = saved.read(_GROUP + name.removesuffix(UP) + DOWN)
        weight = weights[name.removeprefix(ENCODER).removesuffix(UP) + "weight"]
        for theirs, up in weight.to_theirs(saved.read(_GROUP + name)).items():
            target = theirs.removesuffix(".weight")
            ranks[target] = len(down)
            tensors[f"{_OF_MODEL}{target}.lora_A.weight"] = down.float().clone()  # a file has no shared memory
            tensors[f"{_OF_MODEL}{target}.lora_B.weight"] = (up.T if transposes else up).float().contiguous().clone()
    rank = max(ranks.values())
    pattern = {target: each for target, each in ranks.items() if each != rank}
    settings = {
        "peft_type": "LORA", "task_type": None, "base_model_name_or_path": redact_text(base), "inference_mode": True,
        "target_modules": list(ranks), "r": rank, "lora_alpha": rank, "rank_pattern": pattern,
        "alpha_pattern": pattern, "bias": "none", "fan_in_fan_out": transposes, "lora_dropout": 0.0,
    }  # fmt: skip
    if not Path(base).exists() and "@" in base:  # a model of the hub
        settings["base_model_name_or_path"], _, settings["revision"] = base.partition("@")
    path.mkdir(parents=True, exist_ok=True)
    write_atomic(path / ADAPTER_WEIGHTS, save(tensors, {"format": "pt"}))
    write_atomic(path / ADAPTERS, json.dumps(settings, indent=2) + "\n")
    return True


def _matches(names: str | list[str], module: str) -> bool:
    """Return whether a regular expression, or one of several names or ends of names, matches a module."""
    ends = [names] if isinstance(names, str) else [rf"(.*\.)?{re.escape(str(name))}" for name in names]
    return any(re.fullmatch(end, module) for end in ends)


def _find(settings: Mapping[str, Any], patterns: str, module: str, default: str) -> Any:
    """Return the number of the first of the patterns that matches a module or the end of its name, or the default."""
    return next(
        (each for key, each in (settings.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", module)),
        settings[default],
    )
