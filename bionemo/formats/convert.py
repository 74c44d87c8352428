# SPDX-License-Identifier: Apache-2.0
"""Open models of all formats; convert them to checkpoints, `.nemo` archives and Hugging Face directories."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bionemo.checkpoint import WEIGHTS, Checkpoint, MergedLoRA, TensorsInMemory, TensorSource, check, tools
from bionemo.common.errors import UserError
from bionemo.config.model_argument import hub_id
from bionemo.config.saved_model import add_defaults
from bionemo.formats import fair_esm, model_card, nemo_archive
from bionemo.formats.detect import (
    ADAPTER,
    CHECKPOINT,
    FAIR_ESM,
    HUGGING_FACE,
    NEMO,
    NEMO2,
    detect_format,
    find_model,
    locate_model,
    require_model,
)
from bionemo.formats.hub import base_model
from bionemo.formats.huggingface import adapter
from bionemo.formats.huggingface import directory as huggingface
from bionemo.formats.huggingface.contacts import ContactHead, check_contact_head
from bionemo.formats.nemo2 import Nemo2Directory
from bionemo.formats.nemo_models import get_nemo_model

log = logging.getLogger(__name__)


class Model(NamedTuple):
    """A trained model of any format."""

    config: Mapping[str, Any]  # `model` section of our configuration, as far as the file determines it
    vocab_size: int | None  # number of tokens without padding; None if it is not known
    weights: TensorSource  # weights by our names
    history: Mapping[str, str] = {}  # facts about the training, for the model card
    contact_head: ContactHead | None = None  # contact regression, if there is one
    vocabulary: list[str] | None = None  # identity of the vocabulary; None if it is not known


def convert(source: str | Path, target: Path, to: str | None = None) -> None:
    """Convert a trained model to another format.

    `to` is "hf" for a Hugging Face directory; None: an archive if the name of the target ends in .nemo, else a
    checkpoint.

    Raises:
        UserError: if the source cannot be read, both formats are the same, or the target exists or cannot be written.
    """
    if target.exists() or target.is_symlink():  # before a download
        raise UserError(f"{target} exists: name another target, or remove it")
    source = locate_model(source)
    source_format, target_format = detect_format(source), to or (NEMO if target.suffix == ".nemo" else CHECKPOINT)
    if source_format == target_format:
        reason = {
            CHECKPOINT: "a checkpoint needs no conversion between layouts, it is read with any tensor, pipeline and "
            "data parallel size; for a .nemo archive name TARGET.nemo, for Hugging Face give --to=hf",
            NEMO: "both are .nemo archives; name a directory to write a checkpoint",
            HUGGING_FACE: "the source already has the Hugging Face format; omit --to=hf to write a checkpoint",
        }
        raise UserError(f"{source} -> {target}: {reason[source_format]}")
    model = open_model(source)
    size = model.vocab_size
    if isinstance(model.weights, MergedLoRA):
        log.warning("%s: its prediction head is left out; head.safetensors of the run holds it", source)
    if target_format == NEMO:
        export_nemo(model, target)
        return
    if target_format == HUGGING_FACE:
        if size is None:
            raise UserError(f"{source} does not contain the size of its vocabulary, which {target} needs")
        huggingface.write(target, model.config, size, model.weights, model.contact_head, model.history)
    else:
        identity = {"model._target_": model.config["_target_"], "words": size}
        state: dict[str, Any] = {"config": dict(model.config), "model": identity, "base_model": base_model(source)}
        if model.contact_head:
            state["contact_head"] = model.contact_head
        tools.write_weights(target, state, tools.iterate_weights(model.weights))


def export_nemo(model: Model, target: Path) -> None:
    """Write the weights of a model as a `.nemo` archive, which may have any name.

    Raises:
        UserError: if the model has no `.nemo` format, or the disk is full.
    """
    config = get_nemo_model(model.config).with_vocab_size(model.config, model.vocab_size)
    text = model_card.render(target.name, model.config, model.vocab_size, model.weights, model.history)
    nemo_archive.write(target, config, dict(tools.iterate_weights(model.weights)), text)


def open_model(path: Path) -> Model:
    """Open the model at a path, in one of the formats of `detect_format`; an adapter of peft is merged with its base.

    Raises:
        UserError: if it or its base does not exist, cannot be read, or lacks the configuration of its model, or the
            adapter belongs to another base.
    """
    require_model(path)
    file_format = detect_format(path)
    if file_format == NEMO:
        archive = nemo_archive.read(path)
        nemo_model = get_nemo_model(archive.config)
        config = nemo_model.to_our_config(archive.config)
        size = nemo_model.read_vocab_size(archive.config)
        return Model(config, size, TensorsInMemory(path, archive.weights, config))
    if file_format in (HUGGING_FACE, FAIR_ESM):
        hf = huggingface.HuggingFaceModel(path, *([fair_esm.read] if file_format == FAIR_ESM else []))
        history = model_card.describe_training({"base_model": base_model(path)}, {})
        return Model(hf.config, hf.vocab_size, hf, history, hf.contact_head)
    if file_format == NEMO2:
        nemo2 = Nemo2Directory(path)
        return Model(nemo2.config, nemo2.vocab_size, nemo2)
    if file_format == ADAPTER:
        return _open_adapter(path)
    check(path)
    saved = Checkpoint(path)
    if not saved.config.get("_target_"):
        raise UserError(f"{path} does not contain the configuration of its model, which the conversion needs")
    try:
        contact_head = check_contact_head(saved.state.get("contact_head"), saved.config)
    except UserError as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}; choose another or remove it") from error
    identity: dict[str, Any] = saved.state.get("model", {})
    weights: TensorSource = MergedLoRA(saved) if "task" in identity else saved
    history = model_card.describe_training(saved.state, saved.manifest)
    config = add_defaults(saved.config, str(saved.config["_target_"]))
    vocabulary = identity.get("vocabulary")
    return Model(config, tools.read_vocabulary_size(identity), weights, history, contact_head, vocabulary)


def open_config(path: str | Path) -> Mapping[str, Any]:
    """Return the `model` section of our configuration, as far as the files of a model determine it.

    The weights of a checkpoint are not read.

    Raises:
        UserError: see `open_model`.
    """
    path, _ = find_model(path)  # the note follows when the model is opened
    if detect_format(path) == CHECKPOINT and (config := Checkpoint(path).config).get("_target_"):
        return add_defaults(config, str(config["_target_"]))
    return open_model(path).config


def _base(settings: Mapping[str, Any]) -> str:
    """Return the MODEL that an adapter of peft changes."""
    base, revision = settings["base_model_name_or_path"], settings.get("revision")
    return f"{base}@{revision}" if revision and hub_id(base) else str(base)


def _open_adapter(path: Path) -> Model:
    try:
        settings = adapter.read_settings(path)
        base_path = locate_model(_base(settings))
        if detect_format(base_path) == ADAPTER:
            raise UserError(f"its base {base_path} is an adapter: merge it first (bionemo checkpoint convert)")
        base = open_model(base_path)
        merged = adapter.MergedAdapter(path, settings, base.weights, base.config, base.vocab_size)
    except (OSError, UserError, re.error) as error:
        raise UserError(f"{path} cannot be opened with its base: {error}") from error
    return base._replace(weights=merged, history={})


def describe(path: str | Path, every_tensor: bool = False) -> str:
    """Return a text that describes a model of any format.

    Raises:
        UserError: if it cannot be read.
    """
    path = locate_model(path)
    file_format = detect_format(path)
    if file_format == CHECKPOINT:
        return tools.describe(path, every_tensor)
    model = open_model(path)
    shapes = model.weights.shapes(WEIGHTS)
    lines = {
        {
            NEMO: "archive",
            NEMO2: "NeMo 2",
            HUGGING_FACE: "Hugging Face",
            FAIR_ESM: "fair-esm",
            ADAPTER: "adapter",
        }[file_format]: str(path),
        "model": str(model.config["_target_"]),
        "parameters": tools.format_parameter_count(shapes),
        "vocabulary": f"{model.vocab_size:,} tokens",
        "layers": str(model.config.get("num_layers", "unknown")),
        "hidden size": str(model.config.get("hidden_size", "unknown")),
    }
    return tools.format_description(lines, shapes if every_tensor else {})
